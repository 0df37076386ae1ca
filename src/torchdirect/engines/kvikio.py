"""The `GDS` transfer type through KvikIO, NVIDIA's own layer over cuFile, with its thread pool."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

from torchdirect.cufile import CuFileError, Failure
from torchdirect.engines.base import OpenFile
from torchdirect.engines.cufile import CuFileEngine, File
from torchdirect.errors import TransferUnavailableError

_REMEDY = "Install it (pip install 'torchdirect[kvikio]'), or use gds_backend='cufile'"


class KvikIOEngine(CuFileEngine):
    """Executes plans on `GDS` by ``kvikio.CuFile``; what cuFile does not carry moves as in `CuFileEngine`."""

    @contextlib.contextmanager
    def open(self, file: OpenFile) -> Iterator[File]:
        """Open a file with KvikIO, which keeps descriptors of its own.

        Raises
        ------
        TransferUnavailableError
            If KvikIO is not installed, or cannot open the file.
        """
        name = self.options.transfer_type.name
        try:
            import kvikio
        except ImportError as exc:
            raise TransferUnavailableError(name, f"KvikIO cannot be imported: {exc}", _REMEDY) from exc
        try:
            # Whether the descriptor may write says what this call needs: a load opens its file for reading only.
            opened = kvikio.CuFile(f"/proc/self/fd/{file.fd}", "r+" if _writable(file.fd) else "r")
        except (OSError, RuntimeError) as exc:
            raise TransferUnavailableError(name, f"KvikIO cannot open {file.path}: {exc}", _REMEDY) from exc
        with opened:
            yield _KvikIOFile(opened, file.path)

    def request_limit(self) -> int:
        """KvikIO cuts requests itself."""
        return self.options.chunk_bytes


def _writable(fd: int) -> bool:
    import fcntl
    import os

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
