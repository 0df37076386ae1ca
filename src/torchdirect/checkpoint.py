"""`save` and `load`: the one road that every call takes, from the object to the published file and back."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import logging
import os
import pickle
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeGuard

import torch
from torch.serialization import DEFAULT_PROTOCOL

from torchdirect import defaults, memory, names, originals, publish, road, selection
from torchdirect.defaults import Settings
from torchdirect.engines import inline
from torchdirect.errors import CorruptCheckpointError, save_error
from torchdirect.formats import torch_zip
from torchdirect.formats.layout import FileLayout
from torchdirect.formats.pickle_index import StorageReference, UnsupportedPickleError
from torchdirect.formats.safetensors import looks_like as looks_like_safetensors
from torchdirect.pending import writer
from torchdirect.plan import Extent
from torchdirect.transfer import TransferReport, TransferType
from torchdirect.units import MIB

logger = logging.getLogger("torchdirect")

FileLike = str | os.PathLike[str] | IO[bytes]

STORAGE_ALIGNMENT = 4096
"""Bytes. Storages begin on these boundaries: what GPUDirect Storage and ``O_DIRECT`` ask for on common disks."""

_LOOK_AHEAD_BYTES = 256 * MIB
"""Host memory that a callable ``map_location`` may be fed ahead of what it has placed."""

_ZIP_MAGIC = b"PK\x03\x04"
_EMPTY_ZIP_MAGIC = b"PK\x05\x06"


# ------------------------------------------------------------------------------------------------------ save


def save(
    obj: object,
    f: FileLike,
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    transfer_type: TransferType | str | int | None = None,
    fallback: str | None = None,
    num_threads: int | None = None,
    chunk_bytes: int | None = None,
    durable: bool | None = None,
    checksum: bool | None = None,
    progress: defaults.Progress | None = None,
) -> None:
    """Save an object to a file, as ``torch.save`` does, over the shortest path to storage.

    The file is an ordinary PyTorch checkpoint, or, if its name ends in ``.safetensors``, a safetensors file. It appears
    under its name only when it is complete; until then, and after any failure, an older file of that name stays as it
    was. A background save to the same path that is pending (`save_async`) comes first.

    Parameters
    ----------
    obj, f, pickle_module, pickle_protocol
        As for ``torch.save``. File objects, and objects with tensors on devices other than CPU and CUDA, are written
        by ``torch.save`` itself.
    transfer_type
        Path of the bytes: a `TransferType`, its name, or its gdsio code. Default ``AUTO``.
    fallback
        ``"error"`` (default) or ``"warn"``: what happens where a named type is not available.
    num_threads
        I/O threads.
    chunk_bytes
        Bytes per transfer, a multiple of 4096.
    durable
        True (default): return when data and name are on stable storage. False: leave that to the kernel.
    checksum
        Whether to compute the CRC-32 of each record (default: what ``torch.serialization.get_crc32_options()`` says,
        which is True).
    progress
        True for a display on standard error, or a function of bytes done and bytes in all.

    Raises
    ------
    SaveError
        (an `OSError` and a `RuntimeError`) if the file cannot be written; the old file is untouched.
    TransferUnavailableError
        If the named transfer type cannot carry this save.
    SettingsError
        If an argument or environment variable has a value that is not allowed.

    Examples
    --------
    >>> torchdirect.save(model.state_dict(), "ckpt.pt")
    """
    start = time.perf_counter()
    if checksum is None and not torch.serialization.get_crc32_options():
        checksum = False
    settings = defaults.current(
        transfer_type=transfer_type,
        fallback=fallback,
        num_threads=num_threads,
        chunk_bytes=chunk_bytes,
        durable=durable,
        checksum=checksum,
        progress=progress,
    )
    save_arguments = (pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record)
    if not is_path(f):
        originals.save(obj, f, *save_arguments)
        report_torch("save", f, settings, "file objects are written by torch.save", start)
        return
    path = os.fspath(f)
    with gc_paused():
        planned = plan_save(obj, path, save_arguments, settings)
        if isinstance(planned, PlannedSave):
            road.write_file(path, planned.layout, planned.tensors, planned.crc, settings, start)
            return
    save_with_torch(path, lambda file: originals.save(obj, file, *save_arguments), settings)
    report_torch("save", path, settings, planned, start)


SaveArguments = tuple[Any, int, bool, bool]
"""The arguments of ``torch.save`` after the file, in its order."""


@dataclass(frozen=True)
class PlannedSave:
    """A file before its first byte is written.

    Attributes
    ----------
    layout
        What goes where.
    tensors
        One-dimensional uint8 tensors over the storages, in the order of the layout.
    crc
        Whether the layout's gaps need the CRC-32 of the storages.
    """

    layout: FileLayout
    tensors: Sequence[torch.Tensor]
    crc: bool


def plan_save(obj: object, path: str, save_arguments: SaveArguments, settings: Settings) -> PlannedSave | str:
    """Pickle an object and lay out its file, or return why ``torch.save`` itself writes it."""
    pickle_module, pickle_protocol, zip_format, no_byteorder = save_arguments
    if path.endswith(".safetensors") and publish.is_replaceable(path):
        from torchdirect import safetensors  # here, as most processes need no second format

        safetensors.check_tensors(obj)
        layout, data = safetensors.plan(obj, None, align=False)  # type: ignore[arg-type]
        return PlannedSave(layout, data, False)
    if reason := _save_elsewhere(path, zip_format):
        return reason
    _check_dill(pickle_module)
    pickled = torch_zip.pickle_object(obj, pickle_module, pickle_protocol)
    foreign = {s.device.type for s in pickled.storages} - {"cpu", "cuda"}
    if foreign:
        return f"there are tensors on {', '.join(sorted(foreign))}"
    layout = torch_zip.layout_file(
        torch_zip.archive_name(path),
        pickled.data,
        [s.nbytes() for s in pickled.storages],
        alignment=storage_alignment(),
        byteorder=None if no_byteorder else sys.byteorder,
        crc=settings.checksum,
    )
    return PlannedSave(layout, [memory.bytes_tensor(s) for s in pickled.storages], settings.checksum)


def is_path(f: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(f, (str, os.PathLike))


def _check_dill(pickle_module: Any) -> None:
    """Refuse a dill that is too old, as PyTorch does."""
    if getattr(pickle_module, "__name__", "") == "dill":
        torch.serialization._check_dill_version(pickle_module)


def _skips_data() -> bool:
    """Whether ``torch.serialization.skip_data`` is in force."""
    local = getattr(torch.serialization, "_serialization_tls", None)
    return bool(getattr(local, "skip_data", False))


def _save_elsewhere(path: str, zip_format: bool) -> str:
    """Return why ``torch.save`` itself writes this file, or an empty string."""
    if not zip_format:
        return "the legacy (non-zip) format was asked for"
    if _skips_data():
        return "torch.serialization.skip_data is in force"
    if not publish.is_replaceable(path):
        return "the target is not a regular file"
    return ""


def save_with_torch(path: str, write: Callable[[IO[bytes]], object], settings: Settings) -> None:
    """Let ``torch.save`` write the file, published like every other."""
    writer.wait_for(path)
    try:
        if publish.is_replaceable(path):
            with publish.replacing(path, durable=settings.durable) as replacement:
                with open(replacement.fd, "wb", closefd=False) as file:
                    write(file)
                replacement.commit()
        else:
            with open(path, "wb", buffering=0) as file:
                write(file)
    except OSError as exc:
        raise save_error(exc, path, "writing the checkpoint") from exc


def storage_alignment() -> int:
    """Return the storage alignment in bytes: 4096, unless PyTorch's configuration names one of its own."""
    try:
        from torch.utils.serialization import config

        configured = int(config.save.storage_alignment)
    except (ImportError, AttributeError):
        return STORAGE_ALIGNMENT
    return STORAGE_ALIGNMENT if configured == 64 else configured


