"""`DirectReader`: what ``torch.distributed.checkpoint.load`` reads, on torchdirect's road."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from torchdirect import defaults, memory, originals, progress, road
from torchdirect.checkpoint import gc_paused
from torchdirect.dcp import directory
from torchdirect.dcp.metadata import chunk_sizes, parse_metadata, unpickle_metadata
from torchdirect.dcp.regions import is_worth_runs, region_extents
from torchdirect.engines import inline
from torchdirect.engines.base import TransferState
from torchdirect.errors import CorruptCheckpointError, SettingsError, TorchDirectError
from torchdirect.formats import torch_zip
from torchdirect.formats.pickle_index import Inert, UnsupportedPickleError
from torchdirect.in_place import read_converted
from torchdirect.plan import Extent
from torchdirect.tensor_file import TensorInfo, span, tensor_of_stub
from torchdirect.transfer import TransferReport, TransferType

_FILES_AT_ONCE = 2
"""So that the end of one file and the beginning of the next overlap."""
_EDGE_BYTES = 2048
"""What an item's headers and directory fit in, when PyTorch or we wrote it."""


class DirectReader(FileSystemReader):
    """Storage reader for ``torch.distributed.checkpoint.load``.

    Bytes go straight into the target tensors: whole shards, or the parts of shards that a rank needs. Targets of
    another dtype or layout pass through bounded buffers. Nothing of the metadata is executed.

    Parameters
    ----------
    path
        Directory of the checkpoint, written by `DirectWriter` or by PyTorch's ``FileSystemWriter``.
    _extension_registry
        Must be None: files with stream extensions are for PyTorch's ``FileSystemReader``.
    trusted_metadata
        Whether ``.metadata`` may be unpickled as PyTorch does it, which can run code. Only planners that put objects
        of their own into it need that.
    transfer_type, fallback, num_threads, chunk_bytes, verify, progress
        As for `torchdirect.load`. `verify` checks the checksums of the shards that are read whole. What is not given
        is taken from the `settings` in force here, not later.

    Raises
    ------
    SettingsError
        If an argument has a value that is not allowed.

    Examples
    --------
    >>> dcp.load(state, storage_reader=td.dcp.DirectReader("checkpoints/step-1000"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        trusted_metadata: bool = False,
        transfer_type: TransferType | str | int | None = None,
        fallback: str | None = None,
        num_threads: int | None = None,
        chunk_bytes: int | None = None,
        verify: bool | None = None,
        progress: defaults.Progress | None = None,
    ) -> None:
        if _extension_registry is not None:
            raise SettingsError(
                "stream extensions change the bytes on their way; use PyTorch's FileSystemReader for them"
            )
        super().__init__(path)
        self.settings = defaults.current(
            transfer_type=transfer_type,
            fallback=fallback,
            num_threads=num_threads,
            chunk_bytes=chunk_bytes,
            verify=verify,
            progress=progress,
        )
        self.trusted_metadata = trusted_metadata
        self.failure: TorchDirectError | None = None
        self._metadata: Metadata | None = None

    @property
    def _folder(self) -> str:
        return os.fspath(self.path)

    # ------------------------------------------------------------------------------------------- metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and check the metadata; PyTorch calls it on every rank.

        Raises
        ------
        FileNotFoundError
            If there is none.
        CorruptCheckpointError
            If it is damaged or hostile.
        """
        if self.failure is not None:
            # PyTorch looks for metadata of this rank alone next, and would tell that there is none.
            raise self.failure
        path = os.path.join(self._folder, directory.metadata_name(kwargs.get("rank")))
        with open(path, "rb") as file:
            data = file.read()
        try:
            metadata = (unpickle_metadata if self.trusted_metadata else parse_metadata)(data, path)
        except CorruptCheckpointError as exc:
            self.failure = exc
            raise
        meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        meta.load_id = self.load_id
        metadata.storage_meta = meta
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take over the metadata; PyTorch calls it on every rank."""
        self._metadata = metadata
        self.storage_data = metadata.storage_data
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the last load; PyTorch calls it before a load, with a path if it was given one."""
        super().reset(checkpoint_id)
        self.failure = self._metadata = None

    # -------------------------------------------------------------------------------------------- reading

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for; PyTorch calls it on every rank.

        Raises
        ------
        FileNotFoundError
            If a file is missing. No target has been changed then.
        CorruptCheckpointError
            If an entry is not where, or not what, the metadata says. Targets are changed only after all headers have
            been found right.
        LoadError
            If reading fails; targets may have been changed in part.
        TransferUnavailableError
            If the named transfer type cannot carry this load.
        """
        start = time.perf_counter()
        if self._metadata is None:
            raise RuntimeError("read_data comes after set_up_storage_reader; call torch.distributed.checkpoint.load")
        with gc_paused(), contextlib.ExitStack() as stack:
            files: dict[str, _DataFile] = {}
            for request in plan.items:
                info = self._place(request.storage_index)
                file = files.get(info.relative_path)
                if file is None:
                    file = files[info.relative_path] = _DataFile(self._folder, info.relative_path)
                    stack.callback(file.close)
                file.add(request, info, self._metadata)
            for file in files.values():
                file.resolve(planner)
            state = TransferState()
            readings = self._move(list(files.values()), state)
            for file in files.values():
                file.hand_over(planner)
        nbytes = sum(file.nbytes for file in files.values())
        self._report(readings, nbytes, state, start)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _place(self, index: MetadataIndex) -> filesystem._StorageInfo:
        info: filesystem._StorageInfo | None = self.storage_data.get(index)
        if info is None:
            raise CorruptCheckpointError(f"{self._folder}: the metadata does not say where {index.fqn!r} is stored")
        if getattr(info, "transform_descriptors", None):
            raise CorruptCheckpointError(
                f"{self._folder}: entry {index.fqn!r} was written through stream extensions "
                f"({', '.join(map(str, info.transform_descriptors or ()))}); load it with PyTorch's FileSystemReader"
            )
        return info

    def _move(self, files: Sequence[_DataFile], state: TransferState) -> list[road.Reading]:
        """Read the tensors of all files, two files at once; return what happened to each."""
        busy = [file for file in files if file.targets or file.converted]
        devices = {target.device for file in busy for target in file.devices}
        # Work that the caller has queued on the targets comes first: threads take over its streams.
        streams = [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]

        def load(file: _DataFile) -> road.Reading:
            with contextlib.ExitStack() as entered:
                for stream in streams:
                    entered.enter_context(torch.cuda.stream(stream))
                return file.load(self.settings, state)

        with (
            progress.shown(self.settings.progress, f"loading {self._folder}", state) as tick,
            ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="torchdirect-dcp") as pool,
        ):
            # Not in the caller's context: ranks that share reads (`replicated`) share whole files, not parts of them.
            futures = [pool.submit(load, file) for file in busy]
            try:
                for future in futures:
                    while tick is not None and not wait([future], timeout=0.1).done:
                        tick()
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _report(self, readings: Sequence[road.Reading], nbytes: int, state: TransferState, start: float) -> None:
        if readings:
            readings[0].report(nbytes, state.total, start, self._folder)
            return
        seconds, requested = time.perf_counter() - start, self.settings.transfer_type
        reason = "there are no tensors to read"
        road.publish_report(TransferReport("load", self._folder, requested, None, reason, nbytes, 0, seconds))


@dataclass
class _Request:
    """One item of a load plan, and what has been found about it."""

    item: ReadItem
    place: filesystem._StorageInfo
    info: TensorInfo | None = None
    target: torch.Tensor | None = None
    data: bytes = b""


@dataclass
class _DataFile:
    """One data file of the directory, and what is asked of it."""

    folder: str
    name: str
    path: str = ""
    fd: int = -1
    size: int = 0
    nbytes: int = 0
    requests: list[_Request] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    converted: list[tuple[TensorInfo, torch.Tensor]] = field(default_factory=list)
    _indexed: dict[tuple[int, int], tuple[TensorInfo | None, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path = os.path.join(self.folder, self.name)
        self.fd = directory.open_inside(self.folder, self.name)
        self.size = os.fstat(self.fd).st_size

    def close(self) -> None:
        os.close(self.fd)

    @property
    def devices(self) -> Iterator[torch.Tensor]:
        """What is read into."""
        yield from self.targets
        yield from (target for _, target in self.converted)

    # ------------------------------------------------------------------------------------------ indexing

    def add(self, item: ReadItem, place: filesystem._StorageInfo, metadata: Metadata) -> None:
        """Find a requested item in the file, and check it against the metadata."""
        name = item.storage_index.fqn
        if place.offset + place.length > self.size:
            raise CorruptCheckpointError(
                f"{self.path}: {name!r} is said to be {place.length} bytes at offset {place.offset}, and the file ends "
                f"at {self.size}. The file is cut short, or the metadata lies; take an intact copy"
            )
        request = _Request(item, place)
        self.requests.append(request)
        self.nbytes += place.length
        if item.type == LoadItemType.BYTE_IO:
            return
        key = place.offset, place.length
        if key not in self._indexed:
            self._indexed[key] = index_item(self.fd, place.offset, place.length, self.path, name)
        info, _ = self._indexed[key]
        if info is None:
            return
        sizes = chunk_sizes(metadata, item.storage_index)
        if sizes is not None and tuple(sizes) != info.shape:
            raise CorruptCheckpointError(
                f"{self.path}: {name!r} at offset {place.offset} is a tensor of shape {list(info.shape)}, and the "
                f"metadata says {list(sizes)}. They belong to different checkpoints; take an intact copy"
            )
        request.info = _narrowed(info, item, self.path)

    def resolve(self, planner: LoadPlanner) -> None:
        """Ask the planner for the targets, and plan how each is filled."""
        for request in self.requests:
            item = request.item
            if item.type == LoadItemType.BYTE_IO:
                continue
            target = request.target = planner.resolve_tensor(item).detach()
            if tuple(target.shape) != tuple(item.lengths):
                raise ValueError(
                    f"{self.path}: the planner gave a target of shape {list(target.shape)} for "
                    f"{item.storage_index.fqn!r}, and the part to load is of shape {list(item.lengths)}"
                )
            if request.info is not None and request.info.nbytes:
                self._plan(request.info, target, self._indexed[request.place.offset, request.place.length])

    def _plan(self, info: TensorInfo, target: torch.Tensor, stored: tuple[TensorInfo | None, int]) -> None:
        straight = (
            target.dtype == info.dtype
            and type(target) is torch.Tensor
            and target.layout is torch.strided
            and target.device.type in ("cpu", "cuda")
            and not (target.is_conj() or target.is_neg())
            and is_worth_runs(info.shape, info.stride, target.stride(), info.dtype.itemsize)
        )
        if not straight:
            self.converted.append((info, target))
            return
        itemsize = info.dtype.itemsize
        first, length = target.storage_offset() * itemsize, span(target.shape, target.stride()) * itemsize
        extents = region_extents(
            info.file_offset, info.shape, info.stride, target.stride(), itemsize, len(self.targets)
        )
        self.targets.append(memory.bytes_tensor(target.untyped_storage())[first : first + length])
        self.extents += extents
        self.labels.append(info.name)
        # A part of a record has no checksum of its own, and neither has one that is read in several runs.
        whole = len(extents) == 1 and stored[0] is not None and stored[0].place[:2] == info.place[:2]
        self.expected.append(stored[1] if whole and length == info.nbytes else 0)

    # -------------------------------------------------------------------------------------------- reading

    def load(self, settings: defaults.Settings, state: TransferState) -> road.Reading:
        """Read everything that goes into tensors."""
        places = [_place_of(target) for target in self.devices]

        def describe(i: int) -> str:
            return f"tensor {self.labels[i]!r}"

        with road.Reading(self.path, self.fd, self.size, places, settings, state) as reading:
            if settings.verify and any(self.expected):
                self._load_checked(reading)
            elif self.targets:
                reading.fill(self.extents, self.targets, describe)
            read_converted(reading, self.converted)
        return reading

    def _load_checked(self, reading: road.Reading) -> None:
        """Read what has checksums and what has none apart: of the former each extent is all of its tensor."""
        for checked in (True, False):
            chosen = [i for i in range(len(self.targets)) if bool(self.expected[i]) == checked]
            at = {i: n for n, i in enumerate(chosen)}
            extents = [e._replace(storage=at[e.storage]) for e in self.extents if e.storage in at]
            names = [self.labels[i] for i in chosen]
            expected = [self.expected[i] for i in chosen] if checked else None
            describe = functools.partial(_describe, names)
            reading.fill(extents, [self.targets[i] for i in chosen], describe, expected)

    def hand_over(self, planner: LoadPlanner) -> None:
        """Give the planner what has been read, in the order of the plan."""
        for request in self.requests:
            item, place = request.item, request.place
            if item.type == LoadItemType.BYTE_IO:
                data = io.BytesIO(inline.read(self.fd, place.length, place.offset))
                planner.load_bytes(item, data)
                continue
            target = request.target
            assert target is not None  # resolve() has seen every tensor
            if request.info is None:
                self._load_with_torch(item, place, target)
            planner.commit_tensor(item, target)

    def _load_with_torch(self, item: ReadItem, place: filesystem._StorageInfo, target: torch.Tensor) -> None:
        """Load an item that is no plain tensor (sparse, quantized, compressed, …) as PyTorch's reader does."""
        with open(self.fd, "rb", closefd=False) as file:
            view: Any = _create_file_view(file, place.offset, place.length)
            try:
                tensor = originals.load(view, map_location="cpu", weights_only=True)
            except Exception as exc:
                raise CorruptCheckpointError(
                    f"{self.path}: {item.storage_index.fqn!r} at offset {place.offset} cannot be loaded: "
                    f"{type(exc).__name__}: {exc}"
                ) from exc
        if not isinstance(tensor, torch.Tensor):
            raise CorruptCheckpointError(
                f"{self.path}: {item.storage_index.fqn!r} at offset {place.offset} is a {type(tensor).__name__} and no "
                "tensor, as the metadata says"
            )
        _check_region(tuple(tensor.shape), item, self.path)
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            if tensor.shape[dim] != length:
                tensor = tensor.narrow(dim, offset, length)
        with torch.no_grad():
            target.copy_(tensor)


