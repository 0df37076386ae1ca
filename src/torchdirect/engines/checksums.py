"""The checksums of a save, from whoever sees the bytes first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from torchdirect import checksum
from torchdirect.engines import device_checksum
from torchdirect.engines.streams import WorkerStreams
from torchdirect.engines.workers import Job
from torchdirect.plan import Extent


class Checksums:
    """CRC-32 of every storage: of some by the GPU that holds them, of the others from the parts that workers see."""

    def __init__(
        self, job: Job[Any], tensors: Sequence[torch.Tensor], enabled: bool, unseen: Collection[int] = ()
    ) -> None:
        """Begin with nothing known; `unseen` are storages on GPUs whose bytes no worker will see."""
        self.values = [0] * len(tensors)
        self.on_device = [
            i
            for i, t in enumerate(tensors)
            if enabled and (i in unseen or (t.is_cuda and t.numel() >= device_checksum.FOLD_FROM))
        ]
        self._folded = set(self.on_device)
        self._tensors = tensors
        self._enabled = enabled
        self._job = job
        self._missing = [t.numel() if enabled else 0 for t in tensors]
        self._parts: dict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def add(self, extents: Sequence[Extent], data: Callable[[Extent], memoryview]) -> None:
        """Take in the bytes of (parts of) storages."""
        if not self._enabled:
            return
        seen = [
            (e.storage, e.storage_offset, checksum.crc32(data(e)), e.nbytes)
            for e in extents
            if e.storage not in self._folded
        ]
        if not seen:
            return
        with self._job.condition:
            for storage, offset, crc, nbytes in seen:
                if self._missing[storage] == nbytes and storage not in self._parts:
                    self.values[storage] = crc
                else:
                    self._parts[storage].append((offset, crc, nbytes))
                self._missing[storage] -= nbytes
                if not self._missing[storage] and storage in self._parts:
                    parts = sorted(self._parts.pop(storage))
                    self.values[storage] = checksum.combine((crc, nbytes) for _, crc, nbytes in parts)
            self._job.condition.notify_all()

    def fold_on_device(self, streams: WorkerStreams) -> None:
        """Compute the checksums of the storages in `on_device`, in order."""
        try:
            for storage in self.on_device:
                if self._job.stopping:
                    return
                tensor = self._tensors[storage]
                if tensor.is_cuda:
                    streams.use(tensor.device)
                value = device_checksum.crc32(tensor)
                with self._job.condition:
                    self.values[storage] = value
                    self._missing[storage] = 0
                    self._job.condition.notify_all()
        finally:
            streams.end()

    def wait(self, needs: range) -> None:
        """Block until the checksums of these storages are known."""
        if needs and any(self._missing[i] for i in needs):
            self._job.wait_until(lambda: not any(self._missing[i] for i in needs))
