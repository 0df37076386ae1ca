"""The zip container of ``torch.save``: pickling, layout, index, and unpickling over storages that are already full."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import io
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchdirect import checksum, originals
from torchdirect.errors import CorruptCheckpointError
from torchdirect.formats import plain_pickle, zip_layout
from torchdirect.formats.layout import FileLayout
from torchdirect.formats.pickle_index import PickleIndex, StorageReference, index_pickle, rebuild_plain
from torchdirect.formats.plain_pickle import PLAIN_STORAGES, is_plain_tensor
from torchdirect.formats.zip_directory import STORED, Entry, ReadAt, payload_offset, read_directory
from torchdirect.plan import Extent, Gap

# ---------------------------------------------------------------------------------------------------- saving


@dataclass(frozen=True)
class PickledObject:
    """An object as ``torch.save`` would pickle it.

    Attributes
    ----------
    data
        The content of ``data.pkl``.
    storages
        The storages that it refers to; their index is their record's number under ``data/``.
    """

    data: bytes
    storages: tuple[torch.UntypedStorage, ...]


class _PlainStorage:
    """Stands for a `TypedStorage` on its way to its persistent id; making a real one costs more than the rest."""

    __slots__ = ("dtype", "storage")

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self.storage = storage
        self.dtype = dtype


def _reduce_plain(tensor: torch.Tensor) -> Any:
    """Reduce an ordinary tensor as ``Tensor.__reduce_ex__`` does, at a third of its time; leave any other to it."""
    if not is_plain_tensor(tensor):
        return NotImplemented
    storage = _PlainStorage(tensor.untyped_storage(), tensor.dtype)
    size, stride = tuple(tensor.size()), tensor.stride()
    hooks: collections.OrderedDict[Any, Any] = collections.OrderedDict()
    arguments = (storage, tensor.storage_offset(), size, stride, tensor.requires_grad, hooks)
    return torch._utils._rebuild_tensor_v2, arguments


def pickle_object(
    obj: object, pickle_module: Any, pickle_protocol: int, *, location: str | None = None
) -> PickledObject:
    """Pickle `obj` to memory, byte for byte as ``torch.save`` does, and collect the storages in it.

    Parameters
    ----------
    obj, pickle_module, pickle_protocol
        As for ``torch.save``.
    location
        The device tag of every storage, such as ``"cpu"``, if not that of the device where it is.

    Raises
    ------
    RuntimeError
        If two tensors see the same memory as different dtypes, which the format cannot express.
    """
    if pickle_module is pickle and pickle_protocol == plain_pickle.PROTOCOL:
        with contextlib.suppress(plain_pickle.NotPlainError):
            return PickledObject(*plain_pickle.dumps(obj, location))
    return _pickle_any(obj, pickle_module, pickle_protocol, location)


def _pickle_any(obj: object, pickle_module: Any, pickle_protocol: int, location: str | None = None) -> PickledObject:
    storages: dict[str, torch.UntypedStorage] = {}
    keys: dict[int, str] = {}
    dtypes: dict[int, torch.dtype] = {}

    def storage_id(candidate: Any) -> tuple[Any, ...]:
        if isinstance(candidate, _PlainStorage):
            storage, dtype = candidate.storage, candidate.dtype
            storage_type, numel = PLAIN_STORAGES[dtype], storage.nbytes() // dtype.itemsize
        elif isinstance(candidate, torch.storage.TypedStorage):
            storage = candidate._untyped_storage
            dtype = candidate.dtype
            storage_type = getattr(torch, candidate._pickle_storage_type())  # type: ignore[no-untyped-call]
            numel = candidate._size()  # type: ignore[no-untyped-call]
        else:
            storage = candidate
            dtype = torch.uint8
            storage_type = torch.serialization.normalize_storage_type(type(candidate))  # type: ignore[no-untyped-call]
            numel = storage.nbytes()
        address = storage.data_ptr() if storage.device.type != "meta" else 0
        if address and dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError(
                "Cannot save multiple tensors or storages that view the same data as different types "
                f"({dtypes[address]} and {dtype}); save a clone of one of them"
            )
        key = keys.setdefault(storage._cdata, str(len(keys)))
        fake_device = getattr(candidate, "_fake_device", None)
        tag = str(fake_device) if fake_device is not None else torch.serialization.location_tag(storage)
        storages[key] = storage  # keeps it alive: a temporary's address must not be given out again
        return "storage", storage_type, key, location or tag, numel

    storage_classes = (torch.storage.TypedStorage, torch.UntypedStorage, _PlainStorage)

    class Pickler(pickle_module.Pickler):  # type: ignore[misc]
        def persistent_id(self, candidate: Any) -> tuple[Any, ...] | None:
            # Asked for every object in the pickle, so the common answer comes first.
            return storage_id(candidate) if isinstance(candidate, storage_classes) else None

        if pickle_module is pickle:

            def reducer_override(self, candidate: Any) -> Any:
                return _reduce_plain(candidate) if type(candidate) is torch.Tensor else NotImplemented

    buffer = io.BytesIO()
    Pickler(buffer, protocol=pickle_protocol).dump(obj)
    return PickledObject(buffer.getvalue(), tuple(storages.values()))


def archive_name(path: str) -> str:
    """Return the folder name inside the archive that ``torch.save`` derives from the file's name."""
    if not path.isascii():
        return "archive"  # PyTorch's writer hands such names to Python, and the archive does not learn the name
    base = path.replace("\\", "/").rsplit("/", 1)[-1]
    return base.rsplit(".", 1)[0] or "archive"


