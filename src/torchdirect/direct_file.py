"""Tensors at offsets of a file, over any transfer type: for KV caches, activation offload and raw dumps."""

from __future__ import annotations

import errno
import functools
import io
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal

import torch

from torchdirect import cufile, defaults, gpu_buffers, memory, road, selection, system
from torchdirect.engines import make_engine
from torchdirect.engines.base import EngineOptions, GpuFile, OpenFile, TransferState
from torchdirect.engines.cufile import require_unregistered
from torchdirect.engines.streams import QueuedWork, queued_work
from torchdirect.errors import CorruptCheckpointError, TransferUnavailableError, save_error
from torchdirect.gds_status import gds_status
from torchdirect.plan import Extent, Window, read_windows
from torchdirect.transfer import TransferType
from torchdirect.units import BLOCK

Mode = Literal["r", "r+", "w", "w+", "x", "x+"]
Buffer = torch.Tensor | torch.UntypedStorage

_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "w+": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "x+": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}
_SUPPOSED_BYTES = 1 << 30
"""Size of the transfers that ``AUTO`` chooses for: set-up is paid once for each file."""


@dataclass(frozen=True)
class _Piece:
    """One tensor at one place."""

    data: torch.Tensor
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.data.numel()


class StreamTransfer:
    """A transfer that a CUDA stream will do. Ask for its `result` after the stream has run."""

    def __init__(self, request: cufile.AsyncRequest, data: torch.Tensor, path: str) -> None:
        self._path = path
        self._request = request
        self._data = data  # keeps the memory alive until the result is taken

    def result(self) -> int:
        """Return the bytes moved.

        Raises
        ------
        RuntimeError
            If the stream has not come to it yet: synchronise the stream, or an event recorded after the call, first.
        EOFError
            If it moved fewer bytes than asked for: the file ended.
        OSError
            If the transfer failed.
        """
        count, asked = self._request.result(), self._data.numel()
        if count < asked:
            raise EOFError(
                f"{self._path}: {asked} bytes at offset {self._request.file_offset} were asked for, and {count} moved: "
                "the file is shorter"
            )
        return count


