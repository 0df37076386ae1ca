"""Fixtures for the tests of the cuFile binding."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    """A file of 64 KiB whose bytes tell their place."""
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(i // 4096 * 16 + i % 7 for i in range(65536)))
    return path
