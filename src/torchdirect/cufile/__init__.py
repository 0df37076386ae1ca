"""A binding of libcufile, NVIDIA's GPUDirect Storage library, and nothing else.

Device memory is named by its address, files by their descriptor. Nothing is loaded at import; the first use opens
libcufile. Errors are :class:`CuFileError` when a call fails and :class:`CuFileUnavailableError` when cuFile cannot be
used here; both say why and what helps.

>>> from torchdirect import cufile
>>> with cufile.FileHandle(fd) as handle:                                   # doctest: +SKIP
...     handle.read(tensor.data_ptr(), tensor.nbytes, file_offset=4096)
"""

from __future__ import annotations

from . import batch, buffer, driver, errors, handle, library, stream, structs
from .batch import Batch, BatchEntry, BatchEvent
from .buffer import RegisteredBuffer
from .driver import DriverProperties, ProbeResult, probe
from .errors import (
    CuFileError,
    CuFileNotFoundError,
    CuFileUnavailableError,
    CuFileUnsupportedError,
    Failure,
)
from .handle import FileHandle
from .library import LibraryLocation, Version, find, has
from .stream import AsyncRequest, RegisteredStream, read_async, write_async
from .structs import BatchStatus, BufferFlags, Opcode, StreamFlags

__all__ = [
    "AsyncRequest",
    "Batch",
    "BatchEntry",
    "BatchEvent",
    "BatchStatus",
    "BufferFlags",
    "CuFileError",
    "CuFileNotFoundError",
    "CuFileUnavailableError",
    "CuFileUnsupportedError",
    "DriverProperties",
    "Failure",
    "FileHandle",
    "LibraryLocation",
    "Opcode",
    "ProbeResult",
    "RegisteredBuffer",
    "RegisteredStream",
    "StreamFlags",
    "Version",
    "batch",
    "buffer",
    "driver",
    "errors",
    "find",
    "handle",
    "has",
    "library",
    "probe",
    "read_async",
    "stream",
    "structs",
    "write_async",
]
