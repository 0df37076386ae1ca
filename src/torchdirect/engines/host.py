"""The four host-path transfer types: through `O_DIRECT` or the page cache, with or without copies to a GPU.

Each worker takes windows in file order. A window that is part of one host storage moves straight between the file and
that storage; every other window goes through a staging buffer, from which GPU copies run on the worker's own stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from torchdirect import memory
from torchdirect.engines.base import EngineOptions, OpenFile, TransferState
from torchdirect.engines.checksums import Checksums
from torchdirect.engines.file_io import DirectRefusedError, read_into, write_all
from torchdirect.engines.streams import QueuedWork, WorkerStreams, queued_work
from torchdirect.engines.workers import Job, run_workers
from torchdirect.errors import TransferUnavailableError
from torchdirect.memory import Lease, StagingBuffer
from torchdirect.plan import Extent, Gap, Window, align_up
from torchdirect.transfer import TransferType

Describe = Callable[[int], str]

_GATHER_FROM = 4
"""Extents of one window on one GPU from which a single copy and a scatter on the GPU beat a copy each."""


class HostEngine:
    """Executes plans on `CPU_ONLY`, `CPU_GPU`, `CPU_ASYNC_GPU` and `CPU_CACHED_GPU`."""

    def __init__(self, options: EngineOptions, tick: Callable[[], None] | None = None) -> None:
        self.options = options
        self.tick = tick

    @property
    def _direct(self) -> bool:
        return self.options.transfer_type.uses_direct_io

    @property
    def _buffers_per_worker(self) -> int:
        """Two, so that one is read or written while the other is copied; one where each copy blocks."""
        return 1 if self.options.transfer_type in (TransferType.CPU_GPU, TransferType.CPU_ONLY) else 2

    def read(
        self,
        file: OpenFile,
        windows: Sequence[Window],
        tensors: Sequence[torch.Tensor],
        describe: Describe,
        state: TransferState,
        *,
        queued: QueuedWork | None = None,
    ) -> None:
        """Fill `tensors` from the windows of a read plan; see `Engine.read`.

        `queued` is given where the calling thread is not the one whose queued work counts.
        """
        state.total += sum(w.nbytes for w in windows)
        job = Job(windows)
        ready = queued_work(tensors) if queued is None else queued
        with self._lease(windows, pinned=bool(ready)) as lease:

            def work() -> None:
                reader = _Reader(self, file, tensors, describe, state, lease, WorkerStreams(ready))
                reader.run(job)

            state.num_threads = self._workers(lease, windows)
            run_workers(job, [work] * state.num_threads, tick=self.tick)

    def write(
        self,
        file: OpenFile,
        windows: Sequence[Window],
        gaps: Sequence[Gap],
        tensors: Sequence[torch.Tensor],
        crc: bool,
        state: TransferState,
        *,
        queued: QueuedWork | None = None,
        unseen: Collection[int] = (),
    ) -> None:
        """Write every window of a write plan; see `Engine.write`.

        `queued` as for `read`; `unseen` are storages on GPUs, by index, whose bytes others write.
        """
        state.total += sum(w.nbytes for w in windows)
        # Windows that hold checksums of other windows' bytes come last, so that nobody waits for long.
        ordered = [w for w in windows if not w.deferred] + [w for w in windows if w.deferred]
        job = Job(ordered)
        ready = queued_work(tensors) if queued is None else queued
        checksums = Checksums(job, tensors, crc, unseen)
        with self._lease(windows, pinned=bool(ready)) as lease:

            def work() -> None:
                writer = _Writer(self, file, gaps, tensors, checksums, state, lease, WorkerStreams(ready))
                writer.run(job)

            state.num_threads = self._workers(lease, windows)
            works = [work] * state.num_threads
            if checksums.on_device:
                # First: the others may wait for it. It only starts kernels, and so is not counted as a worker.
                works.insert(0, lambda: checksums.fold_on_device(WorkerStreams(ready)))
            run_workers(job, works, tick=self.tick)

    def _workers(self, lease: Lease, windows: Sequence[Window]) -> int:
        return max(1, min(lease.count // self._buffers_per_worker, len(windows)))

    def _lease(self, windows: Sequence[Window], *, pinned: bool) -> AbstractContextManager[Lease]:
        options = self.options
        wanted = min(options.num_threads, max(1, len(windows))) * self._buffers_per_worker
        return memory.staging_pool.lease(
            wanted,
            options.chunk_bytes,
            pinned=pinned,
            limit=options.staging_bytes,
            minimum=self._buffers_per_worker,
        )


class _Worker:
    """What reading and writing share: staging buffers in turn, and the descriptor to use."""

    def __init__(
        self,
        engine: HostEngine,
        file: OpenFile,
        tensors: Sequence[torch.Tensor],
        state: TransferState,
        lease: Lease,
        streams: WorkerStreams,
    ) -> None:
        self.engine = engine
        self.file = file
        self.tensors = tensors
        self.on_gpu = [t.is_cuda for t in tensors]
        self.state = state
        self.lease = lease
        self.streams = streams
        self.direct = engine._direct and file.direct_fd is not None
        self.blocking = engine.options.transfer_type is TransferType.CPU_GPU
        self._buffers: list[StagingBuffer] = []
        self._events: dict[int, list[tuple[torch.device, torch.cuda.Event]]] = defaultdict(list)
        self._spare_events: dict[torch.device, list[torch.cuda.Event]] = defaultdict(list)
        self._turn = 0

    def next_buffer(self) -> StagingBuffer:
        """Return the staging buffer whose last copies are the oldest, once they are done."""
        per_worker = self.engine._buffers_per_worker
        self._turn = (self._turn + 1) % per_worker
        if len(self._buffers) < per_worker:
            self._turn = len(self._buffers)
            self._buffers.append(self.lease.take())
            return self._buffers[-1]
        buffer = self._buffers[self._turn]
        self.wait_for(buffer)
        return buffer

    def copies_pending(self, buffer: StagingBuffer, devices: Iterable[torch.device]) -> None:
        """Remember that copies to or from `buffer` run on these devices; wait for them where copies block."""
        for device in devices:
            stream = self.streams.use(device)
            if self.blocking:
                stream.synchronize()
                continue
            event = self._spare_events[device].pop() if self._spare_events[device] else torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            self._events[id(buffer)].append((device, event))

    def wait_for(self, buffer: StagingBuffer) -> None:
        """Wait until no copy uses `buffer`."""
        for device, event in self._events.pop(id(buffer), ()):
            event.synchronize()
            self._spare_events[device].append(event)

    def refused(self) -> None:
        """Go on through the page cache after the file system refused a direct transfer, if that is allowed."""
        if self.engine.options.strict:
            raise TransferUnavailableError(
                self.engine.options.transfer_type.name,
                f"the file system of {self.file.path} refuses direct transfers (EINVAL)",
                "Use transfer_type='AUTO' or 'CPU_CACHED_GPU', or fallback='warn'",
            )
        self.direct = False
        self.state.fell_back("the file system refuses direct transfers (EINVAL); went on through the page cache")

    def aligned(self, address: int, window: Window) -> bool:
        """Whether the window can move directly between the file and `address`."""
        return (
            address % self.file.memory_align == 0
            and window.file_offset % self.file.offset_align == 0
            and window.nbytes % self.file.offset_align == 0
        )


class _Reader(_Worker):
    def __init__(
        self,
        engine: HostEngine,
        file: OpenFile,
        tensors: Sequence[torch.Tensor],
        describe: Describe,
        state: TransferState,
        lease: Lease,
        streams: WorkerStreams,
    ) -> None:
        super().__init__(engine, file, tensors, state, lease, streams)
        self.describe = describe

    def run(self, job: Job[Window]) -> None:
        try:
            while (window := job.take()) is not None:
                extents = window.extents
                if len(extents) == 1 and not self.on_gpu[extents[0].storage]:
                    self._read_straight(window)
                else:
                    self._read_staged(window)
                self.state.advance(window.nbytes)
        finally:
            # Also after an error: buffers go back to the pool only when no copy uses them.
            self.streams.end()

    def _what(self, extents: Sequence[Extent]) -> Callable[[], str]:
        """Return a function that names the tensors; the search is for messages only."""

        def what() -> str:
            name = self.describe(extents[0].storage)
            return name if len(extents) == 1 else f"{name} and {len(extents) - 1} more"

        return what

    def _read_straight(self, window: Window) -> None:
        """Read into the storage itself: whole blocks directly, ragged ends through the page cache."""
        extent = window.extents[0]
        address = self.tensors[extent.storage].data_ptr() + extent.storage_offset
        what = self._what([extent])
        start, end = extent.file_offset, extent.end
        if self.direct:
            first, last = extent.core(self.file.offset_align)
            if last > first and (address + first - start) % self.file.memory_align == 0:
                try:
                    self._read(self.file.direct_fd, address + first - start, first, last - first, what)
                except DirectRefusedError:
                    self.refused()
                else:
                    self._read(self.file.fd, address, start, first - start, what)
                    self._read(self.file.fd, address + last - start, last, end - last, what)
                    return
            elif last > first:
                self._read_staged(window)
                return
        self._read(self.file.fd, address, start, end - start, what)

    def _read(self, fd: int | None, address: int, offset: int, nbytes: int, what: Callable[[], str]) -> None:
        if nbytes and fd is not None:
            target = memory.view(address, nbytes, writable=True)
            read_into(self.file, fd, target, offset, nbytes, self.state, what)

    def _read_staged(self, window: Window) -> None:
        buffer = self.next_buffer()
        what = self._what(window.extents)
        if self.direct:
            # Whole blocks: past the end of the file the kernel returns fewer bytes.
            nbytes = align_up(window.nbytes, self.file.offset_align)
            target = memory.view(buffer.address, nbytes, writable=True)
            try:
                read_into(
                    self.file, self.file.direct_fd or 0, target, window.file_offset, window.nbytes, self.state, what
                )
            except DirectRefusedError:
                self.refused()
        if not self.direct:
            self._read(self.file.fd, buffer.address, window.file_offset, window.nbytes, what)
        self._deliver(window, buffer)

    def _deliver(self, window: Window, buffer: StagingBuffer) -> None:
        on_gpu: dict[torch.device, list[Extent]] = defaultdict(list)
        for extent in window.extents:
            tensor = self.tensors[extent.storage]
            if not tensor.is_cuda:
                target = tensor.data_ptr() + extent.storage_offset
                memory.copy(target, buffer.address + extent.file_offset - window.file_offset, extent.nbytes)
            else:
                on_gpu[tensor.device].append(extent)
        for device, extents in on_gpu.items():
            self.streams.use(device)
            self._copy_to_gpu(device, extents, window, buffer)
        self.copies_pending(buffer, on_gpu)

    def _copy_to_gpu(
        self, device: torch.device, extents: Sequence[Extent], window: Window, buffer: StagingBuffer
    ) -> None:
        targets = [_part(self.tensors, e) for e in extents]
        scratch = self.streams.scratch(device, self.lease.nbytes) if len(extents) >= _GATHER_FROM else None
        if scratch is None:
            for target, extent in zip(targets, extents, strict=True):
                at = extent.file_offset - window.file_offset
                target.copy_(buffer.tensor[at : at + extent.nbytes], non_blocking=True)
            return
        # One copy of everything between the first and the last extent, then one kernel that scatters it.
        first, last = extents[0].file_offset, max(e.end for e in extents)
        at = first - window.file_offset
        scratch = scratch[: last - first]
        scratch.copy_(buffer.tensor[at : at + last - first], non_blocking=True)
        torch._foreach_copy_(targets, _parts(scratch, extents, first))


def _part(tensors: Sequence[torch.Tensor], extent: Extent) -> torch.Tensor:
    """Return the bytes of an extent in the tensor that it belongs to."""
    tensor = tensors[extent.storage]
    if extent.nbytes == tensor.numel():
        return tensor
    return tensor[extent.storage_offset : extent.storage_offset + extent.nbytes]


def _parts(run: torch.Tensor, extents: Sequence[Extent], start: int) -> list[torch.Tensor]:
    """Return the bytes of each extent in `run`, which holds the file from offset `start`."""
    return [run[e.file_offset - start : e.file_offset - start + e.nbytes] for e in extents]


class _Writer(_Worker):
    def __init__(
        self,
        engine: HostEngine,
        file: OpenFile,
        gaps: Sequence[Gap],
        tensors: Sequence[torch.Tensor],
        checksums: Checksums,
        state: TransferState,
        lease: Lease,
        streams: WorkerStreams,
    ) -> None:
        super().__init__(engine, file, tensors, state, lease, streams)
        self.gaps = gaps
        self.checksums = checksums

    def run(self, job: Job[Window]) -> None:
        ahead = self.engine._buffers_per_worker > 1
        pending: tuple[Window, StagingBuffer] | None = None
        try:
            while (window := job.take()) is not None:
                if self._straight(window):
                    self._write_straight(window)
                    continue
                buffer = self.next_buffer()
                self._copy_from_gpu(window, buffer)
                if pending is not None:
                    self._finish(*pending)
                pending = (window, buffer)
                if not ahead:
                    self._finish(*pending)
                    pending = None
            if pending is not None:
                self._finish(*pending)
        finally:
            self.streams.end()

    def _straight(self, window: Window) -> bool:
        """Whether the window is nothing but a part of one host storage that can be written from where it is."""
        if window.gaps or len(window.extents) != 1 or self.on_gpu[window.extents[0].storage]:
            return False
        extent = window.extents[0]
        address = self.tensors[extent.storage].data_ptr() + extent.storage_offset
        return not self.direct or self.aligned(address, window)

    def _write_straight(self, window: Window) -> None:
        extent = window.extents[0]
        address = self.tensors[extent.storage].data_ptr() + extent.storage_offset
        data = memory.view(address, extent.nbytes, writable=False)
        self.checksums.add(window.extents, lambda _: data)
        self._write(data, window)

    def _write(self, data: memoryview, window: Window) -> None:
        if self.direct:
            try:
                write_all(self.file, self.file.direct_fd or 0, data, window.file_offset, self.state)
            except DirectRefusedError:
                self.refused()
        if not self.direct:
            write_all(self.file, self.file.fd, data[: window.nbytes], window.file_offset, self.state)
        self.state.advance(window.nbytes)

    def _copy_from_gpu(self, window: Window, buffer: StagingBuffer) -> None:
        on_gpu: dict[torch.device, list[Extent]] = defaultdict(list)
        for extent in window.extents:
            tensor = self.tensors[extent.storage]
            if tensor.is_cuda:
                on_gpu[tensor.device].append(extent)
        for device, extents in on_gpu.items():
            self.streams.use(device)
            sources = [_part(self.tensors, e) for e in extents]
            gathers = len(extents) >= _GATHER_FROM and len(on_gpu) == 1
            scratch = self.streams.scratch(device, self.lease.nbytes) if gathers else None
            if scratch is None:
                for extent, source in zip(extents, sources, strict=True):
                    at = extent.file_offset - window.file_offset
                    buffer.tensor[at : at + extent.nbytes].copy_(source, non_blocking=True)
                continue
            # Gather on the GPU, at the distances that the file wants, then one copy of the whole run.
            first, last = extents[0].file_offset, extents[-1].end
            at = first - window.file_offset
            scratch = scratch[: last - first]
            torch._foreach_copy_(_parts(scratch, extents, first), sources)
            buffer.tensor[at : at + last - first].copy_(scratch, non_blocking=True)
        self.copies_pending(buffer, on_gpu)

    def _finish(self, window: Window, buffer: StagingBuffer) -> None:
        """Complete a window whose GPU bytes are on their way, and write it."""
        self.wait_for(buffer)
        start = window.file_offset
        for extent in window.extents:
            if not self.on_gpu[extent.storage]:
                source = self.tensors[extent.storage].data_ptr() + extent.storage_offset
                memory.copy(buffer.address + extent.file_offset - start, source, extent.nbytes)
        target = memory.view(buffer.address, buffer.nbytes, writable=True)
        self.checksums.add(window.extents, lambda e: target[e.file_offset - start : e.end - start])
        for index, offset, nbytes in window.gaps:
            gap = self.gaps[index]
            self.checksums.wait(gap.needs)
            data = gap.render(self.checksums.values)
            skip = offset - gap.file_offset
            at = offset - window.file_offset
            target[at : at + nbytes] = data[skip : skip + nbytes]
        nbytes = window.nbytes
        if self.direct:
            nbytes = align_up(nbytes, self.file.offset_align)
            target[window.nbytes : nbytes] = bytes(nbytes - window.nbytes)
        self._write(target[:nbytes], window)
