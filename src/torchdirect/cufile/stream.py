"""Transfers in CUDA stream order.

``cuFileReadAsync`` reads its size and offsets, and stores its result, through pointers *while the stream runs*. That
memory must live until then whatever Python does, so it is kept in a table of this module and leaves it only when the
result has been read (:meth:`AsyncRequest.result`) or the caller vouches for the stream (:meth:`AsyncRequest.discard`).
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from types import TracebackType
from typing import final

from . import driver
from .errors import CuFileError, decode_completion
from .handle import FileHandle, check_range
from .library import Library
from .structs import AsyncArguments, StreamFlags

# No transfer returns this value, so as long as it stands, the stream has not come to the request.
_UNSET = -(1 << 63)

_lock = threading.Lock()
_live = 0
_pending: dict[int, tuple[AsyncArguments, FileHandle]] = {}


def registered() -> int:
    """Return how many streams this binding holds registered; for leak tests."""
    return _live


def pending() -> int:
    """Return how many requests still keep their argument memory; for leak tests."""
    return len(_pending)


def _deregister(library: Library, stream: int, owner: int) -> None:
    global _live
    # After a fork the registration belongs to the parent.
    if os.getpid() != owner:
        return
    try:
        library.call("cuFileStreamDeregister", stream, detail=f"stream {stream:#x}")
    finally:
        with _lock:
            _live -= 1
        driver.release()


@final
class RegisteredStream:
    """A CUDA stream registered with cuFile, which makes requests on it cheaper; registration is optional.

    Deregister (close) before the stream is destroyed, and after CUDA errors on it.

    Parameters
    ----------
    stream
        The ``CUstream`` as an integer; 0 is the default stream.
    flags
        What the caller promises about every request on the stream.

    Raises
    ------
    CuFileUnsupportedError
        When libcufile has no stream functions (before CUDA 12.2).
    """

    def __init__(self, stream: int, flags: StreamFlags = StreamFlags.NONE) -> None:
        global _live
        self.raw = stream
        library = driver.acquire()
        try:
            library.function("cuFileStreamDeregister")
            library.call("cuFileStreamRegister", stream, int(flags), detail=f"stream {stream:#x}")
        except BaseException:
            driver.release()
            raise
        with _lock:
            _live += 1
        self._close = weakref.finalize(self, _deregister, library, stream, os.getpid())

    @property
    def closed(self) -> bool:
        """Whether the stream is deregistered."""
        return not self._close.alive

    def close(self) -> None:
        """Deregister; closing twice is allowed."""
        self._close()

    def __enter__(self) -> RegisteredStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncRequest:
    """A transfer that a stream has been given. Read its :meth:`result` after the stream has run."""

    def __init__(self, function: str, handle: FileHandle, arguments: AsyncArguments) -> None:
        self.function = function
        self.handle = handle
        self.nbytes = int(arguments.size)
        self.file_offset = int(arguments.file_offset)
        self._arguments = arguments

    @property
    def ready(self) -> bool:
        """Whether the stream has stored a result."""
        return bool(self._arguments.bytes_done != _UNSET)

    def result(self) -> int:
        """Return the bytes moved and let go of the argument memory.

        Call it after the stream, or an event recorded behind the request, was synchronised. It may be called again.

        Returns
        -------
        int
            Bytes moved, perhaps fewer than `nbytes`: then go on from there.

        Raises
        ------
        RuntimeError
            When the stream has not come to the request yet; the memory stays.
        CuFileError
            When the transfer failed.
        """
        value = int(self._arguments.bytes_done)
        if value == _UNSET:
            raise RuntimeError(
                f"{self.function} of {self.handle.path!r} has no result yet; synchronise the stream before result()"
            )
        self.discard()
        failure = decode_completion(value)
        if failure is not None:
            detail = f"stored {value} for {self.nbytes} bytes at offset {self.file_offset}"
            raise CuFileError(failure, self.function, self.handle.path, detail)
        return value

    def discard(self) -> None:
        """Let go of the argument memory without a result.

        Allowed only when the stream can no longer run the request: it is synchronised, or in a CUDA error.
        """
        _pending.pop(ctypes.addressof(self._arguments), None)


def read_async(
    handle: FileHandle, device_ptr: int, nbytes: int, file_offset: int = 0, ptr_offset: int = 0, *, stream: int
) -> AsyncRequest:
    """Queue a read from a file into device memory on a CUDA stream; does not block.

    Parameters
    ----------
    handle
        The file, to stay open until the stream has run.
    device_ptr, nbytes, file_offset, ptr_offset
        As for :meth:`FileHandle.read`.
    stream
        The ``CUstream`` as an integer; 0 is the default stream.

    Raises
    ------
    CuFileUnsupportedError
        When libcufile has no stream functions (before CUDA 12.2).
    CuFileError
        When the request is refused; nothing was queued then.
    """
    return _submit("cuFileReadAsync", handle, device_ptr, nbytes, file_offset, ptr_offset, stream)


def write_async(
    handle: FileHandle, device_ptr: int, nbytes: int, file_offset: int = 0, ptr_offset: int = 0, *, stream: int
) -> AsyncRequest:
    """Queue a write of device memory into a file on a CUDA stream; see :func:`read_async`.

    The write is ordered behind the work that is on the stream already.
    """
    return _submit("cuFileWriteAsync", handle, device_ptr, nbytes, file_offset, ptr_offset, stream)


def _submit(
    function: str, handle: FileHandle, device_ptr: int, nbytes: int, file_offset: int, ptr_offset: int, stream: int
) -> AsyncRequest:
    check_range(nbytes, file_offset, ptr_offset)
    raw = handle.raw
    arguments = AsyncArguments(nbytes, file_offset, ptr_offset, _UNSET)
    base = ctypes.addressof(arguments)
    library = driver.acquire()
    try:
        call = library.function(function)
        # In the table before the call: an interrupt right after it must not free what the stream will write to.
        _pending[base] = (arguments, handle)
        status = call(
            raw,
            device_ptr,
            base + AsyncArguments.size.offset,
            base + AsyncArguments.file_offset.offset,
            base + AsyncArguments.ptr_offset.offset,
            base + AsyncArguments.bytes_done.offset,
            stream,
        )
    except ctypes.ArgumentError:
        # Raised while arguments are converted, so nothing was queued.
        _pending.pop(base, None)
        raise
    finally:
        driver.release()
    request = AsyncRequest(function, handle, arguments)
    if status.err:
        request.discard()
        handle.check(status, function, f"{nbytes} bytes at offset {file_offset}")
    return request
