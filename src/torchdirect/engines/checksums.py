"""The checksums of storages, from whoever sees their bytes first."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from torchdirect import checksum
from torchdirect.engines import device_checksum
from torchdirect.engines.streams import WorkerStreams
from torchdirect.engines.workers import Job
from torchdirect.plan import Extent


class PartChecksums:
    """CRC-32 of storages from their parts, in whatever order workers see them.

    Parameters
    ----------
    sizes
        Bytes of each storage. Each byte is to be seen once.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.values = [0] * len(sizes)
        self.missing = list(sizes)
        self._parts: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._lock = threading.Lock()

    def add(self, extents: Iterable[Extent], data: Callable[[Extent], memoryview]) -> None:
        """Take in the bytes of (parts of) storages."""
        seen = [(e.storage, e.storage_offset, checksum.crc32(data(e)), e.nbytes) for e in extents]
        with self._lock:
            for storage, offset, crc, nbytes in seen:
                if self.missing[storage] == nbytes and storage not in self._parts:
                    self.values[storage] = crc
                else:
                    self._parts[storage].append((offset, crc, nbytes))
                self.missing[storage] -= nbytes
                if not self.missing[storage] and storage in self._parts:
                    parts = sorted(self._parts.pop(storage))
                    self.values[storage] = checksum.combine((crc, nbytes) for _, crc, nbytes in parts)

    def know(self, storage: int, value: int) -> None:
        """Take in the checksum of a whole storage."""
        with self._lock:
            self.values[storage], self.missing[storage] = value, 0


class Checksums:
    """CRC-32 of the storages of a save: of some by the GPU that holds them, of the others from what workers see."""

    def __init__(
        self, job: Job[Any], tensors: Sequence[torch.Tensor], enabled: bool, unseen: Collection[int] = ()
    ) -> None:
        """Begin with nothing known; `unseen` are storages on GPUs whose bytes no worker will see."""
        self.on_device = [
            i
            for i, t in enumerate(tensors)
            if enabled and (i in unseen or (t.is_cuda and t.numel() >= device_checksum.FOLD_FROM))
        ]
        self._folded = set(self.on_device)
        self._tensors = tensors
        self._enabled = enabled
        self._job = job
        self._parts = PartChecksums([t.numel() if enabled else 0 for t in tensors])

    @property
    def values(self) -> Sequence[int]:
        """The checksums by storage; 0 where one is not known yet."""
        return self._parts.values

    def add(self, extents: Sequence[Extent], data: Callable[[Extent], memoryview]) -> None:
        """Take in the bytes of (parts of) storages."""
        if not self._enabled:
            return
        seen = [e for e in extents if e.storage not in self._folded]
        if seen:
            self._parts.add(seen, data)
            self._job.changed()

    def fold_on_device(self, streams: WorkerStreams) -> None:
        """Compute the checksums of the storages in `on_device`, in order."""
        try:
            for storage in self.on_device:
                if self._job.stopping:
                    return
                tensor = self._tensors[storage]
                if tensor.is_cuda:
                    streams.use(tensor.device)
                self._parts.know(storage, device_checksum.crc32(tensor))
                self._job.changed()
        finally:
            streams.end()

    def wait(self, needs: range) -> None:
        """Block until the checksums of these storages are known."""
        missing = self._parts.missing
        if needs and any(missing[i] for i in needs):
            self._job.wait_until(lambda: not any(missing[i] for i in needs))
