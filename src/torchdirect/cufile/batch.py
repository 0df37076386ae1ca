"""Batches: many transfers submitted and collected with few calls."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

from . import driver
from .errors import CuFileError, Failure, decode_completion
from .handle import FileHandle, check_range
from .library import Library
from .structs import BatchMode, BatchStatus, IOEvents, IOParams, Opcode, Timespec

_lock = threading.Lock()
_live = 0

_STATUS_FAILURES: dict[BatchStatus, tuple[str, str]] = {
    BatchStatus.INVALID: ("the entry was malformed or could not be queued", "check its sizes, offsets and alignment"),
    BatchStatus.CANCELED: ("the entry was cancelled", "submit it again if it is still wanted"),
    BatchStatus.TIMEOUT: ("the entry timed out", "retry, or raise batch_io_timeout_ms in cufile.json"),
    BatchStatus.FAILED: ("the entry failed", "look for the cause in cufile.log"),
}
_FINAL = BatchStatus.COMPLETE | BatchStatus.INVALID | BatchStatus.CANCELED | BatchStatus.TIMEOUT | BatchStatus.FAILED


def live() -> int:
    """Return how many batches exist; for leak tests."""
    return _live


@dataclass(frozen=True)
class BatchEntry:
    """One transfer of a batch. `cookie` (0 to 2**64 - 1) comes back in its event; sizes and offsets are in bytes."""

    handle: FileHandle
    opcode: Opcode
    device_ptr: int
    nbytes: int
    file_offset: int = 0
    ptr_offset: int = 0
    cookie: int = 0


@dataclass(frozen=True)
class BatchEvent:
    """What became of one entry: `result` is the bytes moved, or a negative errno or cuFile code."""

    cookie: int
    status: BatchStatus
    result: int

    @property
    def failure(self) -> Failure | None:
        """The decoded failure, or None when the entry completed (perhaps with fewer bytes than asked for)."""
        coded = decode_completion(self.result)
        if coded is not None:
            return coded
        for status, (meaning, remedy) in _STATUS_FAILURES.items():
            if status in self.status:
                return Failure(0, errno.EIO, f"CUFILE_{status.name}", meaning, remedy)
        return None

    def bytes_done(self, path: str | None = None) -> int:
        """Return the bytes moved; raises :class:`CuFileError`, naming `path`, when the entry failed."""
        failure = self.failure
        if failure is not None:
            raise CuFileError(failure, "cuFileBatchIOSubmit", path, f"entry {self.cookie}, result {self.result}")
        return self.result


def _destroy(library: Library, raw: int, owner: int) -> None:
    global _live
    # After a fork the batch belongs to the parent.
    if os.getpid() != owner:
        return
    try:
        library.function("cuFileBatchIODestroy")(raw)
    finally:
        with _lock:
            _live -= 1
        driver.release()


@final
class Batch:
    """A batch of at most `capacity` entries that may be in flight at a time; for one thread at a time.

    Collect completed entries with :meth:`poll`, then submit more. Closing cancels what is in flight.

    Parameters
    ----------
    capacity
        Entries in flight; the driver's limit is ``driver.properties().max_batch_entries``, 128 by default.

    Raises
    ------
    CuFileError
        When the capacity is over the limit, or set-up fails.
    """

    def __init__(self, capacity: int) -> None:
        global _live
        if capacity < 1:
            raise ValueError(f"a batch needs room for at least one entry, not {capacity}")
        self.capacity = capacity
        self._outstanding = 0
        # cuFile does not say how long it reads the entries, so they live until nothing is in flight.
        self._params: list[Any] = []
        self._events = (IOEvents * capacity)()
        self._library = driver.acquire()
        try:
            raw = ctypes.c_void_p()
            detail = f"{capacity} entries; the driver's limit is max_batch_entries"
            self._library.call("cuFileBatchIOSetUp", ctypes.byref(raw), capacity, detail=detail)
        except BaseException:
            driver.release()
            raise
        with _lock:
            _live += 1
        self._raw = raw.value or 0
        self._close = weakref.finalize(self, _destroy, self._library, self._raw, os.getpid())

    @property
    def outstanding(self) -> int:
        """Entries submitted whose event has not been collected."""
        return self._outstanding

    @property
    def closed(self) -> bool:
        """Whether the batch is destroyed."""
        return not self._close.alive

    def _open_raw(self) -> int:
        if not self._close.alive:
            raise ValueError("the cuFile batch is closed")
        return self._raw

    def submit(self, entries: Sequence[BatchEntry]) -> None:
        """Submit entries; does not wait for them.

        Raises
        ------
        ValueError
            When there is no room for them; nothing was submitted then.
        CuFileError
            When cuFile refuses them. cuFile does not say how many it took: close the batch.
        """
        raw = self._open_raw()
        if not entries:
            return
        if self._outstanding + len(entries) > self.capacity:
            raise ValueError(
                f"{len(entries)} entries do not fit: {self._outstanding} of {self.capacity} are in flight; "
                f"collect events with poll() first"
            )
        params = (IOParams * len(entries))()
        for slot, entry in zip(params, entries, strict=True):
            check_range(entry.nbytes, entry.file_offset, entry.ptr_offset)
            slot.mode = BatchMode.BATCH
            slot.u.batch.devPtr_base = entry.device_ptr
            slot.u.batch.file_offset = entry.file_offset
            slot.u.batch.devPtr_offset = entry.ptr_offset
            slot.u.batch.size = entry.nbytes
            slot.fh = entry.handle.raw
            slot.opcode = entry.opcode
            slot.cookie = entry.cookie
        self._params.append((params, tuple(entries)))
        # Counted before the call: an interrupt after it must leave close() with the knowledge to cancel.
        self._outstanding += len(entries)
        paths = sorted({entry.handle.path or "?" for entry in entries})
        self._library.call(
            "cuFileBatchIOSubmit",
            raw,
            len(entries),
            ctypes.byref(params),
            0,
            path=paths[0] if len(paths) == 1 else None,
            detail=f"{len(entries)} entries",
        )

    def poll(self, min_nr: int = 0, timeout: float | None = 0.0) -> list[BatchEvent]:
        """Collect events of completed entries, in any order.

        Parameters
        ----------
        min_nr
            Events to wait for, at most as many as are outstanding. cuFile may answer with fewer.
        timeout
            Seconds to wait; None passes no time-out, which leaves the limit to libcufile.

        Raises
        ------
        CuFileError
            When the state cannot be read. A failed *entry* does not raise: see :attr:`BatchEvent.failure`.
        """
        raw = self._open_raw()
        if self._outstanding == 0:
            return []
        if min_nr < 0 or (timeout is not None and timeout < 0):
            raise ValueError(f"min_nr and timeout cannot be negative: {min_nr}, {timeout}")
        limit = None
        if timeout is not None:
            seconds = int(timeout)
            limit = ctypes.byref(Timespec(seconds, int((timeout - seconds) * 1e9)))
        count = ctypes.c_uint(self._outstanding)
        wanted = min(min_nr, self._outstanding)
        events = self._events
        self._library.call("cuFileBatchIOGetStatus", raw, wanted, ctypes.byref(count), ctypes.byref(events), limit)
        done = [
            BatchEvent(event.cookie or 0, BatchStatus(event.status), event.ret)
            for event in events[: min(count.value, self.capacity)]
            if BatchStatus(event.status) & _FINAL
        ]
        self._outstanding -= min(len(done), self._outstanding)
        if self._outstanding == 0:
            self._params.clear()
        return done

    def cancel(self) -> None:
        """Ask cuFile to cancel what is in flight; the events still have to be collected."""
        self._library.call("cuFileBatchIOCancel", self._open_raw())

    def close(self) -> None:
        """Cancel what is in flight and destroy the batch; closing twice is allowed."""
        if self._close.alive and self._outstanding:
            # Destroying is what must happen; libcufile also answers an error when everything has just completed.
            with contextlib.suppress(CuFileError):
                self.cancel()
        self._close()
        self._params.clear()

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