def report_torch(operation: str, f: FileLike, settings: Settings, reason: str, start: float) -> None:
    path = os.fspath(f) if is_path(f) else "<file object>"
    try:
        nbytes = os.stat(path).st_size if is_path(f) else 0
    except OSError:
        nbytes = 0
    seconds = time.perf_counter() - start
    road.publish_report(TransferReport(operation, path, settings.transfer_type, None, reason, nbytes, 0, seconds))


# ------------------------------------------------------------------------------------------------------ load


def load(
    f: FileLike,
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    transfer_type: TransferType | str | int | None = None,
    fallback: str | None = None,
    num_threads: int | None = None,
    chunk_bytes: int | None = None,
    pin_memory: bool | None = None,
    verify: bool | None = None,
    progress: defaults.Progress | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load an object that ``torch.save`` or `save` wrote, or a safetensors file, over the shortest path from storage.

    The storages are filled first, by several threads and without a second copy in host memory; then ``torch.load``
    itself unpickles the object over them, so everything that it allows and refuses stays so.

    Parameters
    ----------
    f, map_location, pickle_module, weights_only, mmap, pickle_load_args
        As for ``torch.load``. File objects, legacy and TorchScript files, files of another byte order, ``mmap=True``,
        the meta device and ``FakeTensorMode`` are left to ``torch.load`` itself.
    transfer_type, fallback, num_threads, chunk_bytes, progress
        As for `save`.
    pin_memory
        Whether tensors that stay in host memory lie in pinned memory.
    verify
        Whether to check what was read against the checksums in the file, before anything is unpickled.

    Raises
    ------
    FileNotFoundError, IsADirectoryError, PermissionError
        As ``open`` would.
    EOFError
        If the file is empty.
    CorruptCheckpointError
        (a `RuntimeError`) if the file is damaged or no checkpoint.
    pickle.UnpicklingError
        If the file is no checkpoint at all, or ``weights_only`` forbids what it holds.
    TransferUnavailableError
        If the named transfer type cannot carry this load.
    SettingsError
        If an argument or environment variable has a value that is not allowed.

    Examples
    --------
    >>> state = torchdirect.load("ckpt.pt", map_location="cuda")
    """
    start = time.perf_counter()
    settings = defaults.current(
        transfer_type=transfer_type,
        fallback=fallback,
        num_threads=num_threads,
        chunk_bytes=chunk_bytes,
        pin_memory=pin_memory,
        verify=verify,
        progress=progress,
    )
    arguments = {"weights_only": weights_only, **pickle_load_args}

    def with_torch(reason: str) -> Any:
        with _naming(f):
            result = originals.load(f, map_location, pickle_module, mmap=mmap, **arguments)
        report_torch("load", f, settings, reason, start)
        return result

    if not is_path(f):
        return with_torch("file objects are read by torch.load")
    path = os.fspath(f)
    known = (str, torch.device, dict)
    if not (map_location is None or isinstance(map_location, known) or callable(map_location)):
        return with_torch("map_location is of a type that only torch.load can judge")
    if reason := _load_elsewhere(path, map_location, mmap):
        return with_torch(reason)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        status = os.fstat(fd)
        head = inline.read(fd, 512, 0) if stat.S_ISREG(status.st_mode) else b""
        if looks_like_safetensors(head):
            from torchdirect import safetensors

            return safetensors.load_mapped(path, map_location, settings)
        if reason := _check_file(head, status, path):
            return with_torch(reason)
        small = status.st_size <= selection.SMALL_FILE_BYTES and settings.transfer_type is TransferType.AUTO
        if small and not (settings.pin_memory or settings.verify):
            try:
                return with_torch(f"a file of {status.st_size} bytes is not worth the set-up")
            except Exception:
                _check_container(fd, status.st_size, path)
                raise
        stack.enter_context(gc_paused())
        try:
            index = torch_zip.read_index(functools.partial(_read_at, fd), status.st_size, path)
        except torch_zip.NotCarriedError as exc:
            return with_torch(str(exc))
        except UnsupportedPickleError as exc:
            return with_torch(f"its pickle cannot be indexed: {exc}")
        loader = _Loader(index, fd, map_location, settings)
        if loader.foreign:
            return with_torch(f"there are tensors for {loader.foreign}")
        result = loader.load(pickle_module, arguments)
    loader.reading.report(status.st_size, sum(s.nbytes for s in index.storages), start)
    return result


def _read_at(fd: int, offset: int, nbytes: int) -> bytes:
    return inline.read(fd, nbytes, offset)


def _check_container(fd: int, size: int, path: str) -> None:
    """Say what is wrong with a file that PyTorch could not read, if it is the container; PyTorch names no file."""
    with contextlib.suppress(torch_zip.NotCarriedError, UnsupportedPickleError):
        torch_zip.read_index(functools.partial(_read_at, fd), size, path)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from walking, again and again, the many objects that a load makes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _naming(f: FileLike) -> Iterator[None]:
    """Add the file's name to errors of PyTorch's own loader, which do not carry it."""
    try:
        yield
    except Exception as exc:
        if is_path(f) and hasattr(exc, "add_note") and os.fspath(f) not in str(exc):
            exc.add_note(f"(while loading {os.fspath(f)})")
        raise


def _load_elsewhere(path: str, map_location: Any, mmap: bool | None) -> str:
    """Return why ``torch.load`` itself reads this file, or an empty string."""
    if mmap is None:
        with contextlib.suppress(ImportError, AttributeError):
            from torch.utils.serialization import config

            mmap = config.load.mmap
    if mmap:
        return "mmap was asked for: the tensors are the mapped file"
    if isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == "meta":
        return "the meta device has no data"
    if _skips_data():
        return "torch.serialization.skip_data is in force"
    if torch._guards.detect_fake_mode(None) is not None:
        return "FakeTensorMode is active"
    return ""


def _check_file(head: bytes, status: os.stat_result, path: str) -> str:
    """Check that the file can be a checkpoint; return why ``torch.load`` reads it, or an empty string."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(
            errno.EISDIR,
            "Is a directory; name a file in it (td.load_sharded loads shards, torch.distributed.checkpoint its own)",
            path,
        )
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    if status.st_size == 0:
        raise EOFError(f"{path}: the file is empty (0 bytes): it was created and never written. Take an intact copy")
    if head.startswith(_EMPTY_ZIP_MAGIC):
        raise CorruptCheckpointError(
            f"{path}: this zip file is empty and not a PyTorch checkpoint. "
            "Load a file that torch.save or torchdirect.save wrote"
        )
    if head.startswith(_ZIP_MAGIC):
        return ""
    if head[:1] == b"\x80" or head[257:262] == b"ustar":
        return "it is in the legacy (non-zip) format"
    raise pickle.UnpicklingError(
        f"{path}: not a PyTorch checkpoint: it begins with {head[:16]!r}, and neither a zip file nor a pickle does. "
        "Load a file that torch.save or torchdirect.save wrote"
    )