def _describe(names: Sequence[str], i: int) -> str:
    return f"tensor {names[i]!r}"


def _place_of(target: torch.Tensor) -> torch.device:
    return target.device if target.device.type in ("cpu", "cuda") else torch.device("cpu")


def index_item(fd: int, offset: int, length: int, path: str, name: str) -> tuple[TensorInfo | None, int]:
    """Find the tensor of an item; nothing of it is executed.

    Returns
    -------
    tuple
        The tensor, with its place in the file, or None if only unpickling can make it; and the CRC-32 of its record,
        or 0 if there is none.

    Raises
    ------
    CorruptCheckpointError
        If the item is damaged.
    """
    where = f"{path}: {name!r} at offset {offset}"
    try:
        index = torch_zip.read_index(_Slice(fd, offset, length).read_at, length, where)
    except (torch_zip.NotCarriedError, UnsupportedPickleError):
        return None, 0
    root = index.pickle.root
    # A seventh argument says that the numbers are to be conjugated or negated.
    if not isinstance(root, Inert) or (root.qualname == "_rebuild_tensor_v2" and len(root.args) > 6):
        return None, 0
    info = tensor_of_stub(where, name, root, {s.key: offset + s.file_offset for s in index.storages})
    if info is None:
        return None, 0
    crcs = {(offset + s.file_offset, s.nbytes): s.crc for s in index.storages}
    return info, crcs.get((info.file_offset, info.nbytes), 0)


