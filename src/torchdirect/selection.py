"""Which transfer type a call takes: pure decisions over facts that `system` found."""

from __future__ import annotations

from dataclasses import dataclass

from torchdirect.errors import TransferUnavailableError
from torchdirect.system import DirectIO
from torchdirect.transfer import TransferType
from torchdirect.units import BLOCK, MIB

SMALL_FILE_BYTES = MIB
"""Up to this size one plain write or PyTorch's own read beats the set-up of threads, buffers and streams."""

CACHED_FRACTION = 0.5
"""Share of a file in the page cache from which reading through the cache beats the disk."""

MAPPED_WRITE_THREADS = 4
"""Threads from which a file in memory is written faster through a mapping: writes into one file wait for each other."""

_SMALL_STORAGE_BYTES = 128 << 10
"""Mean size of the storages under which a file is bound by the interpreter."""


@dataclass(frozen=True)
class Situation:
    """What a choice depends on.

    Attributes
    ----------
    operation
        ``"save"`` or ``"load"``.
    nbytes
        Bytes of the file.
    storages
        Number of storages in it.
    on_gpu, on_host
        Whether any tensor lies on a CUDA device, or in host memory.
    direct_io
        Whether the file system accepts ``O_DIRECT``, why not, and the alignment that it asks for.
    file_system
        Its type, such as ``"ext4"``.
    in_memory
        Whether the file system keeps its files in memory (tmpfs), so that direct transfers bypass nothing.
    cached
        Share of the file in the page cache, 0 to 1 (loads).
    durable
        Whether the data must reach stable storage before the call returns (saves).
    available_memory
        Bytes of host memory that the page cache may grow into.
    cpus
        Usable CPUs.
    gds
        Whether cuFile would move this file's bytes by DMA between storage and GPU.
    """

    operation: str
    nbytes: int
    storages: int
    on_gpu: bool
    on_host: bool
    direct_io: DirectIO
    file_system: str
    in_memory: bool
    cached: float
    durable: bool
    available_memory: int
    cpus: int
    gds: bool = False


@dataclass(frozen=True)
class Choice:
    """A transfer type and why it was taken."""

    transfer_type: TransferType
    reason: str


SMALL = Choice(TransferType.CPU_CACHED_GPU, "so small a file is not worth the set-up of direct transfers")


def choose(s: Situation) -> Choice:
    """Decide what ``AUTO`` means here."""
    cached, direct = TransferType.CPU_CACHED_GPU, TransferType.CPU_ASYNC_GPU if s.on_gpu else TransferType.CPU_ONLY
    if s.nbytes <= SMALL_FILE_BYTES:
        return SMALL
    if s.in_memory:
        return Choice(cached, f"{s.file_system} keeps its files in memory")
    if s.operation == "load" and s.cached >= CACHED_FRACTION:
        return Choice(cached, f"{s.cached:.0%} of the file is in the page cache")
    if s.gds and s.on_gpu:
        return Choice(TransferType.GDS, "GPUDirect Storage moves this file's bytes by DMA")
    if not s.direct_io.supported:
        return Choice(cached, f"{s.file_system} does not accept O_DIRECT: {s.direct_io.reason}")
    if s.operation == "save" and not s.durable and s.nbytes <= s.available_memory // 10:
        # The kernel begins to write back at 10 % of memory by default (vm.dirty_background_ratio); under that a save
        # that need not be durable ends at memory speed.
        return Choice(cached, "durable=False, and the file fits well into the page cache")
    where = "the file is not in the page cache" if s.operation == "load" else "the data goes to storage once"
    return Choice(direct, f"{where}, and {s.file_system} accepts O_DIRECT")


def check(transfer_type: TransferType, s: Situation) -> None:
    """Check that a transfer type named by the caller can carry this call.

    Raises
    ------
    TransferUnavailableError
        With the reason and the remedy.
    """
    name = transfer_type.name
    if transfer_type.uses_cufile and not s.on_gpu:
        raise TransferUnavailableError(
            name,
            "it moves bytes between storage and GPU memory, and no tensor is on a GPU",
            "Use 'CPU_ONLY' or 'AUTO', or load to a GPU (map_location='cuda')",
        )
    if transfer_type is TransferType.CPU_ONLY and s.on_gpu:
        raise TransferUnavailableError(
            name,
            "it ends in host memory, and there are tensors on a GPU",
            "Use 'CPU_ASYNC_GPU', or move or load the tensors to the CPU (map_location='cpu')",
        )
    if transfer_type in (TransferType.CPU_GPU, TransferType.CPU_ASYNC_GPU) and s.on_host and not s.on_gpu:
        raise TransferUnavailableError(
            name,
            "it copies between host memory and a GPU, and no tensor is on a GPU",
            "Use 'CPU_ONLY' or 'AUTO', or load to a GPU (map_location='cuda')",
        )
    if transfer_type.uses_direct_io and not s.direct_io.supported:
        raise TransferUnavailableError(
            name,
            f"the file system ({s.file_system}) does not accept O_DIRECT: {s.direct_io.reason}",
            "Use 'AUTO' or 'CPU_CACHED_GPU', or a file system with direct I/O such as ext4 or xfs",
        )


def are_small(nbytes: int, storages: int) -> bool:
    """Whether a file of so many bytes and storages is bound by the interpreter."""
    return nbytes < _SMALL_STORAGE_BYTES * storages


def background_threads(nbytes: int, storages: int, cpus: int) -> int:
    """Return the I/O threads of a background save: enough for the ceiling of a disk, few beside a training loop."""
    return min(2 if are_small(nbytes, storages) else 4, cpus)


def threads_and_chunk(
    transfer_type: TransferType, s: Situation, num_threads: int | None, chunk_bytes: int | None, staging_bytes: int
) -> tuple[int, int]:
    """Return worker threads and window size in bytes for what the caller left open.

    A disk is at its ceiling with 4 to 16 requests in flight, and large windows cost it little CPU time. Copying out of
    the page cache to a GPU is bound by memory: it wants windows that stay in the CPU's caches and are just large enough
    that the interpreter lock is not the limit, and no more threads than CPUs. Many small storages are bound by the
    interpreter, where more than two threads only contend. The figures are in docs/performance.md.
    """
    cached = transfer_type is TransferType.CPU_CACHED_GPU
    if chunk_bytes is None:
        chunk_bytes = 8 * MIB
        if cached and s.on_gpu:
            chunk_bytes = 4 * MIB
        while chunk_bytes > staging_bytes // 4 and chunk_bytes > MIB:
            chunk_bytes //= 2
    if num_threads is None:
        if cached:
            num_threads = min(10 if s.on_gpu and s.operation == "load" else 12, s.cpus)
        else:
            num_threads = min(8, max(4, s.cpus))
        if are_small(s.nbytes, s.storages):
            num_threads = min(2, num_threads)
        # Less than a window for every worker is not worth a thread.
        num_threads = max(1, min(num_threads, s.nbytes // chunk_bytes + 1))
    return num_threads, -(-chunk_bytes // BLOCK) * BLOCK
