"""The tensors of a checkpoint file by name, whatever its format, and reading some of them."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torchdirect import digests, memory, names, road
from torchdirect.defaults import Settings
from torchdirect.engines import inline
from torchdirect.engines.base import TransferState
from torchdirect.errors import CorruptCheckpointError
from torchdirect.formats import safetensors, torch_zip
from torchdirect.formats.pickle_index import STORAGE_DTYPES, Inert, StorageReference, UnsupportedPickleError
from torchdirect.plan import Extent

Format = Literal["torch", "safetensors"]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file.

    Attributes
    ----------
    name
        Its key; for nested objects a dotted path.
    dtype, shape, stride
        As PyTorch has them; the stride in elements.
    file_offset
        First byte in the file.
    nbytes
        Bytes from its first to its last element in the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    file_offset: int
    nbytes: int

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the file in order and without holes."""
        return self.stride == contiguous_stride(self.shape) or 0 in self.shape

    @property
    def place(self) -> tuple[Any, ...]:
        """What is equal for two names of the same tensor."""
        return self.file_offset, self.nbytes, self.dtype, self.shape, self.stride


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride in elements of a contiguous tensor, as ``torch.empty`` gives it."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements from the first to the last of a tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class TensorFile:
    """An indexed file that is open for reading; safe to use from several threads.

    Attributes
    ----------
    path, size
        The file.
    format
        ``"torch"`` or ``"safetensors"``.
    tensors
        Every plain tensor by name, in the order of the file's index.
    opaque
        Names of tensors that only unpickling can rebuild: quantized, sparse, subclasses.
    metadata
        Text that a safetensors file carries.
    imports
        What unpickling a torch file would import.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.metadata: dict[str, str] = {}
        self.imports: tuple[str, ...] = ()
        self.opaque: tuple[str, ...] = ()
        self._crcs: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(self.fd)
            if stat.S_ISDIR(status.st_mode):
                what = "Is a directory; td.load_sharded loads directories of shards"
                raise IsADirectoryError(errno.EISDIR, what, self.path)
            self.size = status.st_size
            head = inline.read(self.fd, 16, 0)
            self.format: Format
            if head.startswith(b"PK"):
                self.format = "torch"
                self.tensors = self._index_torch()
            elif safetensors.looks_like(head) or self.path.endswith(".safetensors"):
                self.format = "safetensors"
                self.tensors = self._index_safetensors()
            else:
                raise CorruptCheckpointError(
                    f"{self.path}: neither a torch.save zip file nor a safetensors file: it begins with {head!r}. "
                    "Legacy files are loaded by td.load"
                )
        except BaseException:
            os.close(self.fd)
            raise

    def _read_at(self, offset: int, nbytes: int) -> bytes:
        return inline.read(self.fd, nbytes, offset)

    def _index_torch(self) -> dict[str, TensorInfo]:
        try:
            index = torch_zip.read_index(self._read_at, self.size, self.path)
        except (torch_zip.NotCarriedError, UnsupportedPickleError) as exc:
            raise CorruptCheckpointError(f"{self.path}: cannot be opened tensor by tensor: {exc}; use td.load") from exc
        self.imports = index.pickle.global_names
        self._crcs = {(s.file_offset, s.nbytes): s.crc for s in index.storages}
        places = {s.key: s.file_offset for s in index.storages}
        found: dict[str, TensorInfo] = {}
        opaque: dict[str, None] = {}  # in order
        for name, value in self._walk(index.pickle.root):
            if not isinstance(value, Inert) or not value.qualname.startswith("_rebuild_"):
                continue
            info = tensor_of_stub(self.path, name, value, places)
            if info is not None:
                found.setdefault(name, info)
            elif value.qualname not in ("_rebuild_parameter", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
                opaque[name] = None
        self.opaque = tuple(name for name in opaque if name not in found)
        return {name: info for name, info in found.items() if name not in opaque}

    def _walk(self, root: Any) -> Iterator[tuple[str, Any]]:
        try:
            yield from names.walk(root)
        except names.TooManyNamesError as exc:
            raise CorruptCheckpointError(f"{self.path}: {exc}; use td.load") from exc

    def _index_safetensors(self) -> dict[str, TensorInfo]:
        index = safetensors.read_index(self._read_at, self.fd, self.size, self.path)
        self.metadata = index.metadata
        stored = digests.read_digests(self.path, index.metadata)
        self._crcs = {(t.file_offset, t.nbytes): stored.get(t.name, 0) for t in index.tensors.values()}
        return {
            t.name: TensorInfo(t.name, t.dtype, t.shape, contiguous_stride(t.shape), t.file_offset, t.nbytes)
            for t in index.tensors.values()
        }

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        with self._lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def read(
        self,
        extents: Sequence[Extent],
        targets: Sequence[torch.Tensor],
        labels: Sequence[str],
        settings: Settings,
        state: TransferState | None = None,
        expected: Sequence[int] | None = None,
    ) -> road.Reading:
        """Read extents into one-dimensional uint8 tensors; return what happened.

        Parameters
        ----------
        extents
            Where the bytes are; ``storage`` is the index of the target.
        targets, labels
            What to fill, and what messages call it.
        state
            Of a call that reads several files.
        expected
            Checksums to hold the bytes against; see `road.Reading.fill`.
        """
        if self.fd < 0:
            raise ValueError(f"{self.path} is closed")
        places = [target.device for target in targets]
        with road.Reading(self.path, self.fd, self.size, places, settings, state) as reading:
            reading.fill(extents, targets, lambda i: f"tensor {labels[i]!r}", expected)
        return reading

    def load(
        self,
        infos: Sequence[TensorInfo],
        device: torch.device,
        settings: Settings,
        state: TransferState | None = None,
    ) -> tuple[dict[str, torch.Tensor], road.Reading]:
        """Read tensors into fresh memory; two names of one tensor stay one."""
        wanted = {info.place: info for info in infos}
        targets = {
            place: memory.allocate(info.nbytes, device, info.file_offset, pinned=settings.pin_memory)
            for place, info in wanted.items()
        }
        extents = [Extent(info.file_offset, info.nbytes, i) for i, info in enumerate(wanted.values())]
        labels = [info.name for info in wanted.values()]
        expected = None
        if settings.verify:
            # A part of a record has no checksum of its own.
            expected = [self._crcs.get((info.file_offset, info.nbytes), 0) for info in wanted.values()]
        reading = self.read(extents, list(targets.values()), labels, settings, state, expected)
        made = {place: shaped(targets[place], info) for place, info in wanted.items()}
        return {info.name: made[info.place] for info in infos}, reading


def shaped(data: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """Return the tensor that `info` describes over its bytes."""
    flat = data.view(info.dtype) if info.nbytes else torch.empty(0, dtype=info.dtype, device=data.device)
    return flat.as_strided(info.shape, info.stride)


def tensor_of_stub(path: str, name: str, stub: Inert, places: dict[str, int]) -> TensorInfo | None:
    """Return the tensor that a call of PyTorch's rebuild function makes, if it is a plain one."""
    if stub.qualname not in ("_rebuild_tensor_v2", "_rebuild_tensor_v3") or len(stub.args) < 5:
        return None
    storage, offset, shape, stride = stub.args[:4]
    if not isinstance(storage, StorageReference):
        return None
    dtype: Any = STORAGE_DTYPES[storage.type_name]
    if stub.qualname == "_rebuild_tensor_v3":
        dtype = getattr(torch, getattr(stub.args[6], "qualname", ""), None) if len(stub.args) > 6 else None
    if not isinstance(dtype, torch.dtype) or not _are_sizes(shape, stride, offset):
        return None
    first = offset * dtype.itemsize
    nbytes = span(shape, stride) * dtype.itemsize
    if first + nbytes > storage.nbytes:
        raise CorruptCheckpointError(
            f"{path}: tensor {name!r} reaches to byte {first + nbytes} of storage {storage.key!r}, which has "
            f"{storage.nbytes}. The file is damaged or hostile; take an intact copy"
        )
    return TensorInfo(name, dtype, tuple(shape), tuple(stride), places[storage.key] + first, nbytes)


def _are_sizes(shape: Any, stride: Any, offset: Any) -> bool:
    return (
        isinstance(shape, tuple)
        and isinstance(stride, tuple)
        and len(shape) == len(stride)
        and all(type(n) is int and n >= 0 for n in (*shape, *stride, offset))
    )


def matching(
    tensors: dict[str, TensorInfo], keys: Sequence[str] | None, prefix: str, path: str
) -> Iterator[TensorInfo]:
    """Yield the tensors that a caller asked for.

    Raises
    ------
    KeyError
        If one of `keys` is not in the file.
    """
    for key in tensors if keys is None else keys:
        if key not in tensors:
            raise KeyError(f"{path} has no tensor {key!r}; it has {len(tensors)}, such as {list(tensors)[:3]}")
        if key.startswith(prefix):
            yield tensors[key]
