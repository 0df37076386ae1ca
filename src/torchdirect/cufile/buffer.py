"""Registered buffers: device memory that stays pinned for many transfers."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import final

from . import driver
from .library import Library
from .structs import BufferFlags

_lock = threading.Lock()
_live = 0
_live_bytes = 0


def registered() -> int:
    """Return how many buffers this binding holds registered; for leak tests."""
    return _live


def registered_bytes() -> int:
    """Return how many bytes this binding holds registered."""
    return _live_bytes


def _count(buffers: int, nbytes: int) -> None:
    global _live, _live_bytes
    with _lock:
        _live += buffers
        _live_bytes += nbytes


def _deregister(library: Library, device_ptr: int, nbytes: int, owner: int) -> None:
    # After a fork the registration belongs to the parent.
    if os.getpid() != owner:
        return
    try:
        library.call("cuFileBufDeregister", device_ptr, detail=f"{nbytes} bytes at {device_ptr:#x}")
    finally:
        _count(-1, -nbytes)
        driver.release()


@final
class RegisteredBuffer:
    """Device memory registered (pinned) with cuFile.

    Registration pays when one buffer serves many transfers; a single transfer is faster without. The buffer holds the
    driver session open, and is deregistered when closed, at the end of a ``with`` block, when it is garbage, or at the
    end of the process. The memory must outlive the registration.

    Parameters
    ----------
    device_ptr, nbytes
        The range. Pinning works in 64 KiB pages of GPU memory and takes room in BAR1.
    flags
        ``CU_FILE_RDMA_*`` flags.

    Raises
    ------
    CuFileError
        5016 or 5036 when the range is too large to pin: use smaller pieces, or unregistered transfers.
    """

    def __init__(self, device_ptr: int, nbytes: int, flags: BufferFlags = BufferFlags.NONE) -> None:
        if nbytes <= 0:
            raise ValueError(f"a buffer needs at least one byte, not {nbytes}")
        self.device_ptr = device_ptr
        self.nbytes = nbytes
        library = driver.acquire()
        try:
            detail = f"{nbytes} bytes at {device_ptr:#x}"
            library.call("cuFileBufRegister", device_ptr, nbytes, int(flags), detail=detail)
        except BaseException:
            driver.release()
            raise
        _count(1, nbytes)
        self._close = weakref.finalize(self, _deregister, library, device_ptr, nbytes, os.getpid())

    @property
    def closed(self) -> bool:
        """Whether the buffer is deregistered."""
        return not self._close.alive

    def close(self) -> None:
        """Deregister; closing twice is allowed. An error of cuFile is raised, and the buffer counts as closed."""
        self._close()

    def __enter__(self) -> RegisteredBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