class _Slice:
    """A part of a file as a file of its own, whose both ends are read once."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd, self._offset, self._length = fd, offset, length
        self._head = inline.read(fd, min(length, 2 * _EDGE_BYTES), offset)
        self._tail_at = max(0, length - _EDGE_BYTES)
        self._tail = (
            self._head[self._tail_at :]
            if length <= len(self._head)
            else inline.read(fd, length - self._tail_at, offset + self._tail_at)
        )

    def read_at(self, offset: int, nbytes: int) -> bytes:
        nbytes = max(0, min(nbytes, self._length - offset))
        if offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        if offset >= self._tail_at:
            return self._tail[offset - self._tail_at : offset - self._tail_at + nbytes]
        return inline.read(self._fd, nbytes, self._offset + offset)


def _check_region(shape: tuple[int, ...], item: ReadItem, path: str) -> None:
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    inside = len(offsets) == len(lengths) == len(shape) and all(
        min(o, n) >= 0 and o + n <= size for o, n, size in zip(offsets, lengths, shape, strict=True)
    )
    if not inside:
        raise CorruptCheckpointError(
            f"{path}: the part at {list(offsets)} of {list(lengths)} was asked of {item.storage_index.fqn!r}, which is "
            f"of shape {list(shape)}. The metadata does not fit the file; take an intact copy"
        )


def _narrowed(info: TensorInfo, item: ReadItem, path: str) -> TensorInfo:
    """Return the part of a stored tensor that an item asks for, as a tensor of its own."""
    _check_region(info.shape, item, path)
    itemsize, shape = info.dtype.itemsize, tuple(item.lengths)
    before = sum(o * s for o, s in zip(item.storage_offsets, info.stride, strict=True)) * itemsize
    return replace(info, shape=shape, file_offset=info.file_offset + before, nbytes=span(shape, info.stride) * itemsize)