def layout_file(
    archive: str, data_pkl: bytes, storage_sizes: Sequence[int], *, alignment: int, byteorder: str | None, crc: bool
) -> FileLayout:
    """Lay out a checkpoint file as ``torch.save`` would with this storage alignment.

    Parameters
    ----------
    archive
        Folder name inside the archive.
    storage_sizes
        Bytes of each storage.
    alignment
        Bytes; every payload begins on a multiple of it. A power of two, 32768 at most.
    byteorder
        ``"little"`` or ``"big"``; None leaves the record out.
    crc
        Whether CRC-32 fields are filled in.
    """
    return _LayoutBuilder(archive, alignment, crc).build(data_pkl, storage_sizes, byteorder)


class _LayoutBuilder:
    def __init__(self, archive: str, alignment: int, crc: bool) -> None:
        self.prefix = archive.encode() + b"/"
        self.alignment = alignment
        self.crc = crc
        self.position = 0
        self.leading: list[zip_layout.Record] = []
        self.leading_crcs: list[int] = []
        self.stored: list[zip_layout.Record] = []

    def _place(self, name: bytes, nbytes: int) -> zip_layout.Record:
        record = zip_layout.place_record(self.prefix + name, self.position, nbytes, self.alignment)
        self.position = record.end
        return record

    def _checksum(self, data: bytes) -> int:
        return checksum.crc32(data) if self.crc else 0

    def _whole(self, record: zip_layout.Record, data: bytes, crc: int) -> bytes:
        return zip_layout.local_header(record) + data + zip_layout.data_descriptor(record, crc)

    def build(self, data_pkl: bytes, storage_sizes: Sequence[int], byteorder: str | None) -> FileLayout:
        contents = [(b"data.pkl", data_pkl), (b".format_version", b"1")]
        contents.append((b".storage_alignment", str(self.alignment).encode()))
        if byteorder is not None:
            contents.append((b"byteorder", byteorder.encode()))
        prologue = []
        for name, data in contents:
            record = self._place(name, len(data))
            crc = self._checksum(data)
            prologue.append(self._whole(record, data, crc))
            self.leading.append(record)
            self.leading_crcs.append(crc)

        self.stored = [self._place(b"data/%d" % i, nbytes) for i, nbytes in enumerate(storage_sizes)]
        extents: list[Extent] = []
        gaps: list[Gap] = []
        gap_start, first = 0, 0  # the open gap begins here, and renders the headers of stored[first:]
        head = b"".join(prologue)
        for i, record in enumerate(self.stored):
            if record.nbytes:
                needs = range(gaps_need, first) if (gaps_need := self._previous_stored(first)) is not None else range(0)
                render = functools.partial(self._render_gap, head, needs, first, i + 1)
                gaps.append(Gap(gap_start, record.payload_offset - gap_start, needs, render))
                extents.append(Extent(record.payload_offset, record.nbytes, i))
                gap_start, first, head = record.payload_end, i + 1, b""

        tail_records = [self._place(b"version", len(_VERSION)), self._place(b".data/serialization_id", 40)]
        directory_offset = self.position
        records = [*self.leading, *self.stored, *tail_records]
        file_size = directory_offset + sum(map(zip_layout.central_size, records)) + zip_layout.END_RECORDS_SIZE
        render_tail = functools.partial(self._render_tail, head, first, tail_records, directory_offset)
        gaps.append(Gap(gap_start, file_size - gap_start, range(len(self.stored)), render_tail))
        return FileLayout(file_size, tuple(extents), tuple(gaps))

    def _previous_stored(self, first: int) -> int | None:
        """Return the storage whose descriptor opens the gap that begins with the header of ``stored[first]``."""
        return first - 1 if first and self.stored[first - 1].nbytes else None

    def _render_gap(self, head: bytes, needs: range, first: int, stop: int, crcs: Sequence[int]) -> bytes:
        parts = [head]
        parts += [zip_layout.data_descriptor(self.stored[i], crcs[i]) for i in needs]
        parts += [zip_layout.local_header(record) for record in self.stored[first:stop]]
        return b"".join(parts)

    def _render_tail(
        self,
        head: bytes,
        first: int,
        tail_records: Sequence[zip_layout.Record],
        directory_offset: int,
        crcs: Sequence[int],
    ) -> bytes:
        previous = self._previous_stored(first)
        needs = range(0) if previous is None else range(previous, first)
        parts = [self._render_gap(head, needs, first, len(self.stored), crcs)]
        names = b"\0".join(r.name for r in (*self.leading, *self.stored))
        known = [*self.leading_crcs, *crcs]
        contents = [_VERSION, _serialization_id(names, known if self.crc else [])]
        tail_crcs = [self._checksum(data) for data in contents]
        parts += [self._whole(*triple) for triple in zip(tail_records, contents, tail_crcs, strict=True)]
        records = [*self.leading, *self.stored, *tail_records]
        parts.append(zip_layout.central_directory(records, [*known, *tail_crcs], directory_offset))
        return b"".join(parts)


