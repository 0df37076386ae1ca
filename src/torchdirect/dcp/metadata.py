"""The ``.metadata`` of a checkpoint directory: read without running anything of it, and checked before it is used.

The pickle is scanned by the inert index, in which every global is a stub. The few classes that the metadata consists
of are then made from the stubs, field by field, each with the type that it must have.
"""

from __future__ import annotations

import collections
import math
import os
import pathlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchdirect.errors import CorruptCheckpointError
from torchdirect.formats.pickle_index import Inert, StorageReference, UnsupportedPickleError, index_pickle

METADATA_NAME = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"
_DTYPES = {name: value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
_LAYOUTS = {str(value): value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.layout)}
_FORMATS = {0: torch.contiguous_format, 1: torch.channels_last, 2: torch.preserve_format}
_MAX_DEPTH = 200
_LARGEST = 1 << 62
"""Bytes and elements beyond which no number of a checkpoint makes sense, and arithmetic of 64 bits ends."""


class _UnknownClassError(Exception):
    """The pickle holds an object of a class that metadata does not consist of."""


class _WrongTypeError(Exception):
    """A field of a known class has a value that it cannot have."""


def parse_metadata(data: bytes, path: str) -> Metadata:
    """Make the metadata from its pickle; nothing of it is executed.

    Parameters
    ----------
    data
        The pickle.
    path
        Of the file; for messages.

    Raises
    ------
    CorruptCheckpointError
        If it is no such pickle, holds other classes, or fields of wrong types; or if `check_metadata` refuses it.
    """
    try:
        root = index_pickle(data).root
        made = _Builder().build(root)
    except _UnknownClassError as exc:
        raise CorruptCheckpointError(
            f"{path}: the metadata holds {exc}, which no metadata of PyTorch's own planners does. If you trust the "
            "file, read it with DirectReader(..., trusted_metadata=True), which unpickles it as PyTorch does"
        ) from exc
    except (UnsupportedPickleError, _WrongTypeError, RecursionError) as exc:
        raise CorruptCheckpointError(
            f"{path}: not the metadata of a distributed checkpoint: {exc}. The file is damaged or hostile; take an "
            "intact copy"
        ) from exc
    return check_metadata(made, path)


def unpickle_metadata(data: bytes, path: str) -> Metadata:
    """Unpickle metadata as PyTorch does, which runs what the file says, and check it.

    Raises
    ------
    CorruptCheckpointError
        If it cannot be unpickled, or `check_metadata` refuses it.
    """
    try:
        made = pickle.loads(data)
    except Exception as exc:
        raise CorruptCheckpointError(f"{path}: unpickling the metadata failed: {type(exc).__name__}: {exc}") from exc
    return check_metadata(made, path)


def stored_files(data: bytes, path: str) -> set[str]:
    """Return the files that metadata names, whatever else it holds; nothing of it is executed.

    Raises
    ------
    CorruptCheckpointError
        If that cannot be told.
    """
    try:
        places = index_pickle(data).root.state["storage_data"].values()
        return {str(info.state["relative_path"]) for info in places}
    except (UnsupportedPickleError, AttributeError, TypeError, KeyError) as exc:
        raise CorruptCheckpointError(f"{path}: the metadata does not say which files it names ({exc})") from exc


# ------------------------------------------------------------------------------------------------------ building


