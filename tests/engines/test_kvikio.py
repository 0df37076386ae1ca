"""The KvikIO backend, over a stand-in for the package."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from torchdirect.cufile import CuFileError
from torchdirect.engines import open_gpu_file
from torchdirect.errors import TransferUnavailableError
from torchdirect.transfer import TransferType


class Result:
    def __init__(self, count: int) -> None:
        self._count = count

    def get(self) -> int:
        return self._count


class CuFile:
    """``kvikio.CuFile`` as its documentation describes it, over host memory."""

    def __init__(self, path: str, flags: str) -> None:
        self.fd = os.open(path, os.O_RDWR if flags == "r+" else os.O_RDONLY)

    def close(self) -> None:
        os.close(self.fd)

    def pread(self, buffer: Any, size: int, file_offset: int) -> Result:
        address, _ = buffer.__cuda_array_interface__["data"]
        data = os.pread(self.fd, size, file_offset)
        ctypes.memmove(address, data, len(data))
        return Result(len(data))

    def pwrite(self, buffer: Any, size: int, file_offset: int) -> Result:
        address, _ = buffer.__cuda_array_interface__["data"]
        assert buffer.__cuda_array_interface__["shape"] == (size,)
        return Result(os.pwrite(self.fd, ctypes.string_at(address, size), file_offset))


def test_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", types.SimpleNamespace(CuFile=CuFile))
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    tensor, back = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    file = open_gpu_file(TransferType.GDS, "kvikio", fd, "a")
    assert file.write(tensor.data_ptr(), 60, 7, 40) == 60
    assert file.read(back.data_ptr(), 100, 7, 20) == 60
    assert torch.equal(back[20:80], tensor[40:])
    file.close()
    os.close(fd)
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    file = open_gpu_file(TransferType.GDS, "kvikio", fd, "a")
    with pytest.raises(CuFileError, match=r"kvikio.*pwrite.*'a'") as caught:
        file.write(tensor.data_ptr(), 60)
    assert caught.value.errno == errno.EBADF
    file.close()
    os.close(fd)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(TransferUnavailableError, match=r"GDS.*KvikIO.*torchdirect\[kvikio\]"):
        open_gpu_file(TransferType.GDS, "kvikio", 0, "a")
