"""The four host-path transfer types: through `O_DIRECT` or the page cache, with or without copies to a GPU.

Each worker takes windows in file order. A window that is part of one host storage moves straight between the file and
that storage; every other window goes through a staging buffer, from which GPU copies run on the worker's own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from torchdirect import memory
from torchdirect.engines.base import EngineOptions, OpenFile, TransferState
from torchdirect.engines.cached_runs import CachedRun, CachedRuns
from torchdirect.engines.checksums import Checksums, PartChecksums
from torchdirect.engines.cuda_driver import cuda_driver
from torchdirect.engines.file_io import DirectRefusedError, read_into, write_all
from torchdirect.engines.streams import Mark, QueuedWork, WorkerStreams, queued_work
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
        checksums: PartChecksums | None = None,
    ) -> None:
        """Fill `tensors` from the windows of a read plan; see `Engine.read`.

        `queued` is given where the calling thread is not the one whose queued work counts.
        """
        state.total += sum(w.nbytes for w in windows)
        ready = queued_work(tensors) if queued is None else queued
        storages = _Storages(tensors)
        runs, rest = self._cached_runs(file, windows, storages)
        job = Job(rest)
        with self._lease(windows, pinned=bool(ready)) as lease:

            def work() -> None:
                reader = _Reader(self, file, storages, describe, checksums, state, lease, WorkerStreams(ready))
                reader.run(job, runs)

            state.num_threads = self._workers(lease, windows)
            run_workers(job, [work] * state.num_threads, tick=self.tick)

    def _cached_runs(
        self, file: OpenFile, windows: Sequence[Window], storages: _Storages
    ) -> tuple[CachedRuns, Sequence[Window]]:
        """Split off the windows that the tight loop carries: each one run of bytes, all for the same GPU."""
        devices = {storages.devices[w.extents[0].storage] for w in windows if len(w.extents) == 1} - {None}
        cached = self.options.transfer_type is TransferType.CPU_CACHED_GPU
        device = devices.pop() if cached and len(devices) == 1 and cuda_driver() is not None else None
        if device is None:
            return CachedRuns(), windows
        runs, rest = [], []
        for window in windows:
            extent = window.extents[0]
            if len(window.extents) == 1 and storages.devices[extent.storage] is not None:
                runs.append(CachedRun(extent.file_offset, extent.nbytes, storages.address(extent), window))
            else:
                rest.append(window)
        return CachedRuns(runs, file.fd, device), rest

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
            storages = _Storages(tensors)

            def work() -> None:
                writer = _Writer(self, file, gaps, storages, checksums, state, lease, WorkerStreams(ready))
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


class _Storages:
    """The memory that a plan moves bytes to or from; what every window asks of it is looked up once."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.addresses = [t.data_ptr() for t in tensors]
        self.devices = [t.device if t.is_cuda else None for t in tensors]

    def address(self, extent: Extent) -> int:
        """Return the address of an extent's first byte."""
        return self.addresses[extent.storage] + extent.storage_offset

    def part(self, extent: Extent) -> torch.Tensor:
        """Return the bytes of an extent in the tensor that it belongs to."""
        tensor = self.tensors[extent.storage]
        if extent.nbytes == tensor.numel():
            return tensor
        return tensor[extent.storage_offset : extent.storage_offset + extent.nbytes]

    def on_gpus(self, extents: Sequence[Extent]) -> dict[torch.device, list[Extent]]:
        """Return those in GPU memory, by device."""
        found: dict[torch.device, list[Extent]] = {}
        for extent in extents:
            device = self.devices[extent.storage]
            if device is not None:
                found.setdefault(device, []).append(extent)
        return found