class _Builder:
    """Makes objects from what the inert index found; what is one object there is one object here."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._depth = 0
        self._classes: dict[tuple[str, str], Callable[[Inert], Any]] = {
            (_METADATA, "Metadata"): self._metadata,
            (_METADATA, "TensorStorageMetadata"): self._tensor,
            (_METADATA, "BytesStorageMetadata"): lambda stub: BytesStorageMetadata(),
            (_METADATA, "ChunkStorageMetadata"): self._chunk,
            (_METADATA, "TensorProperties"): self._properties,
            (_OLD_PROPERTIES, "TensorProperties"): self._properties,
            (_METADATA, "MetadataIndex"): self._index,
            (_METADATA, "StorageMeta"): self._storage_meta,
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): self._storage_info,
            ("torch", "Size"): self._size,
            ("torch", "device"): self._device,
            ("torch.serialization", "_get_layout"): self._layout,
            ("collections", "OrderedDict"): self._ordered_dict,
        }

    def build(self, value: Any) -> Any:
        """Return the object that `value` stands for."""
        kind = type(value)
        if kind in (str, int, float, bool, type(None), bytes):
            return value
        known = self._made.get(id(value))
        if known is not None:
            return known
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _WrongTypeError(f"it is nested more than {_MAX_DEPTH} deep")
        made = self._build(value, kind)
        self._depth -= 1
        self._made[id(value)] = made
        return made

    def _build(self, value: Any, kind: type) -> Any:
        if kind is dict:
            return {self._key(key): self.build(item) for key, item in value.items()}
        if kind in (list, tuple, set, frozenset):
            return kind([self.build(item) for item in value])
        if isinstance(value, Inert):
            make = self._classes.get((value.module, value.qualname))
            if make is not None:
                return make(value)
            if value.module in ("pathlib", "pathlib._local") and value.qualname.endswith("Path"):
                return self._path(value)
            raise _UnknownClassError(f"an object of {value.module}.{value.qualname}")
        if isinstance(value, type) and issubclass(value, Inert):
            if value.module == "torch" and value.qualname in _DTYPES:
                return _DTYPES[value.qualname]
            raise _UnknownClassError(f"{value.module}.{value.qualname}")
        if isinstance(value, StorageReference):
            raise _UnknownClassError("a reference to a storage")
        raise _UnknownClassError(f"an object of {kind.__name__}")

    def _key(self, key: Any) -> Any:
        made = self.build(key)
        try:
            hash(made)
        except TypeError as exc:
            raise _WrongTypeError(f"a {type(made).__name__} is the key of a dictionary") from exc
        return made

    def _fields(self, stub: Inert, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
        """Return the fields of a dataclass that its state has; those that PyTorch added later are left to defaults."""
        if stub.args or stub.items or not isinstance(stub.state, dict):
            raise _WrongTypeError(f"a {stub.qualname} without its fields")
        found = {}
        for name, value in stub.state.items():
            if name not in kinds:
                raise _WrongTypeError(f"a {stub.qualname} has a field {name!r:.100}")
            found[name] = made = self.build(value)
            allowed = kinds[name]
            if not isinstance(made, allowed) or (isinstance(made, bool) and allowed is int):
                raise _WrongTypeError(f"the {name} of a {stub.qualname} is a {type(made).__name__}")
        return found

    def _need(self, stub: Inert, fields: dict[str, Any], *names: str) -> None:
        lacking = [name for name in names if name not in fields]
        if lacking:
            raise _WrongTypeError(f"a {stub.qualname} has no {lacking[0]}")

    def _metadata(self, stub: Inert) -> Metadata:
        anything = (object,)
        optional_text = (str, type(None))
        fields = self._fields(
            stub,
            state_dict_metadata=dict,
            planner_data=anything,
            storage_data=(dict, type(None)),
            storage_meta=(StorageMeta, type(None)),
            version=optional_text,
        )
        self._need(stub, fields, "state_dict_metadata")
        return Metadata(**{name: value for name, value in fields.items() if name in Metadata.__dataclass_fields__})

    def _tensor(self, stub: Inert) -> TensorStorageMetadata:
        fields = self._fields(stub, properties=TensorProperties, size=torch.Size, chunks=list)
        self._need(stub, fields, "properties", "size", "chunks")
        return TensorStorageMetadata(**fields)

    def _chunk(self, stub: Inert) -> ChunkStorageMetadata:
        fields = self._fields(stub, offsets=torch.Size, sizes=torch.Size)
        self._need(stub, fields, "offsets", "sizes")
        return ChunkStorageMetadata(**fields)

    def _properties(self, stub: Inert) -> TensorProperties:
        state = stub.state
        if stub.args or not isinstance(state, tuple) or len(state) != 5:
            raise _WrongTypeError("a TensorProperties without its five fields")
        dtype, layout, requires_grad, encoding, pin_memory = state
        made = self.build(dtype), self.build(layout)
        name = getattr(encoding, "qualname", "").lstrip("_")
        known = isinstance(encoding, Inert) and name == "MEM_FORMAT_ENCODING" and len(encoding.args) == 1
        memory_format = _FORMATS.get(encoding.args[0]) if known and type(encoding.args[0]) is int else None
        if (
            not isinstance(made[0], torch.dtype)
            or not isinstance(made[1], torch.layout)
            or type(requires_grad) is not bool
            or type(pin_memory) is not bool
            or memory_format is None
        ):
            raise _WrongTypeError("a TensorProperties has a field of a wrong type")
        return TensorProperties(made[0], made[1], requires_grad, memory_format, pin_memory)

    def _index(self, stub: Inert) -> MetadataIndex:
        fields = self._fields(stub, fqn=str, offset=(torch.Size, type(None)), index=(int, type(None)))
        self._need(stub, fields, "fqn")
        return MetadataIndex(**fields)

    def _storage_meta(self, stub: Inert) -> StorageMeta:
        text = (str, type(None))
        fields = self._fields(
            stub, checkpoint_id=(str, os.PathLike, type(None)), save_id=text, load_id=text, modules=list
        )
        return StorageMeta(
            **{name: value for name, value in fields.items() if name in StorageMeta.__dataclass_fields__}
        )

    def _storage_info(self, stub: Inert) -> filesystem._StorageInfo:
        fields = self._fields(
            stub, relative_path=str, offset=int, length=int, transform_descriptors=(list, tuple, type(None))
        )
        self._need(stub, fields, "relative_path", "offset", "length")
        if not fields.get("transform_descriptors"):
            fields.pop("transform_descriptors", None)
        return filesystem._StorageInfo(**fields)

    def _size(self, stub: Inert) -> torch.Size:
        numbers = stub.args[0] if len(stub.args) == 1 else None
        if stub.state is not None or not isinstance(numbers, (tuple, list)):
            raise _WrongTypeError("a torch.Size without its numbers")
        if not all(type(n) is int and 0 <= n < _LARGEST for n in numbers):
            raise _WrongTypeError(f"a torch.Size of {numbers!r:.100}")
        return torch.Size(numbers)

    def _device(self, stub: Inert) -> torch.device:
        try:
            return torch.device(*stub.args)
        except (TypeError, RuntimeError) as exc:
            raise _WrongTypeError(f"a torch.device of {stub.args!r:.100}") from exc

    def _layout(self, stub: Inert) -> torch.layout:
        layout = _LAYOUTS.get(stub.args[0]) if len(stub.args) == 1 and isinstance(stub.args[0], str) else None
        if layout is None:
            raise _WrongTypeError(f"a layout of {stub.args!r:.100}")
        return layout

    def _ordered_dict(self, stub: Inert) -> collections.OrderedDict[Any, Any]:
        if stub.args or stub.state:
            raise _WrongTypeError("an OrderedDict with arguments")
        return collections.OrderedDict((self._key(key), self.build(value)) for key, value in stub.items)

    def _path(self, stub: Inert) -> pathlib.PurePath:
        if not all(isinstance(part, str) and "\0" not in part for part in stub.args):
            raise _WrongTypeError(f"a path of {stub.args!r:.100}")
        return pathlib.PureWindowsPath(*stub.args) if "Windows" in stub.qualname else pathlib.Path(*stub.args)


# ------------------------------------------------------------------------------------------------------ checking


def check_metadata(metadata: object, path: str) -> Metadata:
    """Check that metadata is of one piece: every chunk inside its tensor, stored once, at a place that can be.

    Raises
    ------
    CorruptCheckpointError
        Naming the file, the entry and what is wrong with it.
    """
    if not isinstance(metadata, Metadata):
        raise _corrupt(path, f"it holds a {type(metadata).__name__} and no Metadata")
    stored = metadata.storage_data
    if not isinstance(stored, dict) or not isinstance(metadata.state_dict_metadata, dict):
        raise _corrupt(path, "it does not say where its entries are stored")
    for index in _indices(metadata.state_dict_metadata, path):
        if index not in stored:
            raise _corrupt(path, f"entry {_named(index)} is stored nowhere")
    for index, info in stored.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, filesystem._StorageInfo):
            raise _corrupt(path, f"entry {index!r:.200} has no place of the kind that PyTorch's writer notes")
        _check_place(index, info, path)
    _check_overlap(stored, path)
    return metadata


def _indices(entries: dict[Any, Any], path: str) -> Iterator[MetadataIndex]:
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise _corrupt(path, f"an entry is named by a {type(name).__name__}")
        if isinstance(entry, BytesStorageMetadata):
            yield MetadataIndex(name)
        elif isinstance(entry, TensorStorageMetadata):
            _check_chunks(name, entry, path)
            for chunk in entry.chunks:
                yield MetadataIndex(name, chunk.offsets)
        else:
            raise _corrupt(path, f"entry {name!r} is described by a {type(entry).__name__}")


def _check_chunks(name: str, entry: TensorStorageMetadata, path: str) -> None:
    if not isinstance(entry.properties, TensorProperties) or not isinstance(entry.properties.dtype, torch.dtype):
        raise _corrupt(path, f"entry {name!r} has no properties with a dtype")
    volume = math.prod(entry.size)
    if volume * entry.properties.dtype.itemsize > _LARGEST:
        raise _corrupt(path, f"entry {name!r} of shape {list(entry.size)} is larger than any memory")
    covered = 0
    seen = set()
    for chunk in entry.chunks:
        if not isinstance(chunk, ChunkStorageMetadata) or not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
            raise _corrupt(path, f"a chunk of entry {name!r} has other dimensions than its tensor")
        nbytes = math.prod(chunk.sizes)
        if nbytes == 0:
            continue
        inside = all(o + s <= n for o, s, n in zip(chunk.offsets, chunk.sizes, entry.size, strict=True))
        if not inside or chunk.offsets in seen:
            what = "comes twice" if inside else f"leaves the tensor's shape {list(entry.size)}"
            raise _corrupt(path, f"the chunk at {list(chunk.offsets)} of {list(chunk.sizes)} of entry {name!r} {what}")
        seen.add(chunk.offsets)
        covered += nbytes
    if covered > volume:
        raise _corrupt(path, f"the chunks of entry {name!r} overlap: {covered} elements for {volume}")


def _check_place(index: MetadataIndex, info: filesystem._StorageInfo, path: str) -> None:
    name = info.relative_path
    parts = name.split("/") if isinstance(name, str) else [".."]
    if not name or "\0" in str(name) or name.startswith("/") or ".." in parts or parts[-1] in ("", "."):
        raise _corrupt(path, f"entry {_named(index)} is said to be in {name!r:.200}, outside the directory")
    numbers = info.offset, info.length
    if not all(type(n) is int and 0 <= n < _LARGEST for n in numbers):
        raise _corrupt(path, f"entry {_named(index)} is said to be {info.length!r} bytes at offset {info.offset!r}")


def _check_overlap(stored: dict[MetadataIndex, filesystem._StorageInfo], path: str) -> None:
    files: dict[str, list[tuple[int, int, MetadataIndex]]] = {}
    for index, info in stored.items():
        if info.length:
            files.setdefault(info.relative_path, []).append((info.offset, info.length, index))
    for name, places in files.items():
        end, last = 0, None
        for offset, length, index in sorted(places, key=lambda place: place[:2]):
            if offset < end and last is not None:
                raise _corrupt(path, f"entries {_named(last)} and {_named(index)} overlap in file {name!r} at {offset}")
            end, last = offset + length, index


def _named(index: MetadataIndex) -> str:
    return repr(index.fqn) if not index.offset else f"{index.fqn!r} at {list(index.offset)}"


def _corrupt(path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: {what}. The metadata is damaged or hostile; take an intact copy of the checkpoint"
    )


def chunk_sizes(metadata: Metadata, index: MetadataIndex) -> torch.Size | None:
    """Return the shape of a stored chunk as the metadata has it; None for an entry that is no tensor."""
    entry = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if (
        index.index is not None
        and index.index < len(entry.chunks)
        and entry.chunks[index.index].offsets == index.offset
    ):
        return entry.chunks[index.index].sizes
    return next((chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset), None)