class DirectFile:
    """A file whose bytes move to and from tensors, at offsets, over a transfer type.

    Transfers may run from several threads at a time. Nothing is published: what is written is in the file at once, as
    with ``open``.

    Parameters
    ----------
    path
        The file.
    mode
        ``"r"``, ``"r+"``, ``"w"``, ``"w+"``, ``"x"`` or ``"x+"``, as for ``open``; always binary.
    transfer_type
        A `TransferType`, its name or code. ``AUTO`` decides for each kind of tensor when the first one comes.
    num_threads, chunk_bytes
        As for `save`.

    Raises
    ------
    FileNotFoundError, PermissionError, IsADirectoryError, FileExistsError
        As ``open`` would.
    SettingsError
        If an argument has a value that is not allowed.

    Examples
    --------
    >>> with torchdirect.DirectFile("cache.bin", "w+") as file:
    ...     file.write(block, offset=0)
    ...     file.read_into(block, offset=0)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Mode = "r",
        *,
        transfer_type: TransferType | str | int | None = None,
        num_threads: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        if mode not in _FLAGS:
            raise ValueError(f"unknown mode {mode!r}; use one of {', '.join(map(repr, _FLAGS))}")
        self._settings = defaults.current(transfer_type=transfer_type, num_threads=num_threads, chunk_bytes=chunk_bytes)
        self.path = os.fspath(path)
        self.mode = mode
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._gpu_files: dict[TransferType, GpuFile] = {}
        self._options: dict[tuple[bool, str], EngineOptions] = {}
        self._streamed: set[torch.device] = set()
        self._direct_fd: int | None = None
        self._fd = os.open(self.path, _FLAGS[mode] | os.O_CLOEXEC, 0o666)
        try:
            # Also what open() refuses; reading a directory fails late.
            if os.path.isdir(self.path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
            self._direct_fd = road.open_direct_again(self._fd, _FLAGS[mode] & os.O_ACCMODE)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------ synchronous

    def read_into(self, tensor: Buffer, offset: int = 0) -> int:
        """Fill a contiguous tensor or storage from the file; its data is ready on the current stream on return.

        Parameters
        ----------
        tensor
            In host memory or on a GPU. All of its bytes are read.
        offset
            First byte in the file; any alignment. Multiples of 4096 are fastest.

        Returns
        -------
        int
            Bytes read.

        Raises
        ------
        EOFError
            If the file ends before.
        LoadError
            (an `OSError`) if reading fails.
        ValueError, io.UnsupportedOperation, TransferUnavailableError
            If the tensor, the mode of the file, or the transfer type do not allow it.
        """
        return self._read([self._piece(tensor, offset)], None)

    def write(self, tensor: Buffer, offset: int = 0) -> int:
        """Write a contiguous tensor or storage into the file, behind what is queued on the current stream.

        Parameters and errors as for `read_into`. The file grows where needed; bytes around the tensor's stay.

        Returns
        -------
        int
            Bytes written.

        Raises
        ------
        SaveError
            (an `OSError`) if writing fails.
        """
        return self._write([self._piece(tensor, offset)], None)

    def sync(self) -> None:
        """Return when everything written so far is on stable storage."""
        os.fdatasync(self._open_fd())

    def size(self) -> int:
        """Return the length of the file in bytes."""
        return os.fstat(self._open_fd()).st_size

    # ------------------------------------------------------------------------------------------ futures

    def submit_read(self, tensor: Buffer, offset: int = 0) -> Future[int]:
        """Begin `read_into` in another thread; return a future with ``.result(timeout)``."""
        piece = self._piece(tensor, offset)
        return self._submit(self._read, [piece])

    def submit_write(self, tensor: Buffer, offset: int = 0) -> Future[int]:
        """Begin `write` in another thread; the tensor must not change before the future is done."""
        piece = self._piece(tensor, offset)
        return self._submit(self._write, [piece])

    def _submit(self, work: Callable[[list[_Piece], QueuedWork | None], int], pieces: list[_Piece]) -> Future[int]:
        queued = queued_work([piece.data for piece in pieces])
        with self._lock:
            self._open_fd()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="torchdirect-file")
            return self._pool.submit(work, pieces, queued)

    # ------------------------------------------------------------------------------------------ stream-ordered

    def read_async(self, tensor: Buffer, offset: int = 0, stream: torch.cuda.Stream | None = None) -> StreamTransfer:
        """Queue a read on a CUDA stream (the current one by default), by ``cuFileReadAsync``.

        Later work on the stream sees the data. Needs cuFile, a GPU tensor, and the `GPU_ASYNC` type or ``AUTO``.
        """
        self._require("read")
        # What is queued before it may make the file longer, so only its result tells whether the bytes were there.
        return self._queue(cufile.read_async, self._piece(tensor, offset), stream)

    def write_async(self, tensor: Buffer, offset: int = 0, stream: torch.cuda.Stream | None = None) -> StreamTransfer:
        """Queue a write on a CUDA stream (the current one by default), by ``cuFileWriteAsync``.

        It is ordered behind earlier work on the stream; the tensor may change once the stream has passed it.
        """
        self._require("write")
        return self._queue(cufile.write_async, self._piece(tensor, offset), stream)

    def _queue(
        self, call: Callable[..., cufile.AsyncRequest], piece: _Piece, stream: torch.cuda.Stream | None
    ) -> StreamTransfer:
        name = TransferType.GPU_ASYNC.name
        if self._settings.transfer_type not in (TransferType.AUTO, TransferType.GPU_ASYNC):
            raise TransferUnavailableError(
                name,
                f"{self.path} was opened for {self._settings.transfer_type.name}",
                "Open it with transfer_type='GPU_ASYNC' or 'AUTO'",
            )
        if not piece.data.is_cuda:
            raise TransferUnavailableError(name, "the tensor is in host memory", "Use submit_read or submit_write")
        if gpu_buffers.registered_base(piece.data) is not None:
            require_unregistered(gds_status(self._open_fd()).direct)
        handle = self._gpu_file(TransferType.GPU_ASYNC)
        assert isinstance(handle, cufile.FileHandle)
        with torch.cuda.device(piece.data.device):
            stream = torch.cuda.current_stream() if stream is None else stream
            self._streamed.add(piece.data.device)
            request = call(
                handle, piece.data.data_ptr(), piece.data.numel(), piece.offset, 0, stream=int(stream.cuda_stream)
            )
        return StreamTransfer(request, piece.data, self.path)

    # ------------------------------------------------------------------------------------------ batches

    def batch(self) -> TransferBatch:
        """Collect transfers in a ``with`` block, which moves them all together at its end."""
        return TransferBatch(self)

    # ------------------------------------------------------------------------------------------ life

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._fd < 0

    def close(self) -> None:
        """Wait for submitted and stream-ordered transfers, and close the file; closing twice is allowed."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        # A stream may still have to use the file.
        for device in self._streamed:
            torch.cuda.synchronize(device)
        self._streamed.clear()
        with self._lock:
            for handle in self._gpu_files.values():
                handle.close()
            self._gpu_files.clear()
            for fd in (self._direct_fd, self._fd):
                if fd is not None and fd >= 0:
                    os.close(fd)
            self._direct_fd, self._fd = None, -1

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}DirectFile {self.path!r} mode={self.mode!r} {self._settings.transfer_type.name}>"

    # ------------------------------------------------------------------------------------------ inner

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise ValueError(f"I/O operation on closed file {self.path}")
        return self._fd

    def _require(self, what: Literal["read", "write"]) -> None:
        self._open_fd()
        if what == "read" and self.mode in ("w", "x"):
            raise io.UnsupportedOperation(f"{self.path} is open for writing only; use mode '{self.mode}+'")
        if what == "write" and self.mode == "r":
            raise io.UnsupportedOperation(f"{self.path} is open for reading only; use mode 'r+' or 'w+'")

    def _piece(self, buffer: Buffer, offset: int) -> _Piece:
        if isinstance(buffer, torch.Tensor):
            if buffer.layout is not torch.strided or not buffer.is_contiguous():
                raise ValueError(
                    f"the tensor of shape {tuple(buffer.shape)} is not contiguous; move a contiguous one "
                    "(for a write, tensor.contiguous(); for a read, read into a contiguous one and copy)"
                )
            data = memory.bytes_of(buffer)
        elif isinstance(buffer, torch.UntypedStorage):
            data = memory.bytes_tensor(buffer)
        else:
            raise TypeError(f"expected a tensor or an UntypedStorage, not {type(buffer).__name__}")
        if data.device.type not in ("cpu", "cuda"):
            raise ValueError(f"tensors on {data.device} cannot be moved; use one in host memory or on a CUDA device")
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise ValueError(f"offset={offset!r}: use a byte offset of 0 or more")
        return _Piece(data, offset)

    def _require_inside(self, pieces: Sequence[_Piece]) -> int:
        size = self.size()
        for piece in pieces:
            if piece.end > size:
                raise EOFError(
                    f"{self.path}: reading {piece.data.numel()} bytes at offset {piece.offset} runs past the end of "
                    f"the file ({size} bytes)"
                )
        return size

    def _choose(self, pieces: Sequence[_Piece], operation: Literal["load", "save"]) -> EngineOptions:
        on_gpu = any(piece.data.is_cuda for piece in pieces)
        key = (on_gpu, operation)
        with self._lock:
            if key not in self._options:
                self._options[key] = self._decide(on_gpu, operation)
            return self._options[key]

    def _decide(self, on_gpu: bool, operation: str) -> EngineOptions:
        settings, fd = self._settings, self._open_fd()
        automatic = settings.transfer_type is TransferType.AUTO
        place = torch.device("cuda" if on_gpu else "cpu")
        situation = road.find_situation(operation, fd, _SUPPOSED_BYTES, [place], 0.0, settings)
        if automatic:
            choice = selection.choose(situation)
        else:
            selection.check(settings.transfer_type, situation)
            choice = selection.Choice(settings.transfer_type, "as requested")
        direct = choice.transfer_type.uses_cufile and gds_status(fd).direct
        return road.make_options(settings, situation, choice, strict=not automatic, direct=direct)

    def _gpu_file(self, transfer_type: TransferType) -> GpuFile:
        with self._lock:
            if transfer_type not in self._gpu_files:
                fd = self._open_fd() if self._direct_fd is None else self._direct_fd
                self._gpu_files[transfer_type] = road.open_for_gpu(transfer_type, fd, self.path, self._settings)
            return self._gpu_files[transfer_type]

    @functools.cached_property
    def _alignment(self) -> tuple[int, int]:
        """What direct transfers ask of memory and of offsets, in bytes."""
        asked = system.direct_io(self._open_fd())
        return asked.memory_align or 1, asked.offset_align or 1

    def _described(self, options: EngineOptions, size: int) -> OpenFile:
        through_cache = options.transfer_type is TransferType.CPU_CACHED_GPU
        gpu_file = self._gpu_file(options.transfer_type) if options.transfer_type.uses_cufile else None
        direct_fd = None if through_cache else self._direct_fd
        return OpenFile(self.path, self._open_fd(), direct_fd, size, *self._alignment, gpu_file)

    def _read(self, pieces: list[_Piece], queued: QueuedWork | None) -> int:
        self._require("read")
        pieces = [piece for piece in pieces if piece.data.numel()]
        size = self._require_inside(pieces)
        if not pieces:
            return 0
        options = self._choose(pieces, "load")
        extents = [Extent(piece.offset, piece.data.numel(), i) for i, piece in enumerate(pieces)]
        windows = read_windows(extents, chunk_bytes=options.chunk_bytes, file_size=size)

        def describe(i: int) -> str:
            return f"the tensor for offset {pieces[i].offset}"

        try:
            make_engine(options).read(
                self._described(options, size),
                windows,
                [piece.data for piece in pieces],
                describe,
                TransferState(),
                queued=queued,
            )
        except CorruptCheckpointError as exc:
            raise EOFError(str(exc)) from exc
        return sum(piece.data.numel() for piece in pieces)

    def _write(self, pieces: list[_Piece], queued: QueuedWork | None) -> int:
        self._require("write")
        pieces = [piece for piece in pieces if piece.data.numel()]
        if not pieces:
            return 0
        options = self._choose(pieces, "save")
        whole, ragged = _write_windows(pieces, options.chunk_bytes)
        tensors, size = [piece.data for piece in pieces], max(piece.end for piece in pieces)
        state = TransferState()
        # The ragged ends share blocks with bytes that stay: those go through the page cache, which keeps them.
        through_cache = replace(options, transfer_type=TransferType.CPU_CACHED_GPU, strict=False)
        try:
            for windows, how in ((whole, options), (ragged, through_cache)):
                if windows:
                    make_engine(how).write(
                        self._described(how, size), windows, (), tensors, False, state, queued=queued
                    )
        except OSError as exc:
            nbytes = sum(t.numel() for t in tensors)
            raise save_error(exc, self.path, f"writing {nbytes} bytes at offset {pieces[0].offset}") from exc
        return sum(t.numel() for t in tensors)


