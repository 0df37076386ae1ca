"""`DirectWriter`: what ``torch.distributed.checkpoint.save`` writes, on torchdirect's road."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchdirect import defaults, progress, road
from torchdirect.checkpoint import gc_paused
from torchdirect.dcp import directory
from torchdirect.dcp.items import FileBuilder, StoredItem, store_bytes, store_tensor
from torchdirect.defaults import Settings
from torchdirect.engines.base import EngineOptions, TransferState
from torchdirect.errors import SaveError, SettingsError, save_error
from torchdirect.selection import Choice
from torchdirect.transfer import TransferType
from torchdirect.units import MIB

_HELD_BYTES = 1024 * MIB
"""Bound of the memory that exists for a save only: beyond it, what is there goes into a file of its own."""


class DirectWriter(FileSystemWriter):
    """Storage writer for ``torch.distributed.checkpoint.save`` and ``async_save``.

    Each rank writes one file, straight from the memory of its tensors. The directory becomes a checkpoint, or the next
    one, when every rank's data is on storage and ``.metadata`` is renamed into place; before that, and after any
    failure, an older checkpoint in it is whole. Files that no metadata names any more are removed afterwards.

    Parameters
    ----------
    path
        Directory of the checkpoint; made if it does not exist.
    single_file_per_rank
        False: each item has a file of its own.
    sync_files
        PyTorch's name for `durable`.
    thread_count
        PyTorch's name for `num_threads`. The number of files does not depend on it.
    per_thread_copy_ahead
        Taken for PyTorch's sake; staging buffers (``staging_bytes``) bound what is copied ahead.
    cache_staged_state_dict
        As for PyTorch's writer: whether ``async_save`` keeps its pinned staging memory for the next one.
    overwrite
        False: refuse a directory that holds a checkpoint, before anything is written.
    _extensions, serialization_format
        Only what PyTorch's own defaults are: no stream extensions, and the ``torch_save`` format.
    transfer_type, fallback, num_threads, chunk_bytes, durable, checksum, progress
        As for `torchdirect.save`. What is not given is taken from the `settings` in force here, not later.

    Raises
    ------
    SettingsError
        If an argument has a value that is not allowed.

    Examples
    --------
    >>> dcp.save(state, storage_writer=td.dcp.DirectWriter("checkpoints/step-1000"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool | None = None,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
        *,
        transfer_type: TransferType | str | int | None = None,
        fallback: str | None = None,
        num_threads: int | None = None,
        chunk_bytes: int | None = None,
        durable: bool | None = None,
        checksum: bool | None = None,
        progress: defaults.Progress | None = None,
    ) -> None:
        if _extensions:
            raise SettingsError(
                "stream extensions change the bytes on their way; use PyTorch's FileSystemWriter for them"
            )
        if getattr(serialization_format, "value", serialization_format) not in (None, "torch_save"):
            raise SettingsError(
                f"serialization_format={serialization_format!r}: files are written in 'torch_save' only"
            )
        self.settings: Settings = defaults.current(
            transfer_type=transfer_type,
            fallback=fallback,
            num_threads=_one_of("thread_count", thread_count, "num_threads", num_threads),
            chunk_bytes=chunk_bytes,
            durable=_one_of("sync_files", sync_files, "durable", durable),
            checksum=False if checksum is None and not torch.serialization.get_crc32_options() else checksum,
            progress=progress,
        )
        super().__init__(
            path,
            single_file_per_rank=single_file_per_rank,
            sync_files=self.settings.durable,
            per_thread_copy_ahead=per_thread_copy_ahead,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
        )
        self.rank: int | None = None
        self.use_collectives = True
        self._before: list[str] = []
        self._written: list[str] = []

    @property
    def _folder(self) -> str:
        return os.fspath(self.path)

    @property
    def _metadata_path(self) -> str:
        rank = None if self.use_collectives else self.rank
        return os.path.join(self._folder, directory.metadata_name(rank))

    # ------------------------------------------------------------------------------------------- planning

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn this rank's part; PyTorch calls it before a save."""
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self._before, self._written = [], []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory, or refuse the one that is there; PyTorch calls it on every rank.

        Raises
        ------
        SaveError
            If the directory cannot be made; or if it holds a checkpoint, and ``overwrite=False``.
        """
        self._refuse_existing()
        directory.make(self._folder, durable=self.settings.durable)
        if not self.use_collectives and self.rank is not None:
            self._before = self._present(self.rank)
            return _with_prefix(plan, directory.new_token(), self.rank)
        return plan

    def _present(self, rank: int | None) -> list[str]:
        """Return the data files that are there before this save writes any."""
        try:
            return directory.data_files(self._folder, rank)
        except OSError as exc:
            raise save_error(exc, self._folder, "listing the directory of the checkpoint") from exc

    def _refuse_existing(self) -> None:
        # Without collectives every rank has metadata of its own, and the lowest is written as the others are.
        path = self._metadata_path
        if not self.overwrite and os.path.lexists(path):
            raise SaveError(
                f"{path}: a checkpoint exists there, and overwrite=False. Save to another directory, or with "
                "overwrite=True, which leaves the old checkpoint whole until the new one is",
                errno.EEXIST,
                path,
            )

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Hand out names that are this save's own; PyTorch calls it on the coordinator."""
        if not self.use_collectives:
            return plans
        self._before = self._present(None)
        token = directory.new_token()
        return [_with_prefix(plan, token, rank) for rank, plan in enumerate(plans)]

    # -------------------------------------------------------------------------------------------- writing

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; PyTorch calls it on every rank.

        Raises
        ------
        SaveError
            If a file cannot be written. Those that this rank has written for this save are removed.
        TransferUnavailableError
            If the named transfer type cannot carry this save.
        """
        start = time.perf_counter()
        writing = _Writing(self._folder, plan.storage_data.prefix, self.settings, self._written)
        try:
            with progress.shown(self.settings.progress, f"saving {self._folder}", writing.state) as tick, gc_paused():
                for item in plan.items:
                    stored = self._store(item, planner)
                    if writing.is_full(stored) or not self.single_file_per_rank:
                        writing.flush(tick)
                    writing.add(item, stored)
                writing.flush(tick)
        except BaseException:
            self.discard()
            raise
        writing.report(start)
        future: Future[list[WriteResult]] = Future()
        future.set_result(writing.results)
        return future

    def _store(self, item: WriteItem, planner: SavePlanner) -> StoredItem:
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            if not isinstance(data, io.BytesIO):
                raise TypeError(f"the planner gave a {type(data).__name__} for {item.index.fqn!r} instead of a BytesIO")
            return store_bytes(data)
        if not isinstance(data, torch.Tensor):
            raise TypeError(f"the planner gave a {type(data).__name__} for {item.index.fqn!r} instead of a tensor")
        stored = store_tensor(data, crc=self.settings.checksum)
        if not stored.held_bytes and _makes_tensors(planner):
            return dataclasses.replace(stored, held_bytes=data.nbytes)
        return stored

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the directory the new checkpoint; PyTorch calls it on the coordinator when all data is written.

        Raises
        ------
        SaveError
            If that fails. The old checkpoint, if any, is whole, and the files of this save are removed where that can
            be done.
        """
        folder, path = self._folder, self._metadata_path
        stored = {result.index: result.storage_data for rank in results for result in rank}
        names = {info.relative_path for info in stored.values()}
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        if hasattr(filesystem, "CURRENT_DCP_VERSION"):
            metadata.version = filesystem.CURRENT_DCP_VERSION
        try:
            with directory.locked(folder):
                self._refuse_existing()
                directory.check_present(folder, stored.values())
                directory.write_metadata(path, pickle.dumps(metadata), durable=self.settings.durable)
                directory.remove(folder, self._before)
        except BaseException as exc:
            directory.discard(folder, names)
            if isinstance(exc, OSError):
                raise save_error(exc, folder, "making the new checkpoint count") from exc
            raise

    def discard(self) -> None:
        """Remove the files that this rank has written for a save that failed.

        Those that the directory's metadata names stay. `torchdirect.dcp.save` does this by itself. Files of ranks that
        died are removed by the next save.
        """
        written, self._written[:] = list(self._written), []
        if written:
            directory.discard(self._folder, written)


def _one_of(theirs: str, value: Any, ours: str, own: Any) -> Any:
    if value is not None and own is not None and value != own:
        raise SettingsError(f"{theirs}={value!r} and {ours}={own!r} are two names of one setting; give one of them")
    return value if own is None else own


def _with_prefix(plan: SavePlan, token: str, rank: int) -> SavePlan:
    return dataclasses.replace(plan, storage_data=filesystem._StoragePrefix(f"__{token}_{rank}_"))


def _makes_tensors(planner: SavePlanner) -> bool:
    """Whether the tensors that a planner hands out may have been made for this save."""
    kind = type(planner)
    names = ("resolve_data", "lookup_object", "transform_object")
    return any(getattr(kind, name, None) is not getattr(DefaultSavePlanner, name) for name in names)


class _Writing:
    """The files of one rank's part of a save."""

    def __init__(self, folder: str, prefix: str, settings: Settings, written: list[str]) -> None:
        self.state = TransferState()
        self.results: list[WriteResult] = []
        self._folder, self._prefix, self._settings = folder, prefix, settings
        self._written = written
        self._builder = FileBuilder()
        self._items: list[tuple[WriteItem, int, int]] = []
        self._files = self._nbytes = self._payload = 0
        self._largest = -1
        self._way: tuple[Choice, EngineOptions] | None = None

    def is_full(self, item: StoredItem) -> bool:
        """Whether memory for this save would grow over its bound with one more item in the file."""
        held = self._builder.held_bytes
        return bool(held) and held + item.held_bytes > _HELD_BYTES

    def add(self, item: WriteItem, stored: StoredItem) -> None:
        """Place an item in the file."""
        self._items.append((item, self._builder.add(stored), stored.nbytes))

    def flush(self, tick: Callable[[], None] | None) -> None:
        """Write the file, if there is anything in it, and begin another."""
        if not self._items:
            return
        layout, tensors = self._builder.layout(), self._builder.tensors
        name = directory.free_name(self._folder, self._prefix, self._files)
        self._written.append(name)
        path, settings = os.path.join(self._folder, name), self._settings
        way = road.put_file(path, layout, tensors, settings.checksum, settings, self.state, tick)
        payload = sum(t.numel() for t in tensors)
        if payload > self._largest:  # whose way is what the report tells
            self._largest, self._way = payload, way
        self._files += 1
        self._nbytes += layout.file_size
        self._payload += payload
        for item, offset, nbytes in self._items:
            info = filesystem._StorageInfo(name, offset, nbytes)
            self.results.append(WriteResult(item.index, nbytes, info))
        self._items, self._builder = [], FileBuilder()

    def report(self, start: float) -> None:
        """Report the part of this rank, if it had one."""
        if self._way is not None:
            settings, nbytes = self._settings, self._nbytes
            road.report_transfer("save", self._folder, settings, *self._way, self.state, nbytes, self._payload, start)
