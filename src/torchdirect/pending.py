"""Saves that go on in the background: their futures, and the thread that writes them.

One thread of the process writes pending saves one after another, in the order of the calls. It lives while there are
any, and is no daemon: the interpreter waits for it before it exits. A forked child has no pending saves.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torchdirect.transfer import TransferReport

logger = logging.getLogger("torchdirect")


class PendingSave(concurrent.futures.Future[TransferReport]):
    """A save that goes on in the background; made by `save_async`.

    A future of the save's `TransferReport`. It cannot be cancelled. An error that nobody asks for, by `result` or
    `exception`, is logged when the object dies, or when the interpreter exits.

    Attributes
    ----------
    path
        The file.
    staging
        ``"host"`` or ``"device"``: where the bytes of GPU tensors are kept until they are written.
    snapshot_bytes
        Bytes that were copied.
    stall_seconds
        How long the call took that made it. Copies from a GPU are queued by then, not done.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.staging = "host"
        self.snapshot_bytes = 0
        self.stall_seconds = 0.0
        self._asked = False

    @property
    def report(self) -> TransferReport | None:
        """What the save really did; None before it has ended, and if it failed."""
        if not self.done() or super().exception() is not None:
            return None
        return super().result()

    def result(self, timeout: float | None = None) -> TransferReport:
        """Wait until the file is published; return the report.

        Parameters
        ----------
        timeout
            Seconds to wait at most; None waits for as long as it takes.

        Raises
        ------
        TimeoutError
            (``concurrent.futures.TimeoutError``) if it has not ended by then; it goes on.
        SaveError, TransferUnavailableError
            As `save` raises them. An old file of that name is untouched.
        """
        self._ask(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended; return its error, or None. Parameters and `TimeoutError` as for `result`."""
        self._ask(timeout)
        return super().exception(timeout)

    def _ask(self, timeout: float | None) -> None:
        concurrent.futures.wait([self], timeout)
        self._asked = self._asked or self.done()

    def cancel(self) -> bool:
        """Return False: what has been copied will be written."""
        return False

    def disinherit(self) -> None:
        """End a future that a child process has inherited."""
        self._condition = threading.Condition()  # the parent's writer may have held it
        self._asked = True
        message = f"{self.path}: this save was pending in the parent process when it forked; ask for it there"
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.set_exception(RuntimeError(message))

    def log_unasked(self) -> None:
        """Log an error that nobody has asked for, once."""
        if self._asked or not self.done():
            return
        self._asked = True
        error = super().exception()
        if error is not None:
            logger.error("background save of %s failed, and nobody asked for its result: %s", self.path, error)

    def __del__(self) -> None:
        self.log_unasked()


@dataclass(frozen=True)
class Job:
    """One pending save.

    Attributes
    ----------
    target
        Real path of the file.
    future
        What the caller waits for.
    write
        Writes the file, and returns its report.
    abandon
        Lets go of everything, where `write` will not be called.
    """

    target: str
    future: PendingSave
    write: Callable[[], TransferReport]
    abandon: Callable[[], None]


class Writer:
    """The pending saves of this process, and the thread that writes them.

    Attributes
    ----------
    calls
        To be held from the first look at the pending saves to `submit`, so that they have the order of their calls.
    """

    def __init__(self) -> None:
        self._inherited: list[Job] = []
        self._start()

    def _start(self) -> None:
        self.calls = threading.Lock()
        self._condition = threading.Condition()
        self._jobs: collections.deque[Job] = collections.deque()  # the first one is being written
        self._thread: threading.Thread | None = None
        self._failed: weakref.WeakSet[PendingSave] = weakref.WeakSet()

    def pending(self, path: str | None = None) -> list[PendingSave]:
        """Return the saves that have not ended: all of them, or those to one file."""
        with self._condition:
            if not self._jobs:
                return []
            target = None if path is None else os.path.realpath(path)
            return [job.future for job in self._jobs if target is None or job.target == target]

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one that writes, as in a callback of a future: it must not wait for it."""
        return self._thread is threading.current_thread()

    def wait_for(self, path: str) -> None:
        """Wait until no save to a file is pending, so that what is written to it next comes last."""
        if self._jobs and not self.is_here:
            concurrent.futures.wait(self.pending(path))

    def submit(self, job: Job) -> None:
        """Let a save be written; where no thread is to be had, this call writes it."""
        job.future.set_running_or_notify_cancel()
        with self._condition:
            self._jobs.append(job)
            if self._thread is not None:
                return
            thread = self._thread = threading.Thread(target=self._run, name="torchdirect-writer", daemon=False)
        try:
            if threading.main_thread().is_alive():  # or the interpreter, on its way out, waits for no new thread
                thread.start()
                return
        except RuntimeError:
            pass  # there are no more threads
        except BaseException:
            self._call_off(thread, job)
            raise
        with self._condition:
            self._thread = threading.current_thread()
        self._run()

    def _call_off(self, thread: threading.Thread, job: Job) -> None:
        """After an interrupt while a thread was started: leave the job to it if it lives, or forget both."""
        with self._condition:
            if thread.is_alive():
                return
            self._thread = None  # should it come to life yet, it ends
            self._jobs.remove(job)
            self._condition.notify_all()
        job.abandon()

    def _run(self) -> None:
        while True:
            with self._condition:
                if self._thread is not threading.current_thread():
                    return
                if not self._jobs:
                    self._thread = None
                    self._condition.notify_all()
                    return
                job = self._jobs[0]
            report: TransferReport | None = None
            error: BaseException | None = None
            try:
                report = job.write()
            except BaseException as exc:  # raised where it is asked for
                error = exc
                _clear_frames(exc)
                self._failed.add(job.future)
            with self._condition:
                self._jobs.popleft()
            if report is not None:
                job.future.set_result(report)
            else:
                job.future.set_exception(error)
            del job, report, error

    def drain(self) -> None:
        """Wait until every pending save has ended, and the thread with them."""
        if self.is_here:
            return
        with self._condition:
            thread = self._thread
            while self._thread is not None:
                self._condition.wait()  # and not join: interrupted, that may take a running thread for ended
        if thread is not None:
            thread.join()

    def log_unasked(self) -> None:
        """Log the errors that nobody has asked for."""
        for future in list(self._failed):
            future.log_unasked()

    def reset_after_fork(self) -> None:
        """Begin anew in a child process: the thread and the pending saves are the parent's alone."""
        jobs = list(self._jobs)
        self._inherited += jobs  # kept: their memory is not to be unmapped here
        self._start()
        for job in jobs:
            job.future.disinherit()


def _clear_frames(error: BaseException) -> None:
    """Let go of what the frames of an error and of its causes hold: the snapshot, mostly."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        traceback.clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__


writer = Writer()
os.register_at_fork(after_in_child=writer.reset_after_fork)
atexit.register(writer.log_unasked)  # runs when the interpreter has waited for the thread