class TransferBatch:
    """Transfers of one `DirectFile` that are moved together; use it in a ``with`` block.

    Reads come before writes. After an exception inside the block nothing is moved.
    """

    def __init__(self, file: DirectFile) -> None:
        self._file = file
        self._reads: list[_Piece] = []
        self._writes: list[_Piece] = []
        self.nbytes = 0
        """Bytes moved, once the block has ended."""

    def read_into(self, tensor: Buffer, offset: int = 0) -> None:
        """Add a read; see `DirectFile.read_into`."""
        self._file._require("read")
        self._reads.append(self._file._piece(tensor, offset))

    def write(self, tensor: Buffer, offset: int = 0) -> None:
        """Add a write; see `DirectFile.write`. Writes of one batch must not overlap in the file."""
        self._file._require("write")
        self._writes.append(self._file._piece(tensor, offset))

    def __enter__(self) -> TransferBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        ordered = sorted((piece for piece in self._writes if piece.data.numel()), key=lambda piece: piece.offset)
        for first, second in itertools.pairwise(ordered):
            if first.end > second.offset:
                raise ValueError(
                    f"two writes of one batch overlap: {first.data.numel()} bytes at offset {first.offset}, and "
                    f"{second.data.numel()} bytes at offset {second.offset}"
                )
        self.nbytes = (self._file._read(self._reads, None) if self._reads else 0) + (
            self._file._write(ordered, None) if ordered else 0
        )


def _write_windows(pieces: Sequence[_Piece], chunk_bytes: int) -> tuple[list[Window], list[Window]]:
    """Return the windows of whole blocks, and those of ragged ends."""
    whole: list[Window] = []
    ragged: list[Window] = []
    for i, piece in enumerate(pieces):
        extent = Extent(piece.offset, piece.data.numel(), i)
        first, last = extent.core(BLOCK)
        bounds = [(start, min(start + chunk_bytes, last)) for start in range(first, last, chunk_bytes)]
        for windows, places in ((whole, bounds), (ragged, [(extent.file_offset, first), (last, extent.end)])):
            parts = (extent.part(start, stop) for start, stop in places)
            windows += [Window(part.file_offset, part.nbytes, (part,)) for part in parts if part is not None]
    return whole, ragged
