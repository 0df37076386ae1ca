"""Copies of tensors as they are at one moment, for a save that goes on while they change.

A snapshot lies in one host buffer of a pool of its own, reused from save to save, since pinning memory takes many times
as long as the copy; or in memory of the GPU that the tensors are on. Copies from a GPU are queued on the caller's
current stream: what the caller queues there afterwards may change the tensors.
"""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from torchdirect import memory, system
from torchdirect.defaults import Settings
from torchdirect.engines.cuda_driver import CudaDriver, cuda_driver
from torchdirect.engines.workers import Job, run_workers
from torchdirect.errors import SaveError, SettingsError
from torchdirect.memory import StagingBuffer
from torchdirect.plan import align_up
from torchdirect.road import TransferFallbackWarning
from torchdirect.units import BLOCK, MIB, format_bytes

LARGE_BYTES = 2 * MIB
"""Storages of this size are copied by themselves; smaller ones on a GPU are gathered there, and copied in one run."""

_GATHER_BYTES = 64 * MIB
"""GPU memory that small storages are gathered in, run by run."""

_SMALL_ALIGNMENT = 64

_PIECE_BYTES = 16 * MIB
"""What one thread copies of host memory before it looks for more."""

_COPY_THREADS = 8

_DEVICE_SHARE = 2
"""``staging="auto"`` takes GPU memory only if this many times the snapshot is free."""


def place(sizes: Sequence[int], file_offsets: Sequence[int], large_bytes: int = LARGE_BYTES) -> tuple[list[int], int]:
    """Return where each storage begins in one buffer, and the bytes of that buffer.

    A large storage has the same place in a 4 KiB block as in the file, so that it can be written from where it is. The
    small ones follow each other behind all large ones, in the order given.

    Parameters
    ----------
    sizes, file_offsets
        Bytes of each storage, and where its first byte will be in the file.
    large_bytes
        From which size on a storage is large.
    """
    places = [0] * len(sizes)
    position = 0
    for i, (nbytes, offset) in enumerate(zip(sizes, file_offsets, strict=True)):
        if nbytes >= large_bytes:
            places[i] = align_up(position, BLOCK) + offset % BLOCK
            position = places[i] + nbytes
    for i, nbytes in enumerate(sizes):
        if nbytes < large_bytes:
            places[i] = align_up(position, _SMALL_ALIGNMENT)
            position = places[i] + nbytes
    return places, position


