"""Threads that share one job and fail together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818 - it reports no error, it ends a worker
    """Another worker failed; this one gives up."""


class Job(Generic[T]):
    """Items that workers take in order, and the first error among them."""

    def __init__(self, items: Sequence[T]) -> None:
        self._items = items
        self._next = 0
        self.condition = threading.Condition()
        self.error: BaseException | None = None
        self.stopping = False

    def take(self) -> T | None:
        """Return the next item, or None when there is none left.

        Raises
        ------
        Stopped
            If the job has failed.
        """
        with self.condition:
            if self.stopping:
                raise Stopped
            if self._next >= len(self._items):
                return None
            self._next += 1
            return self._items[self._next - 1]

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Block until `ready` holds; it is asked now and after each `changed`.

        Raises
        ------
        Stopped
            If the job fails meanwhile.
        """
        with self.condition:
            while not ready():
                if self.stopping:
                    raise Stopped
                self.condition.wait()

    def changed(self) -> None:
        """Let those who wait ask again."""
        with self.condition:
            self.condition.notify_all()

    def check(self) -> None:
        """Raise `Stopped` if the job has failed."""
        if self.stopping:
            raise Stopped

    def fail(self, error: BaseException) -> None:
        """Stop all workers; the first error is the one that the caller sees."""
        with self.condition:
            if self.error is None and not isinstance(error, Stopped):
                self.error = error
            self.stopping = True
            self.condition.notify_all()


def run_workers(
    job: Job[T],
    works: Sequence[Callable[[], None]],
    *,
    tick: Callable[[], None] | None = None,
    tick_seconds: float = 0.1,
) -> int:
    """Run each of `works` in a thread of its own until all have returned; return how many threads there were.

    The first error in any of them stops the rest and is raised here. So does an exception in the calling thread, such
    as KeyboardInterrupt: the workers are always gone when this returns or raises. Where no more threads are to be had,
    the calling thread does what is left.

    Parameters
    ----------
    works
        In the order in which they would have to run one after another.
    tick
        Called in the calling thread about every `tick_seconds` while the workers run.
    """

    def body(work: Callable[[], None], ended: threading.Event) -> None:
        try:
            work()
        except BaseException as exc:  # raised again below, in the calling thread
            job.fail(exc)
        finally:
            ended.set()

    started: list[tuple[threading.Thread, threading.Event]] = []
    waiting = list(works)
    try:
        while waiting and (len(works) > 1 or tick):
            name, ended = f"torchdirect-io-{len(started)}", threading.Event()
            thread = threading.Thread(target=body, args=(waiting[0], ended), name=name, daemon=True)
            started.append((thread, ended))  # first: an interrupt in start() must not lose a thread that runs
            try:
                thread.start()
            except RuntimeError:
                started.pop()
                break
            del waiting[0]
        for work in waiting:
            body(work, threading.Event())
        for _, ended in started:
            while not ended.wait(tick_seconds if tick else None):
                if tick:
                    tick()
    except BaseException as exc:
        job.fail(exc)
        raise
    finally:
        _wait_for_all(started)
    if job.error is not None:
        raise job.error
    return max(1, len(started))


def _wait_for_all(started: Sequence[tuple[threading.Thread, threading.Event]]) -> None:
    """Wait until the workers have ended, through any number of interrupts: the memory that they use may be freed next.

    Their events tell it. A `Thread.join` that is interrupted may mark a running thread as ended, up to Python 3.12.
    """
    interrupt: BaseException | None = None
    for thread, ended in started:
        while not ended.is_set():
            try:
                if not ended.wait(1.0) and thread.ident is None:
                    break  # interrupted before it came to life
            except BaseException as exc:
                interrupt = exc
        if thread.ident is not None:
            thread.join()
    if interrupt is not None:
        raise interrupt