class _Worker:
    """What reading and writing share: staging buffers in turn, and the descriptor to use."""

    def __init__(
        self,
        engine: HostEngine,
        file: OpenFile,
        storages: _Storages,
        state: TransferState,
        lease: Lease,
        streams: WorkerStreams,
    ) -> None:
        self.engine = engine
        self.file = file
        self.storages = storages
        self.state = state
        self.lease = lease
        self.streams = streams
        self.direct = engine._direct and file.direct_fd is not None
        self.blocking = engine.options.transfer_type is TransferType.CPU_GPU
        self._buffers: list[StagingBuffer] = []
        self._marks: dict[int, list[tuple[torch.device, Mark]]] = {}
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
        if self.blocking:
            for device in devices:
                self.streams.use(device).synchronize()
        else:
            self._marks[id(buffer)] = [(device, self.streams.mark(device)) for device in devices]

    def wait_for(self, buffer: StagingBuffer) -> None:
        """Wait until no copy uses `buffer`."""
        for device, mark in self._marks.pop(id(buffer), ()):
            mark.wait()
            self.streams.unmark(device, mark)

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
        storages: _Storages,
        describe: Describe,
        checksums: PartChecksums | None,
        state: TransferState,
        lease: Lease,
        streams: WorkerStreams,
    ) -> None:
        super().__init__(engine, file, storages, state, lease, streams)
        self.describe = describe
        self.checksums = checksums

    def run(self, job: Job[Window], runs: CachedRuns) -> None:
        try:
            if runs:
                self._move_runs(job, runs)
            while (window := job.take()) is not None:
                extents = window.extents
                on_host = len(extents) == 1 and self.storages.devices[extents[0].storage] is None
                if not (on_host and self._read_straight(window)):
                    self._read_staged(window)
                self.state.advance(window.nbytes)
        finally:
            # Also after an error: buffers go back to the pool only when no copy uses them.
            self.streams.end()

    def _move_runs(self, job: Job[Window], runs: CachedRuns) -> None:
        driver, device = self.streams.driver, runs.device
        assert driver is not None and device is not None  # or there would be no runs
        arrived = None if self.checksums is None else self._sum
        stream = self.streams.use(device).cuda_stream
        runs.move(job, self.next_buffer, driver, stream, self.state, self._fetch, arrived)

    def _what(self, extents: Sequence[Extent]) -> Callable[[], str]:
        """Return a function that names the tensors; the search is for messages only."""

        def what() -> str:
            name = self.describe(extents[0].storage)
            return name if len(extents) == 1 else f"{name} and {len(extents) - 1} more"

        return what

    def _read_straight(self, window: Window) -> bool:
        """Read into the storage itself: whole blocks directly, ragged ends through the page cache.

        Returns False, with nothing read, where direct transfers cannot reach that memory.
        """
        extent = window.extents[0]
        address = self.storages.address(extent)
        what = self._what([extent])
        start, end = extent.file_offset, extent.end
        first = last = start
        if self.direct:
            first, last = extent.core(self.file.offset_align)
            if last == first:
                first = last = start
            elif (address + first - start) % self.file.memory_align:
                return False
        try:
            self._read(self.file.direct_fd, address + first - start, first, last - first, what)
        except DirectRefusedError:
            self.refused()
            first = last = start
        self._read(self.file.fd, address, start, first - start, what)
        self._read(self.file.fd, address + last - start, last, end - last, what)
        if self.checksums is not None:
            self.checksums.add([extent], lambda _: memory.view(address, extent.nbytes, writable=False))
        return True

    def _read(self, fd: int | None, address: int, offset: int, nbytes: int, what: Callable[[], str]) -> None:
        if nbytes and fd is not None:
            target = memory.view(address, nbytes, writable=True)
            read_into(self.file, fd, target, offset, nbytes, self.state, what)

    def _read_staged(self, window: Window) -> None:
        buffer = self.next_buffer()
        self._fetch(window, buffer)
        self._deliver(window, buffer)

    def _fetch(self, window: Window, buffer: StagingBuffer) -> None:
        """Read a window into a staging buffer."""
        what = self._what(window.extents)
        if self.direct:
            # Whole blocks: past the end of the file the kernel returns fewer bytes.
            target = buffer.memory[: align_up(window.nbytes, self.file.offset_align)]
            try:
                read_into(
                    self.file, self.file.direct_fd or 0, target, window.file_offset, window.nbytes, self.state, what
                )
            except DirectRefusedError:
                self.refused()
        if not self.direct:
            target = buffer.memory[: window.nbytes]
            read_into(self.file, self.file.fd, target, window.file_offset, window.nbytes, self.state, what)

    def _deliver(self, window: Window, buffer: StagingBuffer) -> None:
        on_gpus = self.storages.on_gpus(window.extents)
        for device, extents in on_gpus.items():
            self._copy_to_gpu(self.streams.use(device), extents, window, buffer)
        self.copies_pending(buffer, on_gpus)
        for extent in window.extents:
            if self.storages.devices[extent.storage] is None:
                source = buffer.address + extent.file_offset - window.file_offset
                memory.copy(self.storages.address(extent), source, extent.nbytes)
        if self.checksums is not None:
            self._sum(window, buffer, window.file_offset)

    def _sum(self, window: Window, buffer: StagingBuffer, start: int) -> None:
        """Take the checksums of a window while its copies run; the buffer begins at file offset `start`."""
        if self.checksums is not None:
            data = buffer.memory
            self.checksums.add(window.extents, lambda e: data[e.file_offset - start : e.end - start])

    def _copy_to_gpu(
        self, stream: torch.cuda.Stream, extents: Sequence[Extent], window: Window, buffer: StagingBuffer
    ) -> None:
        gathers = len(extents) >= _GATHER_FROM
        scratch = self.streams.scratch(stream.device, self.lease.nbytes) if gathers else None
        if scratch is not None:
            # One copy of everything between the first and the last extent, then one kernel that scatters it.
            first, last = extents[0].file_offset, max(e.end for e in extents)
            at = first - window.file_offset
            scratch = scratch[: last - first]
            scratch.copy_(buffer.tensor[at : at + last - first], non_blocking=True)
            torch._foreach_copy_([self.storages.part(e) for e in extents], _parts(scratch, extents, first))
            return
        driver = self.streams.driver
        for extent in extents:
            at = extent.file_offset - window.file_offset
            if driver is not None:
                address = self.storages.address(extent)
                driver.to_device(address, buffer.address + at, extent.nbytes, stream.cuda_stream)
            else:
                self.storages.part(extent).copy_(buffer.tensor[at : at + extent.nbytes], non_blocking=True)