@dataclass
class Snapshot:
    """Storages as they were when it was taken.

    Attributes
    ----------
    tensors
        One-dimensional uint8 tensors, in the order of the storages. GPU copies may not have arrived before `wait`.
    staging
        ``"host"`` or ``"device"``: where the bytes of GPU tensors are.
    nbytes
        Bytes copied.
    fallbacks
        Each departure from what was asked for, in words.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    staging: str = "host"
    nbytes: int = 0
    fallbacks: list[str] = field(default_factory=list)
    _events: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)
    _sources: Sequence[torch.Tensor] = ()
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def wait(self) -> None:
        """Wait until all copies have arrived; the tensors that they were taken of are let go then."""
        with relaxed_capture(bool(self._events)):
            for event in self._events.values():
                event.synchronize()
        self._events.clear()
        self._sources = ()

    def release(self) -> None:
        """Give the memory back, after the last copy has ended."""
        try:
            self.wait()
        finally:
            self.tensors = []
            self._stack.close()


@contextlib.contextmanager
def relaxed_capture(on_gpu: bool) -> Iterator[None]:
    """Let this thread wait, ask and register memory while another one captures a CUDA graph."""
    driver = cuda_driver() if on_gpu else None
    if driver is None:
        yield
        return
    before = driver.exchange_capture_mode()
    try:
        yield
    finally:
        driver.exchange_capture_mode(before)


def take(
    path: str,
    tensors: Sequence[torch.Tensor],
    file_offsets: Sequence[int],
    settings: Settings,
    *,
    may_wait: bool = True,
) -> Snapshot:
    """Copy storages; return when host memory has been copied and copies from GPUs are queued.

    Parameters
    ----------
    path
        The file, for messages.
    tensors, file_offsets
        One-dimensional uint8 tensors over the storages, and where each will begin in the file.
    settings
        ``staging``, ``snapshot_bytes``, ``fallback``.
    may_wait
        Whether to wait for memory that earlier snapshots hold, or to raise `BlockingIOError`.

    Raises
    ------
    SaveError
        (``ENOMEM``) if there is no memory for it where the settings want it.
    RuntimeError
        If the current stream of a GPU captures a graph.
    """
    snapshot = Snapshot(nbytes=sum(t.numel() for t in tensors), _sources=tensors)
    on_gpu = any(t.is_cuda for t in tensors)
    with contextlib.ExitStack() as undo, relaxed_capture(on_gpu):
        undo.callback(snapshot.release)
        _check_capture(path, tensors)
        _Taking(path, tensors, file_offsets, settings, may_wait, snapshot).run()
        undo.pop_all()
    return snapshot


def _check_capture(path: str, tensors: Sequence[torch.Tensor]) -> None:
    for device in {t.device for t in tensors if t.is_cuda}:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{path}: the current stream of {device} captures a CUDA graph, and a save cannot be a part of it. "
                    "Save before or after the capture"
                )


class _Taking:
    """One snapshot in the making."""

    def __init__(
        self,
        path: str,
        tensors: Sequence[torch.Tensor],
        file_offsets: Sequence[int],
        settings: Settings,
        may_wait: bool,
        snapshot: Snapshot,
    ) -> None:
        self.path, self.tensors, self.file_offsets = path, tensors, file_offsets
        self.settings, self.may_wait, self.snapshot = settings, may_wait, snapshot
        self.result: list[torch.Tensor | None] = [None] * len(tensors)
        self.limit = settings.snapshot_bytes or (system.available_memory() + memory.snapshot_pool.nbytes) // 2

    def run(self) -> None:
        # In the order of their devices, so that what is gathered on one of them lies side by side.
        on_gpu = sorted(
            (i for i, t in enumerate(self.tensors) if t.is_cuda), key=lambda i: self.tensors[i].get_device()
        )
        on_host = [i for i, t in enumerate(self.tensors) if not t.is_cuda]
        if on_gpu and self._stages_on_device(on_gpu, on_host):
            self.snapshot.staging = "device"
        else:
            on_host = [*on_gpu, *on_host]
        if on_host:
            self._to_host(on_host)
        self.snapshot.tensors = [t for t in self.result if t is not None]

    def _placed(self, which: Sequence[int]) -> tuple[list[int], int]:
        return place([self.tensors[i].numel() for i in which], [self.file_offsets[i] for i in which])

    # ------------------------------------------------------------------------------------------- where it goes

    def _stages_on_device(self, on_gpu: Sequence[int], on_host: Sequence[int]) -> bool:
        """Decide where the bytes of GPU tensors go, and copy them if they stay there."""
        wanted, named = self.settings.staging, self.settings.transfer_type
        if named.uses_cufile:
            if wanted == "host":
                raise SettingsError(
                    f"staging='host' and transfer_type={named.name!r}: that type moves bytes out of GPU memory. Use "
                    "staging='device' or 'auto', or another transfer type"
                )
            wanted = "device"
        if wanted == "device":
            try:
                self._to_devices(on_gpu)
            except torch.OutOfMemoryError as exc:
                if self.settings.fallback == "error":
                    total = format_bytes(sum(self.tensors[i].numel() for i in on_gpu))
                    raise self._no_memory(
                        f"there is no room for a copy of {total} in GPU memory (staging='device')",
                        "Use staging='host' or 'auto', or free GPU memory",
                    ) from exc
                self._fell_back("there is no room for the snapshot in GPU memory; it went to host memory", warn=True)
                return False
            return True
        room = self._placed([*on_gpu, *on_host])[1] <= self.limit - memory.HUGE_PAGE
        if wanted == "auto" and not room and self._devices_have_room(on_gpu):
            with contextlib.suppress(torch.OutOfMemoryError):
                self._to_devices(on_gpu)
                self._fell_back("the snapshot exceeds snapshot_bytes; it stayed in GPU memory", warn=False)
                return True
        return False

    def _devices_have_room(self, on_gpu: Sequence[int]) -> bool:
        for device in {self.tensors[i].device for i in on_gpu}:
            wanted = sum(self.tensors[i].numel() for i in on_gpu if self.tensors[i].device == device)
            cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            if torch.cuda.mem_get_info(device)[0] + cached < _DEVICE_SHARE * wanted:
                return False
        return True

    def _fell_back(self, text: str, *, warn: bool) -> None:
        self.snapshot.fallbacks.append(text)
        if warn:
            warnings.warn(f"{self.path}: {text}", TransferFallbackWarning, stacklevel=8)

    def _no_memory(self, reason: str, remedy: str) -> SaveError:
        return SaveError(f"{self.path}: taking the snapshot: {reason}. {remedy}.", errno.ENOMEM, self.path)

    # --------------------------------------------------------------------------------------------- host memory

    def _to_host(self, which: Sequence[int]) -> None:
        places, nbytes = self._placed(which)
        on_gpu = any(self.tensors[i].is_cuda for i in which)
        buffer = self._buffer(nbytes, pinned=on_gpu)
        for i, at in zip(which, places, strict=True):
            self.result[i] = buffer.tensor[at : at + self.tensors[i].numel()]
        gpu = [(i, at) for i, at in zip(which, places, strict=True) if self.tensors[i].is_cuda]
        for device in {self.tensors[i].device for i, _ in gpu}:
            self._from_gpu(device, [(i, at) for i, at in gpu if self.tensors[i].device == device], buffer)
        host = [(i, at) for i, at in zip(which, places, strict=True) if not self.tensors[i].is_cuda]
        copy_in_host_memory(
            [(buffer.address + at, self.tensors[i].data_ptr(), self.tensors[i].numel()) for i, at in host]
        )

    def _buffer(self, nbytes: int, *, pinned: bool) -> StagingBuffer:
        nbytes = align_up(max(nbytes, 1), memory.HUGE_PAGE)
        if nbytes > max(self.limit, memory.HUGE_PAGE):
            raise self._no_memory(
                f"it needs {format_bytes(nbytes)} of host memory, and snapshot_bytes allows {format_bytes(self.limit)}",
                "Raise TORCHDIRECT_SNAPSHOT_BYTES if the machine has more, use staging='device' for GPU tensors, or "
                "save in the foreground (td.save), which needs no copy",
            )
        try:
            return self._lease(nbytes, pinned)
        except BlockingIOError:
            raise
        except (RuntimeError, OSError, MemoryError) as exc:
            if not pinned or (self.settings.staging == "host" and self.settings.fallback == "error"):
                raise self._no_memory(
                    f"{format_bytes(nbytes)} of {'pinned ' * pinned}host memory cannot be had ({exc})",
                    "Free memory, raise the memory lock limit (ulimit -l), use staging='auto', or save in the "
                    "foreground (td.save), which needs no copy",
                ) from exc
            text = "host memory for the snapshot cannot be pinned; copies from the GPU took the slow way and blocked"
            self._fell_back(text, warn=self.settings.staging == "host")
        return self._buffer(nbytes, pinned=False)

    def _lease(self, nbytes: int, pinned: bool) -> StagingBuffer:
        stack = self.snapshot._stack
        lease = memory.snapshot_pool.lease(1, nbytes, pinned=pinned, limit=self.limit, may_wait=self.may_wait)
        granted = stack.enter_context(lease)
        try:
            return granted.take()
        except BaseException:
            stack.close()
            raise

    def _from_gpu(self, device: torch.device, which: Sequence[tuple[int, int]], buffer: StagingBuffer) -> None:
        """Queue the copies from one GPU into the buffer, each given as a storage and its place there."""
        large = [(i, at) for i, at in which if self.tensors[i].numel() >= LARGE_BYTES]
        small = [(i, at) for i, at in which if 0 < self.tensors[i].numel() < LARGE_BYTES]
        driver = cuda_driver() if buffer.pinned else None
        with torch.cuda.device(device), torch.inference_mode():
            stream = torch.cuda.current_stream(device)
            event = self.snapshot._events[device] = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            try:
                for run in self._runs(small):
                    self._gather(run, buffer, device, driver)
                for i, at in large:
                    _copy_out(self.tensors[i], buffer, at, driver)
            finally:
                event.record(stream)

    def _runs(self, small: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Cut what lies side by side in the buffer into runs that fit into the memory they are gathered in."""
        run: list[tuple[int, int]] = []
        for i, at in small:
            if run and at + self.tensors[i].numel() - run[0][1] > _GATHER_BYTES:
                yield run
                run = []
            run.append((i, at))
        if run:
            yield run

    def _gather(
        self, run: Sequence[tuple[int, int]], buffer: StagingBuffer, device: torch.device, driver: CudaDriver | None
    ) -> None:
        """Copy many small storages: gathered by one kernel, then one copy of the whole run."""
        first = run[0][1]
        nbytes = run[-1][1] + self.tensors[run[-1][0]].numel() - first
        try:
            # Of the current stream, as everything here: the next run may have the same memory.
            scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            for i, at in run:
                _copy_out(self.tensors[i], buffer, at, driver)
            return
        _gather_into(scratch, [self.tensors[i] for i, _ in run], [at - first for _, at in run])
        _copy_out(scratch, buffer, first, driver)

    # ---------------------------------------------------------------------------------------------- GPU memory

    def _to_devices(self, on_gpu: Sequence[int]) -> None:
        try:
            for device in {self.tensors[i].device for i in on_gpu}:
                self._within_device(device, [i for i in on_gpu if self.tensors[i].device == device])
        except torch.OutOfMemoryError:
            for i in on_gpu:
                self.result[i] = None
            raise

    def _within_device(self, device: torch.device, which: Sequence[int]) -> None:
        sizes = [self.tensors[i].numel() for i in which]
        places, nbytes = self._placed(which)
        with torch.cuda.device(device), torch.inference_mode():
            stream = torch.cuda.current_stream(device)
            whole = torch.empty(nbytes + BLOCK, dtype=torch.uint8, device=device)
            shift = -whole.data_ptr() % BLOCK
            copies = [whole[shift + at : shift + at + size] for at, size in zip(places, sizes, strict=True)]
            event = self.snapshot._events[device] = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            try:
                small = [n for n, size in enumerate(sizes) if 0 < size < LARGE_BYTES]
                if small:
                    torch._foreach_copy_([copies[n] for n in small], [self.tensors[which[n]] for n in small])
                for n, size in enumerate(sizes):
                    if size >= LARGE_BYTES:
                        copies[n].copy_(self.tensors[which[n]], non_blocking=True)
            finally:
                event.record(stream)
        for i, copy in zip(which, copies, strict=True):
            self.result[i] = copy