_VERSION = b"3\n"  # what PyTorch's writer produces for every archive that is not TorchScript


def _serialization_id(names: bytes, crcs: Sequence[int]) -> bytes:
    """Return 40 decimal digits that identify names and content, as PyTorch's writer does with hashes of its own."""
    name_hash = int.from_bytes(hashlib.sha256(names).digest()[:8], "little")
    content = b"".join(crc.to_bytes(4, "little") for crc in crcs)
    content_hash = int.from_bytes(hashlib.sha256(content).digest()[:8], "little") if crcs else 0
    return b"%020d%020d" % (name_hash, content_hash)


# --------------------------------------------------------------------------------------------------- loading


class NotCarriedError(Exception):
    """The file is one that torchdirect leaves to ``torch.load``; the message says why."""


@dataclass(slots=True)
class StoredStorage:
    """One storage in the file.

    Attributes
    ----------
    key, location
        Record number and the writer's device tag.
    nbytes
        Length in bytes.
    file_offset
        First payload byte.
    crc
        CRC-32 of the record; 0 if the writer computed none.
    """

    key: str
    location: str
    nbytes: int
    file_offset: int
    crc: int


@dataclass(frozen=True)
class TorchZipIndex:
    """Everything about a checkpoint file but its payload.

    Attributes
    ----------
    path, file_size
        The file.
    data_pkl
        The pickle.
    pickle
        What it refers to.
    byteorder
        The ``byteorder`` record, or None.
    version
        The ``version`` record.
    storages
        Every distinct storage in the order in which the pickle first refers to it.
    """

    path: str
    file_size: int
    data_pkl: bytes
    pickle: PickleIndex
    byteorder: bytes | None
    version: bytes
    storages: tuple[StoredStorage, ...]


