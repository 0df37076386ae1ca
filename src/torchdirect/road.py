"""What every save and load goes through, whatever its format: choosing the path, opening files, running the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from torchdirect import digests, memory, progress, publish, replicas, selection, system
from torchdirect.defaults import Settings
from torchdirect.engines import inline, make_engine, open_gpu_file
from torchdirect.engines.base import EngineOptions, GpuFile, OpenFile, TransferState
from torchdirect.engines.checksums import PartChecksums
from torchdirect.errors import TransferUnavailableError, save_error
from torchdirect.formats.layout import FileLayout
from torchdirect.gds_status import gds_status
from torchdirect.pending import writer
from torchdirect.plan import Extent, read_windows, write_windows
from torchdirect.transfer import TransferReport, TransferType, set_last_transfer
from torchdirect.units import BLOCK, MIB

logger = logging.getLogger("torchdirect")


class TransferFallbackWarning(UserWarning):
    """The transfer type that was asked for is not available, and ``fallback="warn"`` took another."""


def describe_file(
    files: Descriptors, size: int, situation: selection.Situation, options: EngineOptions, state: TransferState
) -> OpenFile:
    """Describe a file to the engines, and say so if it could not be opened for direct transfers."""
    direct_fd = files.direct_fd if options.transfer_type is not TransferType.CPU_CACHED_GPU else None
    if options.transfer_type.uses_direct_io and direct_fd is None:
        if options.strict:
            raise TransferUnavailableError(
                options.transfer_type.name,
                f"the file system ({situation.file_system}) refuses to open {files.path} with O_DIRECT",
                "Use 'AUTO' or 'CPU_CACHED_GPU', or fallback='warn'",
            )
        state.fell_back("the file could not be opened with O_DIRECT; went through the page cache")
    align = situation.direct_io
    gpu_file = files.gpu_file if options.transfer_type.uses_cufile else None
    return OpenFile(files.path, files.fd, direct_fd, size, align.memory_align or 1, align.offset_align or 1, gpu_file)


def find_situation(
    operation: str,
    fd: int,
    nbytes: int,
    devices: Sequence[torch.device],
    cached: float,
    settings: Settings,
) -> selection.Situation:
    file_system = system.file_system_type(fd)
    kinds = {device.type for device in set(devices)}
    asks_gds = "cuda" in kinds and settings.transfer_type is TransferType.AUTO
    return selection.Situation(
        operation=operation,
        nbytes=nbytes,
        storages=len(devices),
        on_gpu="cuda" in kinds,
        on_host="cpu" in kinds,
        direct_io=system.direct_io(fd),
        file_system=file_system,
        in_memory=file_system in ("tmpfs", "ramfs"),
        cached=cached,
        durable=settings.durable,
        available_memory=system.available_memory(),
        cpus=system.cpu_count(),
        gds=asks_gds and gds_status(fd).direct,
    )


class Descriptors:
    """The descriptors of one file besides its plain one, opened when they are needed and closed by `stack`."""

    def __init__(
        self,
        path: str,
        fd: int,
        open_direct: Callable[[], int | None],
        settings: Settings,
        stack: contextlib.ExitStack,
    ) -> None:
        self.path = path
        self.fd = fd
        self.gpu_file: GpuFile | None = None
        self._open_direct = open_direct
        self._settings = settings
        self._stack = stack

    @functools.cached_property
    def direct_fd(self) -> int | None:
        """A descriptor with ``O_DIRECT``; None where that is refused."""
        return self._open_direct()

    def open_gpu_file(self, transfer_type: TransferType) -> bool:
        """Open the file for a cuFile type, before any byte moves; return whether its path is direct.

        Raises
        ------
        TransferUnavailableError
            If cuFile cannot carry this call, or only in a mode that the settings forbid.
        """
        fd = self.fd if self.direct_fd is None else self.direct_fd
        self.gpu_file = open_for_gpu(transfer_type, fd, self.path, self._settings)
        self._stack.callback(self.gpu_file.close)
        return gds_status(self.fd).direct


def open_for_gpu(transfer_type: TransferType, fd: int, path: str, settings: Settings) -> GpuFile:
    """Open a file for a cuFile type in a mode that the settings allow; the caller closes it before `fd`.

    Raises
    ------
    TransferUnavailableError
        If cuFile cannot carry the file, or only in its compatibility mode and that is forbidden.
    """
    status = gds_status(fd)
    if settings.gds_compat == "forbid" and not status.direct:
        raise TransferUnavailableError(
            transfer_type.name,
            f"cuFile would run in its compatibility mode, which gds_compat='forbid' rules out: {status.reason}",
            status.remedy,
        )
    return open_gpu_file(transfer_type, settings.gds_backend, fd, path)


def choose(
    settings: Settings, situation: selection.Situation, state: TransferState, files: Descriptors
) -> tuple[selection.Choice, EngineOptions]:
    requested = settings.transfer_type
    automatic = requested is TransferType.AUTO
    choice = selection.choose(situation) if automatic else selection.Choice(requested, "as requested")
    direct = False
    try:
        if not automatic:
            selection.check(requested, situation)
        if choice.transfer_type.uses_cufile:
            direct = files.open_gpu_file(choice.transfer_type)
    except TransferUnavailableError as exc:
        if not automatic and settings.fallback == "error":
            raise
        choice = selection.choose(dataclasses.replace(situation, gds=False))
        text = f"{exc} Took {choice.transfer_type.name} instead"
        state.fell_back(text)
        if not automatic:
            warnings.warn(text, TransferFallbackWarning, stacklevel=5)
        return choice, make_options(settings, situation, choice, strict=False, direct=False)
    strict = not automatic and settings.fallback == "error"
    return choice, make_options(settings, situation, choice, strict=strict, direct=direct)


def make_options(
    settings: Settings, situation: selection.Situation, choice: selection.Choice, *, strict: bool, direct: bool
) -> EngineOptions:
    """Return how an engine runs for a choice."""
    num_threads, chunk_bytes = selection.threads_and_chunk(
        choice.transfer_type, situation, settings.num_threads, settings.chunk_bytes, settings.staging_bytes
    )
    return EngineOptions(choice.transfer_type, num_threads, chunk_bytes, settings.staging_bytes, strict, direct)


def report_transfer(
    operation: str,
    path: str,
    settings: Settings,
    choice: selection.Choice,
    options: EngineOptions,
    state: TransferState,
    nbytes: int,
    payload: int,
    start: float,
) -> None:
    """Report a save or load that began at `start` of the performance counter and has ended."""
    publish_report(
        TransferReport(
            operation=operation,
            path=path,
            requested=settings.transfer_type,
            used=choice.transfer_type,
            reason=choice.reason,
            bytes=nbytes,
            payload_bytes=payload,
            seconds=time.perf_counter() - start,
            num_threads=state.num_threads or 1,
            chunk_bytes=options.chunk_bytes,
            retries=state.retries,
            fallbacks=tuple(state.fallbacks),
            direct=state.direct,
        )
    )


def publish_report(report: TransferReport) -> None:
    """Make a report what `last_transfer` returns, and log it."""
    set_last_transfer(report)
    logger.debug("%s", report)


def open_direct_again(fd: int, access: int = os.O_RDONLY) -> int | None:
    """Open the same file once more with ``O_DIRECT``; None where that is refused."""
    try:
        return os.open(f"/proc/self/fd/{fd}", access | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


class Reading:
    """One file that is being read: its descriptors, the path that was chosen for it, and what has been moved.

    Parameters
    ----------
    path, fd, size
        The file.
    places
        The device of each storage that will be read.
    settings
        Of this call.
    state
        Shared by the files of one call; a new one by default.
    """

    def __init__(
        self,
        path: str,
        fd: int,
        size: int,
        places: Sequence[torch.device],
        settings: Settings,
        state: TransferState | None = None,
    ) -> None:
        if settings.pin_memory and not torch.cuda.is_available():
            raise RuntimeError("pin_memory=True needs CUDA, and torch.cuda.is_available() is False; leave it out")
        self.path, self.fd, self.size = path, fd, size
        self.settings = settings
        self.replicas = replicas.current()
        self.shared_state = state is not None
        self.state = TransferState() if state is None else state
        self._stack = contextlib.ExitStack()
        situation = find_situation("load", fd, size, places, system.cached_fraction(fd, size), settings)
        files = Descriptors(path, fd, self._open_direct, settings, self._stack)
        try:
            self.choice, self.options = choose(settings, situation, self.state, files)
            self._file = describe_file(files, size, situation, self.options, self.state)
        except BaseException:
            self._stack.close()
            raise
        self._tick: Callable[[], None] | None = None

    def _open_direct(self) -> int | None:
        direct_fd = open_direct_again(self.fd)
        if direct_fd is not None:
            self._stack.callback(os.close, direct_fd)
        return direct_fd

    def __enter__(self) -> Reading:
        if not self.shared_state:
            shown = progress.shown(self.settings.progress, f"loading {self.path}", self.state)
            self._tick = self._stack.enter_context(shown)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def fill(
        self,
        extents: Sequence[Extent],
        tensors: Sequence[torch.Tensor],
        describe: Callable[[int], str],
        expected: Sequence[int] | None = None,
    ) -> None:
        """Read extents into one-dimensional uint8 tensors, and check them.

        Parameters
        ----------
        describe
            Names tensor ``i`` for messages.
        expected
            The CRC-32 of each tensor, or 0 where none is known; extent ``i`` is then all of tensor ``i``. They are
            taken of the bytes that arrive while these are in the CPU's caches, or of a lot on a GPU by the GPU.

        Raises
        ------
        CorruptCheckpointError
            If the bytes of a tensor differ from their checksum.
        """
        seen = None if expected is None else PartChecksums([t.numel() for t in tensors])
        taken = seen if digests.taken_on_arrival(tensors) else None

        def read(wanted: Sequence[Extent]) -> None:
            windows = read_windows(wanted, chunk_bytes=self.options.chunk_bytes, file_size=self.size)
            engine = make_engine(self.options, self._tick)
            engine.read(self._file, windows, tensors, describe, self.state, checksums=taken)

        if self.replicas is None:
            read(extents)
        else:
            self.replicas.fill(self.path, extents, tensors, read)
        if expected is not None and seen is not None:
            digests.check_loaded(self.path, extents, expected, tensors, seen, describe)

    def report(self, nbytes: int, payload: int, start: float, path: str | None = None) -> None:
        """Report the load that this was part of.

        Parameters
        ----------
        nbytes, payload
            Bytes of files, and of tensors among them.
        start
            When it began, by the performance counter.
        path
            What was loaded, if that is more than this file.
        """
        choice = self.choice
        if self.replicas is not None:
            shared = f"{choice.reason}; shared by {self.replicas.ranks} ranks"
            choice = dataclasses.replace(choice, reason=shared)
        report_transfer(
            "load", path or self.path, self.settings, choice, self.options, self.state, nbytes, payload, start
        )


def write_file(
    path: str,
    layout: FileLayout,
    tensors: Sequence[torch.Tensor],
    crc: bool,
    settings: Settings,
    start: float,
) -> None:
    """Write and publish a new file, and report the save; background saves to the same path that are pending come first.

    Parameters
    ----------
    layout
        What goes where.
    tensors
        One-dimensional uint8 tensors over the storages, in the order of the layout.
    crc
        Whether the layout's gaps need the CRC-32 of the storages.
    start
        When the save began, by the performance counter.

    Raises
    ------
    SaveError
        If the file cannot be written; an old file of that name is untouched.
    """
    state = TransferState()
    writer.wait_for(path)
    with progress.shown(not _is_small(layout, settings) and settings.progress, f"saving {path}", state) as tick:
        choice, options = put_file(path, layout, tensors, crc, settings, state, tick)
    payload = sum(t.numel() for t in tensors)
    report_transfer("save", path, settings, choice, options, state, layout.file_size, payload, start)


def _is_small(layout: FileLayout, settings: Settings) -> bool:
    return layout.file_size <= selection.SMALL_FILE_BYTES and settings.transfer_type is TransferType.AUTO


def put_file(
    path: str,
    layout: FileLayout,
    tensors: Sequence[torch.Tensor],
    crc: bool,
    settings: Settings,
    state: TransferState,
    tick: Callable[[], None] | None = None,
) -> tuple[selection.Choice, EngineOptions]:
    """Write and publish a new file that may be one of several of a save; return which way its bytes took.

    Parameters
    ----------
    path, layout, tensors, crc
        As for `write_file`.
    state
        Shared by the files of one save.
    tick
        Called now and then while bytes move.

    Raises
    ------
    SaveError
        If the file cannot be written; an old file of that name is untouched.
    """
    size = layout.file_size
    try:
        with publish.replacing(path, durable=settings.durable) as replacement, contextlib.ExitStack() as stack:
            reserved = replacement.reserve(size)
            if _is_small(layout, settings):
                choice, options = selection.SMALL, EngineOptions(selection.SMALL.transfer_type, 1, BLOCK, MIB)
                file = OpenFile(path, replacement.fd, None, size)
                inline.write(file, layout.extents, layout.gaps, tensors, crc, state)
            else:
                situation = find_situation("save", replacement.fd, size, [t.device for t in tensors], 0.0, settings)
                files = Descriptors(path, replacement.fd, replacement.open_direct, settings, stack)
                choice, options = choose(settings, situation, state, files)
                file = describe_file(files, size, situation, options, state)
                maps = situation.in_memory and options.num_threads >= selection.MAPPED_WRITE_THREADS
                if reserved and maps and choice.transfer_type is TransferType.CPU_CACHED_GPU:
                    address = stack.enter_context(memory.mapped(replacement.fd, size))
                    file = dataclasses.replace(file, mapping=address)
                windows = write_windows(layout.extents, layout.gaps, chunk_bytes=options.chunk_bytes, file_size=size)
                make_engine(options, tick).write(file, windows, layout.gaps, tensors, crc, state)
                os.ftruncate(replacement.fd, size)
            stack.close()
            replacement.commit()
    except OSError as exc:
        raise save_error(exc, path, f"writing {size} bytes") from exc
    return choice, options
