"""What every engine takes and gives: files, options, progress, and the names that errors use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from torchdirect.engines.checksums import PartChecksums
from torchdirect.engines.streams import QueuedWork
from torchdirect.plan import Gap, Window
from torchdirect.transfer import TransferType


class GpuFile(Protocol):
    """A file that moves bytes to and from GPU memory; `cufile.FileHandle` is one."""

    def read(self, device_ptr: int, nbytes: int, file_offset: int = 0, ptr_offset: int = 0) -> int:
        """Read from the file into GPU memory; return the bytes moved. Raises `CuFileError`."""
        ...

    def write(self, device_ptr: int, nbytes: int, file_offset: int = 0, ptr_offset: int = 0) -> int:
        """Write GPU memory into the file; return the bytes moved. Raises `CuFileError`."""
        ...

    def close(self) -> None:
        """Let go of the file. No transfer may be in flight."""
        ...


@dataclass(frozen=True)
class OpenFile:
    """A file as engines see it.

    Attributes
    ----------
    path
        What the user named; for messages.
    fd
        Descriptor for transfers through the page cache.
    direct_fd
        Descriptor opened with ``O_DIRECT``, or None.
    size
        Bytes in the (finished) file.
    memory_align, offset_align
        What direct transfers ask of addresses, and of offsets and lengths, in bytes.
    gpu_file
        The file as cuFile knows it, for its transfer types.
    mapping
        Address of the file's pages, for writes on a file system that keeps its files in memory.
    """

    path: str
    fd: int
    direct_fd: int | None
    size: int
    memory_align: int = 4096
    offset_align: int = 4096
    gpu_file: GpuFile | None = None
    mapping: int | None = None


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs.

    Attributes
    ----------
    transfer_type
        Path of the bytes.
    num_threads
        Worker threads.
    chunk_bytes
        Upper bound of a window, and the size of a staging buffer.
    staging_bytes
        Bound of all staging buffers of the process.
    strict
        Whether leaving the path of `transfer_type` is an error.
    direct
        For cuFile types: whether the machine moves this file's bytes by DMA between storage and GPU.
    """

    transfer_type: TransferType
    num_threads: int
    chunk_bytes: int
    staging_bytes: int
    strict: bool = False
    direct: bool = False


@dataclass
class TransferState:
    """What an engine tells while it runs, and afterwards. Safe to change from several threads."""

    total: int = 0
    done: int = 0
    retries: int = 0
    num_threads: int = 0
    fallbacks: list[str] = field(default_factory=list)
    direct: bool | None = None
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def advance(self, nbytes: int) -> None:
        """Count bytes that have arrived."""
        with self.lock:
            self.done += nbytes

    def retried(self) -> None:
        """Count a transfer that was taken up again."""
        with self.lock:
            self.retries += 1

    def fell_back(self, text: str) -> None:
        """Note a departure from the chosen path, once."""
        with self.lock:
            if text not in self.fallbacks:
                self.fallbacks.append(text)


class Engine(Protocol):
    """Moves the windows of a plan between a file and storages.

    A storage is given as a one-dimensional uint8 tensor over all of its bytes, in host memory or on a CUDA device.
    """

    def read(
        self,
        file: OpenFile,
        windows: Sequence[Window],
        tensors: Sequence[torch.Tensor],
        describe: Callable[[int], str],
        state: TransferState,
        *,
        queued: QueuedWork | None = None,
        checksums: PartChecksums | None = None,
    ) -> None:
        """Fill `tensors`; when it returns, they are ready on the caller's current streams.

        ``describe(i)`` names storage ``i`` for messages. `queued` is given where the calling thread is not the one
        whose queued work counts. `checksums` takes in what passes through host memory.
        """
        ...

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
    ) -> None:
        """Write every window of a plan; the length of the file is left to the caller.

        What the caller has queued on the tensors' devices is ordered before the first byte is read. ``crc`` says
        whether gaps are rendered with the CRC-32 of the storages, or with zeros.
        """
        ...