def read_index(read_at: ReadAt, file_size: int, path: str) -> TorchZipIndex:
    """Index a zip checkpoint; nothing of the file is executed.

    Raises
    ------
    CorruptCheckpointError
        If the file is damaged, or is a zip file but no checkpoint.
    NotCarriedError
        If it is a checkpoint of a kind that only PyTorch's own loader handles.
    UnsupportedPickleError
        If the pickle cannot be indexed.
    """
    entries = read_directory(read_at, file_size, path)
    prefix = next(iter(entries), "").split("/", 1)[0] + "/"

    def content(name: str) -> bytes | None:
        entry = entries.get(prefix + name)
        if entry is None:
            return None
        if entry.method != STORED:
            raise NotCarriedError(f"record {name!r} is compressed")
        return read_at(payload_offset(read_at, entry, file_size, path), entry.nbytes)

    if prefix + "constants.pkl" in entries:
        raise NotCarriedError("it is a TorchScript archive")
    data_pkl = content("data.pkl")
    if data_pkl is None:
        some = ", ".join(repr(name) for name in list(entries)[:3]) or "nothing"
        raise CorruptCheckpointError(
            f"{path}: this zip file is not a PyTorch checkpoint: it has no record 'data.pkl' (it holds {some}). "
            "Load a file that torch.save or torchdirect.save wrote"
        )
    byteorder = content("byteorder")
    _check_byteorder(byteorder)
    version = content("version") or content(".data/version") or _VERSION
    pickle_index = index_pickle(data_pkl)
    storages: dict[str, StoredStorage] = {}
    for reference in pickle_index.references:
        if reference.key not in storages:
            entry = entries.get(f"{prefix}data/{reference.key}")
            storages[reference.key] = _locate(read_at, entry, reference, file_size, path)
    return TorchZipIndex(path, file_size, data_pkl, pickle_index, byteorder, version, tuple(storages.values()))


def _check_byteorder(byteorder: bytes | None) -> None:
    if byteorder is None:
        load_endianness = torch.serialization.get_default_load_endianness()
        if sys.byteorder != "little" or load_endianness is torch.serialization.LoadEndianness.BIG:
            raise NotCarriedError("its byte order is not recorded, and the default is not this machine's")
    elif byteorder.decode("latin1") != sys.byteorder:
        raise NotCarriedError(f"its byte order is {byteorder.decode('latin1')!r}")


def _locate(
    read_at: ReadAt, entry: Entry | None, reference: StorageReference, file_size: int, path: str
) -> StoredStorage:
    name = f"data/{reference.key}"
    if entry is None:
        raise CorruptCheckpointError(
            f"{path}: the pickle refers to storage {reference.key!r}, but there is no record {name!r}. "
            "The file is damaged; take an intact copy"
        )
    if entry.method != STORED:
        raise NotCarriedError(f"record {name!r} is compressed")
    if entry.nbytes < reference.nbytes:
        raise CorruptCheckpointError(
            f"{path}: record {name!r} holds {entry.nbytes} bytes, but the pickle says {reference.nbytes} "
            f"(at offset {entry.header_offset}). The file is damaged; take an intact copy"
        )
    offset = payload_offset(read_at, entry, file_size, path)
    crc = entry.crc if entry.nbytes == reference.nbytes else 0
    return StoredStorage(reference.key, reference.location, reference.nbytes, offset, crc)


# ------------------------------------------------------------------------------------------------ unpickling

StorageProvider = Callable[[StorageReference], torch.UntypedStorage]
"""Returns the full storage that a reference stands for, on its final device."""


class _Handover:
    """Hands storages to the unpickler in the order in which the index says that it will ask for them.

    ``torch.load`` asks once for each storage, and again for those without memory of their own (empty ones).
    """

    def __init__(self, references: Sequence[StorageReference], provide: StorageProvider) -> None:
        self._references = iter(references)
        self._provide = provide
        self._loaded: set[str] = set()

    def take(self) -> torch.UntypedStorage:
        reference = next(r for r in self._references if r.key not in self._loaded)
        storage = self._provide(reference)
        if storage.data_ptr():
            self._loaded.add(reference.key)
        return storage


class _Destination(str):
    """A location string that also says which handover a storage comes from.

    PyTorch's tensor subclasses ask for the caller's ``map_location`` while they are rebuilt and refuse a callable, so
    the handover travels in a string or a dictionary: what those are to PyTorch, they stay.
    """

    __slots__ = ("handover",)
    handover: _Handover


