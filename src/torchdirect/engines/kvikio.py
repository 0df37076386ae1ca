"""The `GDS` transfer type through KvikIO, NVIDIA's own layer over cuFile, with its thread pool."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Any

from torchdirect.cufile import CuFileError, Failure
from torchdirect.engines.base import GpuFile
from torchdirect.errors import TransferUnavailableError
from torchdirect.transfer import TransferType

_REMEDY = "Install it (pip install 'torchdirect[kvikio]'), or use gds_backend='cufile'"


def open_file(transfer_type: TransferType, fd: int, path: str) -> GpuFile:
    """Open a file with KvikIO, which opens descriptors of its own.

    Parameters as for `engines.cufile.open_file`.

    Raises
    ------
    TransferUnavailableError
        If KvikIO is not installed, or cannot open the file.
    """
    name = transfer_type.name
    try:
        import kvikio
    except ImportError as exc:
        raise TransferUnavailableError(name, f"KvikIO cannot be imported: {exc}", _REMEDY) from exc
    try:
        # Whether the descriptor may write says what this call needs: a load opens its file for reading only.
        return _KvikIOFile(kvikio.CuFile(f"/proc/self/fd/{fd}", "r+" if _writable(fd) else "r"), path)
    except (OSError, RuntimeError) as exc:
        raise TransferUnavailableError(name, f"KvikIO cannot open {path}: {exc}", _REMEDY) from exc


def _writable(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY


class _Memory:
    """GPU memory as KvikIO takes it: an object with the CUDA array interface."""

    def __init__(self, address: int, nbytes: int, *, read_only: bool) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, read_only),
            "version": 3,
            "stream": None,
        }


class _KvikIOFile:
    def __init__(self, opened: Any, path: str) -> None:
        self._opened = opened
        self._path = path

    def read(self, device_ptr: int, nbytes: int, file_offset: int = 0, ptr_offset: int = 0) -> int:
        return self._transfer("pread", device_ptr + ptr_offset, nbytes, file_offset)

    def write(self, device_ptr: int, nbytes: int, file_offset: int = 0, ptr_offset: int = 0) -> int:
        return self._transfer("pwrite", device_ptr + ptr_offset, nbytes, file_offset)

    def close(self) -> None:
        self._opened.close()

    def _transfer(self, name: str, address: int, nbytes: int, file_offset: int) -> int:
        memory = _Memory(address, nbytes, read_only=False)
        try:
            return int(getattr(self._opened, name)(memory, nbytes, file_offset).get())
        except OSError as exc:
            number, text = exc.errno or errno.EIO, str(exc)
        except RuntimeError as exc:
            number, text = errno.EIO, str(exc)
        failure = Failure(0, number, "KvikIO", text, "see its message")
        raise CuFileError(failure, f"kvikio.CuFile.{name}", self._path, f"{nbytes} bytes at offset {file_offset}")
