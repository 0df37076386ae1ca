"""What every test shares: the double of libcufile; GPU tests are skipped, with a reason, where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from cufile_double import cufile_double, cufile_double_old, cufile_double_old_path, cufile_double_path

__all__ = ["cufile_double", "cufile_double_old", "cufile_double_old_path", "cufile_double_path"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