def _destination(location: str, handover: _Handover) -> _Destination:
    destination = _Destination(location)
    destination.handover = handover
    return destination


class _DestinationMap(dict[Any, Any]):
    """The caller's dictionary (or none), with its answers made destinations."""

    handover: _Handover

    def get(self, key: Any, default: Any = None) -> Any:
        location = super().get(key, default)
        return _destination(location, self.handover) if isinstance(location, str) else location


def _hand_over(_storage: Any, location: str) -> torch.UntypedStorage | None:
    return location.handover.take() if isinstance(location, _Destination) else None


_register_lock = threading.Lock()
_registered = False


def _register_hand_over() -> None:
    """Add the handover to PyTorch's registry of storage deserializers, before all others, once per process."""
    global _registered
    with _register_lock:
        if not _registered:
            torch.serialization.register_package(-1_000_003, lambda storage: None, _hand_over)
            _registered = True


def _wrap_map_location(map_location: Any, handover: _Handover) -> Any:
    if map_location is None or isinstance(map_location, dict):
        wrapped = _DestinationMap(map_location or {})
        wrapped.handover = handover
        return wrapped
    if isinstance(map_location, (str, torch.device)):
        return _destination(str(map_location), handover)

    def call_map_location(_storage: Any, location: str) -> Any:
        full = handover.take()
        placed = map_location(full, location)
        return torch.serialization.default_restore_location(full, location) if placed is None else placed  # type: ignore[no-untyped-call]

    return call_map_location


def unpickle(
    index: TorchZipIndex,
    provide: StorageProvider,
    map_location: Any,
    pickle_module: Any,
    load_arguments: Mapping[str, Any],
) -> Any:
    """Let ``torch.load`` itself unpickle the object, over storages that are already full.

    It is given a *skeleton* of the file, without payload, in memory, so that nothing is mapped from the real file,
    whose disk, size and later fate do not matter.

    Parameters
    ----------
    provide
        Called for each storage in the pickle's order. With a callable `map_location` it must return host storages.
    load_arguments
        Keyword arguments of ``torch.load``.
    """
    if index.pickle.plain and not callable(map_location) and _default_unpickling(pickle_module, load_arguments):
        with contextlib.suppress(Exception):  # torch.load below gives the verdict, and its error
            return rebuild_plain(index.pickle, provide)
    _register_hand_over()
    handover = _Handover(index.pickle.references, provide)
    with _skeleton_file(_skeleton(index)) as path:
        place = _wrap_map_location(map_location, handover)
        return originals.load(path, place, pickle_module, mmap=True, **load_arguments)


def _default_unpickling(pickle_module: Any, load_arguments: Mapping[str, Any]) -> bool:
    """Whether the caller and the environment leave it to PyTorch how to unpickle."""
    return (
        pickle_module is None
        and set(load_arguments) <= {"weights_only"}
        and not any(
            name in os.environ for name in ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
        )
    )


def _skeleton(index: TorchZipIndex) -> bytes:
    """Return a zip file with the records of `index`, its storages empty."""
    contents = [(b"archive/data.pkl", index.data_pkl), (b"archive/version", index.version)]
    if index.byteorder is not None:
        contents.append((b"archive/byteorder", index.byteorder))
    contents += [(f"archive/data/{storage.key}".encode(), b"") for storage in index.storages]
    records, parts, crcs, position = [], [], [], 0
    for name, data in contents:
        record = zip_layout.place_record(name, position, len(data), 1)
        crc = checksum.crc32(data) if data else 0
        parts += [zip_layout.local_header(record), data, zip_layout.data_descriptor(record, crc)]
        records.append(record)
        crcs.append(crc)
        position = record.end
    parts.append(zip_layout.central_directory(records, crcs, position))
    return b"".join(parts)


@contextlib.contextmanager
def _skeleton_file(data: bytes) -> Iterator[str]:
    """Put `data` where ``torch.load`` can map it by a path: anonymous memory, or a temporary file without /proc."""
    if os.path.isdir("/proc/self/fd"):
        fd = os.memfd_create("torchdirect-skeleton", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        with tempfile.NamedTemporaryFile(prefix="torchdirect-") as file:
            file.write(data)
            file.flush()
            yield file.name
