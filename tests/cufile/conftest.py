"""Fixtures for the tests of the cuFile binding."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cufile_double import cufile_double, cufile_double_old, cufile_double_old_path, cufile_double_path

__all__ = ["cufile_double", "cufile_double_old", "cufile_double_old_path", "cufile_double_path"]


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    """A file of 64 KiB whose bytes tell their place."""
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(i // 4096 * 16 + i % 7 for i in range(65536)))
    return path
