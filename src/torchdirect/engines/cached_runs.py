"""The tight loop of loads from the page cache to a GPU.

Such a load runs at the speed of memory, with a dozen threads under one interpreter lock. A thread that finds the lock
taken sleeps, and waking it costs more than all the Python of a window, during which nobody else runs: so what counts is
how long a window holds the lock. The loop here holds it for some microseconds, where the general road of
`engines.host` takes some ten; that makes 50 GB/s of 35. It carries windows that are one run of bytes for the same GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from torchdirect.engines.base import TransferState
from torchdirect.engines.cuda_driver import CudaDriver
from torchdirect.engines.workers import Job, Stopped
from torchdirect.memory import StagingBuffer
from torchdirect.plan import Window

_BUFFERS = 2
"""Staging buffers of a worker: one is filled while the other is copied."""

_COUNT_EVERY = 8
"""Windows after which a worker tells of its progress."""


class CachedRun(NamedTuple):
    """One run of a file's bytes that belongs at one place of GPU memory.

    Attributes
    ----------
    file_offset, nbytes
        Where the bytes are.
    address
        Where they belong.
    window
        What they are a part of.
    """

    file_offset: int
    nbytes: int
    address: int
    window: Window


class CachedRuns:
    """The runs of one load, which workers take in order.

    Attributes
    ----------
    device
        The GPU that all of them belong to.
    """

    def __init__(self, runs: Sequence[CachedRun] = (), fd: int = -1, device: torch.device | None = None) -> None:
        self._runs = runs
        self._fd = fd
        self.device = device
        self._numbers = itertools.count()  # the next number is taken in one step, under the interpreter lock

    def __len__(self) -> int:
        return len(self._runs)

    def move(
        self,
        job: Job[Window],
        take_buffer: Callable[[], StagingBuffer],
        driver: CudaDriver,
        stream: int,
        state: TransferState,
        read: Callable[[Window, StagingBuffer], None],
        arrived: Callable[[Window, StagingBuffer, int], None] | None,
    ) -> None:
        """Move runs until there are none left; when this returns, the copies of this worker have ended.

        Parameters
        ----------
        job
            Ends the loop when another worker has failed.
        take_buffer
            Returns a staging buffer of this worker's own, which has two.
        driver, stream
            Where the copies are queued.
        read
            Reads a window into a buffer with everything that can go wrong; called where one plain read did not do.
        arrived
            Called with a window, its buffer, and the file offset at which the buffer begins.

        Raises
        ------
        Stopped
            If the job has failed.
        """
        runs, number, end, fd, preadv = self._runs, self._numbers.__next__, len(self._runs), self._fd, os.preadv
        to_device, record, wait = driver.to_device, driver.record, driver.wait
        buffers: list[StagingBuffer] = []
        events: list[int] = []
        turn = moved = count = 0
        try:
            while (i := number()) < end:
                if job.stopping:
                    raise Stopped
                offset, nbytes, address, window = runs[i]
                if count < _BUFFERS:
                    buffers.append(take_buffer())
                else:
                    wait(events[turn])
                buffer = buffers[turn]
                start = offset
                try:
                    complete = preadv(fd, (buffer.memory[:nbytes],), offset) == nbytes
                except OSError:
                    complete = False
                if not complete:
                    read(window, buffer)
                    start = window.file_offset
                to_device(address, buffer.address + offset - start, nbytes, stream)
                if count < _BUFFERS:
                    events.append(driver.create_event())
                record(events[turn], stream)
                if arrived is not None:
                    arrived(window, buffer, start)
                moved, count, turn = moved + window.nbytes, count + 1, (turn + 1) % _BUFFERS
                if count % _COUNT_EVERY == 0:
                    state.advance(moved)
                    moved = 0
            state.advance(moved)
        finally:
            # Also after an error: no copy may use a buffer, or reach GPU memory, when this has returned. Every event
            # stands for something: one that was not recorded is done at once.
            with contextlib.ExitStack() as ends:
                for event in events:
                    ends.callback(driver.destroy_event, event)
                    ends.callback(wait, event)