def _copy_out(source: torch.Tensor, buffer: StagingBuffer, at: int, driver: CudaDriver | None) -> None:
    """Queue a copy of GPU memory to a place in a buffer, on the current stream; if that is not pinned, wait for it."""
    if driver is None:
        buffer.tensor[at : at + source.numel()].copy_(source, non_blocking=buffer.pinned)
        return
    driver.bind(source.device.index)
    stream = torch.cuda.current_stream(source.device).cuda_stream
    driver.from_device(buffer.address + at, source.data_ptr(), source.numel(), stream)


def _gather_into(target: torch.Tensor, sources: Sequence[torch.Tensor], places: Sequence[int]) -> None:
    """Copy tensors to ascending places of another, by as few kernels as there can be."""
    ends = [at + source.numel() for at, source in zip(places, sources, strict=True)]
    sizes: list[int] = []
    for at, end, following in zip(places, ends, [*places[1:], target.numel()], strict=True):
        sizes += (end - at, following - end)
    parts = target.split_with_sizes(sizes)[::2]
    torch._foreach_copy_(list(parts), list(sources))


def copy_in_host_memory(copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy host memory by several threads; each copy is a destination, a source and a number of bytes."""
    batches: list[list[tuple[int, int, int]]] = []
    open_batch: list[tuple[int, int, int]] = []
    filled = 0
    for destination, source, nbytes in copies:
        for at in range(0, nbytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, nbytes - at)
            open_batch.append((destination + at, source + at, size))
            filled += size
            if filled >= _PIECE_BYTES:
                batches.append(open_batch)
                open_batch, filled = [], 0
    if open_batch:
        batches.append(open_batch)
    job = Job(batches)

    def work() -> None:
        while (batch := job.take()) is not None:
            for piece in batch:
                memory.copy(*piece)

    run_workers(job, [work] * min(_COPY_THREADS, system.cpu_count(), max(1, len(batches))))
