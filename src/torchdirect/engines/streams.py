"""CUDA streams of workers, ordered behind what the caller has queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

QueuedWork = Mapping[torch.device, torch.cuda.Event]
"""An event on each GPU behind everything that the caller had queued there when a call began."""


class WorkerStreams:
    """The streams of one worker, one per GPU, each ordered behind the work that the caller had queued there.

    Switching streams costs as much as starting a copy, so a worker's stream stays the thread's current one.
    """

    def __init__(self, ready: QueuedWork) -> None:
        self.ready = ready
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self._scratch: dict[torch.device, torch.Tensor | None] = {}
        self._current: torch.device | None = None
        self._before: list[torch.cuda.Stream] = []

    def use(self, device: torch.device) -> torch.cuda.Stream:
        """Make the worker's stream on `device` the current one of this thread."""
        stream = self.streams.get(device)
        if stream is None:
            if not self._before:
                self._before.append(torch.cuda.current_stream())
            self._before.append(torch.cuda.current_stream(device))
            stream = self.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(self.ready[device])
        if self._current != device:
            torch.cuda.set_stream(stream)
            self._current = device
        return stream

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
        finally:
            self._scratch.clear()
            for stream in reversed(self._before):
                torch.cuda.set_stream(stream)


def queued_work(tensors: Sequence[torch.Tensor]) -> QueuedWork:
    """Mark what the caller has queued on each GPU so far; the engine's streams begin behind it."""
    devices = {t.device for t in tensors if t.is_cuda}
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}
