"""CUDA streams of workers, ordered behind what the caller has queued."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from torchdirect.engines.cuda_driver import CudaDriver, cuda_driver

QueuedWork = Mapping[torch.device, torch.cuda.Event]
"""An event on each GPU behind everything that the caller had queued there when a call began."""


def queued_work(tensors: Sequence[torch.Tensor]) -> QueuedWork:
    """Mark what the caller has queued on each GPU so far; the engine's streams begin behind it."""
    devices = {t.device for t in tensors if t.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


class StreamPool:
    """Streams that no other part of the program uses, kept for the next call.

    PyTorch hands out 32 streams in turn: one of those may belong to somebody else's graph that is being captured.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)

    def take(self, device: torch.device) -> torch.cuda.Stream:
        """Return a stream of `device`, which is the current one of this thread."""
        with self._lock:
            if self._free[device]:
                return self._free[device].pop()
        driver = cuda_driver()
        if driver is None:
            return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.ExternalStream(driver.create_stream(), device)  # type: ignore[no-untyped-call]

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """Keep a stream that has done everything."""
        with self._lock:
            self._free[stream.device].append(stream)


stream_pool = StreamPool()

# A child process can use neither the lock nor the CUDA context that it inherited.
os.register_at_fork(after_in_child=stream_pool.__init__)  # type: ignore[misc]


class Mark(Protocol):
    """A place in what is queued on a stream."""

    def set(self, stream: torch.cuda.Stream) -> None:
        """Stand for everything that is queued on `stream` now."""
        ...

    def wait(self) -> None:
        """Wait until that has ended."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class _DriverMark:
    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._event = driver.create_event()

    def set(self, stream: torch.cuda.Stream) -> None:
        self._driver.record(self._event, stream.cuda_stream)

    def wait(self) -> None:
        self._driver.wait(self._event)

    def close(self) -> None:
        self._driver.destroy_event(self._event)


class _TorchMark:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def set(self, stream: torch.cuda.Stream) -> None:
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def close(self) -> None:
        pass


class WorkerStreams:
    """The streams of one worker, one per GPU, each ordered behind the work that the caller had queued there.

    Made and used in the worker's thread. Switching streams costs as much as starting a copy, so a worker's stream stays
    the thread's current one.

    Attributes
    ----------
    driver
        What queues copies on these streams; None where PyTorch must.
    """

    def __init__(self, ready: QueuedWork) -> None:
        self.ready = ready
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.driver = cuda_driver() if ready else None
        self._mode_before = None if self.driver is None else self.driver.exchange_capture_mode()
        self._scratch: dict[torch.device, torch.Tensor | None] = {}
        self._spare: dict[torch.device, list[Mark]] = defaultdict(list)
        self._current: torch.device | None = None
        self._before: list[torch.cuda.Stream] = []

    def use(self, device: torch.device) -> torch.cuda.Stream:
        """Make the worker's stream on `device` the current one of this thread."""
        stream = self.streams.get(device)
        if stream is None:
            if not self._before:
                self._before.append(torch.cuda.current_stream())
            self._before.append(torch.cuda.current_stream(device))
            with torch.cuda.device(device):
                if self.driver is not None:
                    self.driver.bind(device.index)
                stream = self.streams[device] = stream_pool.take(device)
            stream.wait_event(self.ready[device])
        if self._current != device:
            torch.cuda.set_stream(stream)
            self._current = device
        return stream

    def mark(self, device: torch.device) -> Mark:
        """Return a mark behind everything that is queued on `device` now; give it back with `unmark`."""
        stream = self.use(device)
        if self._spare[device]:
            mark = self._spare[device].pop()
        else:
            mark = _TorchMark() if self.driver is None else _DriverMark(self.driver)
        mark.set(stream)
        return mark

    def unmark(self, device: torch.device, mark: Mark) -> None:
        """Keep a mark for the next use on the same device."""
        self._spare[device].append(mark)

    def scratch(self, device: torch.device, nbytes: int) -> torch.Tensor | None:
        """Return device memory for one window, which belongs to the worker's stream; None if there is none left."""
        if device not in self._scratch:
            try:
                self._scratch[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                self._scratch[device] = None
        return self._scratch[device]

    def end(self) -> None:
        """Wait for everything queued, and give the thread its own streams back."""
        try:
            for stream in self.streams.values():
                stream.synchronize()
            for stream in self.streams.values():
                stream_pool.give_back(stream)
            for marks in self._spare.values():
                for mark in marks:
                    mark.close()
        finally:
            self._scratch.clear()
            for stream in reversed(self._before):
                torch.cuda.set_stream(stream)
            if self.driver is not None and self._mode_before is not None:
                self.driver.exchange_capture_mode(self._mode_before)
