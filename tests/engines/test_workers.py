"""Workers that fail together, and are always gone when the call returns."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from torchdirect.engines.workers import Job, Stopped, run_workers


def consume(job: Job[int], seen: list[int]) -> Callable[[], None]:
    def work() -> None:
        while (item := job.take()) is not None:
            seen.append(item)

    return work


@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_item_once(count: int) -> None:
    job, seen = Job(range(500)), list[int]()
    assert run_workers(job, [consume(job, seen)] * count) == count
    assert sorted(seen) == list(range(500))
    assert threading.active_count() == 1


def test_the_first_error_stops_the_rest_and_is_raised() -> None:
    job, seen = Job(range(1_000_000)), list[int]()

    def fail() -> None:
        job.take()
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        run_workers(job, [fail, consume(job, seen), consume(job, seen)])
    assert len(seen) < 1_000_000
    assert threading.active_count() == 1
    with pytest.raises(Stopped):
        job.check()


def test_waiting_ends_when_another_fails() -> None:
    job: Job[int] = Job([])

    def wait() -> None:
        job.wait_until(lambda: False)

    def fail() -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        run_workers(job, [wait, fail])


def test_ticks_run_in_the_calling_thread_and_their_error_stops_the_workers() -> None:
    job, ticks = Job(range(1)), list[str]()
    release = threading.Event()

    def tick() -> None:
        ticks.append(threading.current_thread().name)
        if len(ticks) == 3:
            raise ValueError("enough")

    def work() -> None:
        while not job.stopping:
            release.wait(0.001)

    with pytest.raises(ValueError, match="enough"):
        run_workers(job, [work], tick=tick, tick_seconds=0.001)
    assert set(ticks) == {threading.main_thread().name}
    assert threading.active_count() == 1


@pytest.mark.parametrize("interrupts", [1, 3])
def test_no_interrupt_leaves_a_worker_behind(interrupts: int) -> None:
    """A worker in the middle of a transfer is waited for, however often the user presses Ctrl-C."""
    job = Job(range(1))
    main = threading.main_thread().ident
    assert main is not None
    finished = []

    def work() -> None:
        for _ in range(interrupts):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.03)
        finished.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_workers(job, [work, lambda: None])
    assert finished == [True]
    assert threading.active_count() == 1


def test_without_threads_the_caller_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    job, seen = Job(range(10)), list[int]()
    assert run_workers(job, [consume(job, seen)] * 4) == 1
    assert seen == list(range(10))