class _Loader:
    """One load on torchdirect's road, from the index to the object."""

    def __init__(self, index: torch_zip.TorchZipIndex, fd: int, map_location: Any, settings: Settings) -> None:
        self.index = index
        self.fd = fd
        self.map_location = map_location
        self.settings = settings
        self.reading: road.Reading
        self.places: list[torch.device] = []
        self.foreign = ""
        self._resolve_devices()

    def _resolve_devices(self) -> None:
        """Ask PyTorch where each storage belongs, with an empty storage for each location tag."""
        if callable(self.map_location):
            self.places = [torch.device("cpu")] * len(self.index.storages)
            return
        resolved: dict[str, torch.device] = {}
        for stored in self.index.storages:
            if stored.location not in resolved:
                where: Any = stored.location
                if isinstance(self.map_location, dict):
                    where = self.map_location.get(where, where)
                elif self.map_location is not None:
                    where = str(self.map_location)
                empty = torch.UntypedStorage(0, device="cpu")  # type: ignore[no-untyped-call]
                placed = torch.serialization.default_restore_location(empty, where)  # type: ignore[no-untyped-call]
                resolved[stored.location] = placed.device
            self.places.append(resolved[stored.location])
        self.foreign = ", ".join(sorted({d.type for d in resolved.values()} - {"cpu", "cuda"}))

    def load(self, pickle_module: Any, arguments: dict[str, Any]) -> Any:
        with road.Reading(self.index.path, self.fd, self.index.file_size, self.places, self.settings) as reading:
            self.reading = reading
            provide = self._provide_ahead() if callable(self.map_location) else self._provide_all()
            with _naming(self.index.path):
                return torch_zip.unpickle(self.index, provide, self.map_location, pickle_module, arguments)

    def _fill(self, which: Sequence[int]) -> dict[str, torch.UntypedStorage]:
        """Read the storages with these indices; return them by key."""
        stored, pinned = [self.index.storages[i] for i in which], self.settings.pin_memory
        places = [self.places[i] for i in which]
        tensors = [
            memory.allocate(s.nbytes, device, s.file_offset, pinned=pinned)
            for s, device in zip(stored, places, strict=True)
        ]
        extents = [Extent(s.file_offset, s.nbytes, n) for n, s in enumerate(stored)]
        describe = names.describer(self.index.pickle.root, [s.key for s in stored])
        self.reading.fill(extents, tensors, describe, [s.crc for s in stored] if self.settings.verify else None)
        return {s.key: tensor.untyped_storage() for s, tensor in zip(stored, tensors, strict=True)}

    def _provide_all(self) -> torch_zip.StorageProvider:
        full = self._fill(range(len(self.index.storages)))

        def provide(reference: StorageReference) -> torch.UntypedStorage:
            return full[reference.key]

        return provide

    def _provide_ahead(self) -> torch_zip.StorageProvider:
        """Read storages in the order of the pickle, a bounded amount ahead of the callable that places them."""
        full: dict[str, torch.UntypedStorage] = {}
        position = 0

        def provide(reference: StorageReference) -> torch.UntypedStorage:
            nonlocal position
            if reference.key not in full:
                stop, ahead = position, 0
                while stop < len(self.index.storages) and (stop == position or ahead < _LOOK_AHEAD_BYTES):
                    ahead += self.index.storages[stop].nbytes
                    stop += 1
                full.update(self._fill(range(position, stop)))
                position = stop
            # An empty storage is asked for at every reference to it; the others once.
            return full.pop(reference.key) if reference.nbytes else full[reference.key]

        return provide