def _parts(run: torch.Tensor, extents: Sequence[Extent], start: int) -> list[torch.Tensor]:
    """Return the bytes of each extent in `run`, which holds the file from offset `start`."""
    return [run[e.file_offset - start : e.file_offset - start + e.nbytes] for e in extents]


class _Writer(_Worker):
    def __init__(
        self,
        engine: HostEngine,
        file: OpenFile,
        gaps: Sequence[Gap],
        storages: _Storages,
        checksums: Checksums,
        state: TransferState,
        lease: Lease,
        streams: WorkerStreams,
    ) -> None:
        super().__init__(engine, file, storages, state, lease, streams)
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
        if window.gaps or len(window.extents) != 1 or self.storages.devices[window.extents[0].storage] is not None:
            return False
        return not self.direct or self.aligned(self.storages.address(window.extents[0]), window)

    def _write_straight(self, window: Window) -> None:
        extent = window.extents[0]
        address = self.storages.address(extent)
        self.checksums.add(window.extents, lambda _: memory.view(address, extent.nbytes, writable=False))
        self._write(address, extent.nbytes, window)

    def _write(self, address: int, nbytes: int, window: Window) -> None:
        """Write a window from memory that holds it; `nbytes` are whole blocks for direct writes."""
        if self.file.mapping is not None:
            memory.copy(self.file.mapping + window.file_offset, address, window.nbytes)
            self.state.advance(window.nbytes)
            return
        data = memory.view(address, nbytes, writable=False)
        if self.direct:
            try:
                write_all(self.file, self.file.direct_fd or 0, data, window.file_offset, self.state)
            except DirectRefusedError:
                self.refused()
        if not self.direct:
            write_all(self.file, self.file.fd, data[: window.nbytes], window.file_offset, self.state)
        self.state.advance(window.nbytes)

    def _copy_from_gpu(self, window: Window, buffer: StagingBuffer) -> None:
        on_gpus = self.storages.on_gpus(window.extents)
        for device, extents in on_gpus.items():
            stream = self.streams.use(device)
            gathers = len(extents) >= _GATHER_FROM and len(on_gpus) == 1
            scratch = self.streams.scratch(device, self.lease.nbytes) if gathers else None
            if scratch is not None:
                # Gather on the GPU, at the distances that the file wants, then one copy of the whole run.
                first, last = extents[0].file_offset, extents[-1].end
                at = first - window.file_offset
                scratch = scratch[: last - first]
                torch._foreach_copy_(_parts(scratch, extents, first), [self.storages.part(e) for e in extents])
                buffer.tensor[at : at + last - first].copy_(scratch, non_blocking=True)
                continue
            driver = self.streams.driver
            for extent in extents:
                at = extent.file_offset - window.file_offset
                if driver is not None:
                    address = self.storages.address(extent)
                    driver.from_device(buffer.address + at, address, extent.nbytes, stream.cuda_stream)
                else:
                    buffer.tensor[at : at + extent.nbytes].copy_(self.storages.part(extent), non_blocking=True)
        self.copies_pending(buffer, on_gpus)

    def _finish(self, window: Window, buffer: StagingBuffer) -> None:
        """Complete a window whose GPU bytes are on their way, and write it."""
        self.wait_for(buffer)
        start, target = window.file_offset, buffer.memory
        for extent in window.extents:
            if self.storages.devices[extent.storage] is None:
                at = buffer.address + extent.file_offset - start
                memory.copy(at, self.storages.address(extent), extent.nbytes)
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
        self._write(buffer.address, nbytes, window)
