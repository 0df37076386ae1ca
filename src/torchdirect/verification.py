"""`verify`: every checksum that a checkpoint carries, at the speed of the disk."""

from __future__ import annotations

import os
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchdirect import checksum, defaults, digests, memory, names, road, selection, sharded, system
from torchdirect import progress as progress_module
from torchdirect.engines import inline
from torchdirect.engines.base import OpenFile, TransferState
from torchdirect.engines.file_io import DirectRefusedError, read_into
from torchdirect.engines.workers import Job, run_workers
from torchdirect.errors import CorruptCheckpointError
from torchdirect.formats.pickle_index import UnsupportedPickleError, index_pickle
from torchdirect.formats.zip_directory import STORED, Entry, payload_offset, read_directory
from torchdirect.plan import Extent, Window, align_up, read_windows
from torchdirect.tensor_file import TensorFile
from torchdirect.units import MIB, format_bytes


@dataclass(frozen=True)
class Verification:
    """What `verify` found; all of it was right.

    Attributes
    ----------
    files
        The files that were read.
    records, nbytes
        How many records (of safetensors files: tensors) and bytes were checked.
    unchecked
        Records without a checksum, by file and name: their bytes could not be checked.
    seconds
        Wall-clock time.
    """

    files: tuple[str, ...]
    records: int
    nbytes: int
    unchecked: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds / 1e9 if self.seconds else 0.0
        text = (
            f"{self.records} records of {len(self.files)} file(s) are whole: {format_bytes(self.nbytes)} in "
            f"{self.seconds:.2f} s, {rate:.2f} GB/s"
        )
        return text + (f"; {len(self.unchecked)} carry no checksum" if self.unchecked else "")


@dataclass(frozen=True)
class _Item:
    """Bytes with a known CRC-32, and what messages call them."""

    extent: Extent
    crc: int
    name: Callable[[], str]


def verify(
    path: str | os.PathLike[str],
    *,
    num_threads: int | None = None,
    progress: defaults.Progress | None = None,
) -> Verification:
    """Check every CRC-32 that a checkpoint carries; nothing of it is executed.

    Parameters
    ----------
    path
        A torch or safetensors file, a directory or index of shards, or a directory that
        ``torch.distributed.checkpoint`` or `torchdirect.dcp` wrote. Safetensors files carry checksums only if
        ``safetensors.save_file(..., digest=True)`` wrote them.
    num_threads, progress
        As for `load`.

    Returns
    -------
    Verification
        What was checked, and what could not be.

    Raises
    ------
    CorruptCheckpointError
        If bytes differ from their checksum, naming file, tensor and offset; or if the container is damaged.
    FileNotFoundError
        If a file is missing.
    LoadError
        If reading fails.
    """
    start = time.perf_counter()
    settings = defaults.current(num_threads=num_threads, progress=progress)
    parts = _distributed_parts(os.fspath(path))
    files = list(sharded.read_shards(sharded.find_index(os.fspath(path)))) if parts is None else list(parts)
    records = nbytes = 0
    unchecked: list[str] = []
    for file in files:
        checker = _Checker(file, settings)
        try:
            checker.run(None if parts is None else parts[file])
        finally:
            checker.close()
        records += checker.records
        nbytes += checker.nbytes
        unchecked += checker.unchecked
    return Verification(tuple(files), records, nbytes, tuple(unchecked), time.perf_counter() - start)


class _Part(NamedTuple):
    """One entry of a distributed checkpoint: a run of a file that is a torch file of its own."""

    name: str
    offset: int
    length: int


def _distributed_parts(path: str) -> dict[str, list[_Part]] | None:
    """Return the entries in each file of a distributed checkpoint; None for any other path."""
    if not os.path.isdir(path) or not any(name.endswith(".metadata") for name in os.listdir(path)):
        return None
    from torchdirect.dcp import directory  # most processes need no torch.distributed.checkpoint

    entries = directory.entries(path)
    return {file: [_Part(*entry) for entry in found] for file, found in entries.items()} if entries else None


class _Checker:
    """Checks one file."""

    def __init__(self, path: str, settings: defaults.Settings) -> None:
        self.path = path
        self.settings = settings
        self.records = self.nbytes = 0
        self.unchecked: list[str] = []
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self.fd).st_size
        self.direct_fd: int | None = None

    def close(self) -> None:
        for fd in (self.direct_fd, self.fd):
            if fd is not None:
                os.close(fd)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return inline.read(self.fd, nbytes, offset)

    def run(self, parts: Sequence[_Part] | None) -> None:
        """Check the whole file, or the parts that there are of it."""
        if parts is not None:
            self._check([item for part in parts for item in self._part_items(part)])
        else:
            self._check(self._torch_items() if self.read_at(0, 2) == b"PK" else self._safetensors_items())

    def _part_items(self, part: _Part) -> list[_Item]:
        name, offset, length = part
        if offset + length > self.size:
            raise CorruptCheckpointError(
                f"{self.path}: {name!r} is said to be {length} bytes at offset {offset}, and the file ends at "
                f"{self.size}. The file is cut short, or the metadata lies; take an intact copy"
            )
        if self.read_at(offset, 2) != b"PK":
            # What planners of other makes write may be anything.
            self.unchecked.append(f"{self.path}: {name!r}")
            return []

        def read_at(at: int, nbytes: int) -> bytes:
            return self.read_at(offset + at, max(0, min(nbytes, length - at)))

        items: list[_Item] = []
        where = f"{self.path}: {name!r} at offset {offset}"
        for entry in read_directory(read_at, length, where).values():
            short = entry.name.partition("/")[2] or entry.name
            what = f"tensor {name!r}" if short == "data/0" else f"record {short!r} of {name!r}"
            if entry.method != STORED:
                self.unchecked.append(f"{self.path}: {what}")
            elif entry.nbytes:
                at = offset + payload_offset(read_at, entry, length, where)
                items.append(_Item(Extent(at, entry.nbytes, 0), entry.crc, lambda what=what: what))  # type: ignore[misc]
        return items

    def _torch_items(self) -> list[_Item]:
        entries = read_directory(self.read_at, self.size, self.path)
        prefix = next(iter(entries), "").split("/", 1)[0] + "/"
        if prefix + "data.pkl" not in entries:
            raise CorruptCheckpointError(
                f"{self.path}: this zip file is not a PyTorch checkpoint: no record 'data.pkl'"
            )
        items: list[_Item] = []
        for entry in entries.values():
            if entry.method != STORED:
                self._check_compressed(entry)
                continue
            offset = payload_offset(self.read_at, entry, self.size, self.path)
            if entry.nbytes:
                items.append(_Item(Extent(offset, entry.nbytes, 0), entry.crc, self._namer(entries, entry)))
        return items

    def _namer(self, entries: dict[str, Entry], entry: Entry) -> Callable[[], str]:
        def name() -> str:
            short = entry.name.split("/", 1)[1] if "/" in entry.name else entry.name
            if not short.startswith("data/"):
                return f"record {short!r}"
            pickled = entries[entry.name.split("/", 1)[0] + "/data.pkl"]
            try:
                at = payload_offset(self.read_at, pickled, self.size, self.path)
                return names.stored_name(index_pickle(self.read_at(at, pickled.nbytes)).root, short[5:])
            except (UnsupportedPickleError, CorruptCheckpointError):
                return f"record {short!r}"

        return name

    def _check_compressed(self, entry: Entry) -> None:
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(entry.name) as record:
                while data := record.read(MIB):
                    self.nbytes += len(data)
        except (zipfile.BadZipFile, zlib.error, OSError, ValueError, NotImplementedError) as exc:
            raise CorruptCheckpointError(f"{self.path}: compressed record {entry.name!r}: {exc}") from exc
        self.records += 1

    def _safetensors_items(self) -> list[_Item]:
        file = TensorFile(self.path)
        file.close()
        stored = digests.read_digests(self.path, file.metadata)
        items: list[_Item] = []
        for info in file.tensors.values():
            if info.name not in stored:
                self.unchecked.append(f"{self.path}: tensor {info.name!r}")
            elif info.nbytes:
                extent = Extent(info.file_offset, info.nbytes, 0)
                items.append(_Item(extent, stored[info.name], lambda name=info.name: f"tensor {name!r}"))  # type: ignore[misc]
        return items

    def _check(self, items: Sequence[_Item]) -> None:
        if not items:
            return
        found = self._checksums([item.extent._replace(storage=i) for i, item in enumerate(items)])
        for item, crc in zip(items, found, strict=True):
            if crc == item.crc:
                self.records += 1
                self.nbytes += item.extent.nbytes
            elif item.crc == 0:
                # What PyTorch's writer leaves where it was told to compute none.
                self.unchecked.append(f"{self.path}: {item.name()}")
            else:
                raise digests.mismatch(self.path, item.name(), item.extent, item.crc, crc)

    def _checksums(self, extents: Sequence[Extent]) -> list[int]:
        """Read extents in windows, by several threads, and return the CRC-32 of each."""
        cached = system.cached_fraction(self.fd, self.size)
        situation = road.find_situation("load", self.fd, self.size, [torch.device("cpu")], cached, self.settings)
        choice = selection.choose(situation)
        if choice.transfer_type.uses_direct_io:
            self.direct_fd = road.open_direct_again(self.fd)
        options = road.make_options(self.settings, situation, choice, strict=False, direct=False)
        threads, chunk = options.num_threads, options.chunk_bytes
        windows = read_windows(extents, chunk_bytes=chunk, file_size=self.size)
        state = TransferState(total=sum(window.nbytes for window in windows))
        parts: list[list[tuple[int, int, int]]] = [[] for _ in extents]
        lock = threading.Lock()
        job = Job(windows)
        align = situation.direct_io
        file = OpenFile(self.path, self.fd, self.direct_fd, self.size, align.memory_align or 1, align.offset_align or 1)
        wanted = max(1, min(threads, len(windows)))
        with memory.staging_pool.lease(wanted, chunk, pinned=False, limit=self.settings.staging_bytes) as lease:

            def work() -> None:
                buffer = lease.take()
                while (window := job.take()) is not None:
                    self._read(file, window, buffer, state)
                    data = memory.view(buffer.address, window.nbytes, writable=False)
                    for e in window.extents:
                        at = e.file_offset - window.file_offset
                        crc = checksum.crc32(data[at : at + e.nbytes])
                        with lock:
                            parts[e.storage].append((e.storage_offset, crc, e.nbytes))
                    state.advance(window.nbytes)

            with progress_module.shown(self.settings.progress, f"verifying {self.path}", state) as tick:
                run_workers(job, [work] * lease.count, tick=tick)
        return [checksum.combine((crc, nbytes) for _, crc, nbytes in sorted(found)) for found in parts]

    def _read(self, file: OpenFile, window: Window, buffer: memory.StagingBuffer, state: TransferState) -> None:
        def read(fd: int, nbytes: int) -> None:
            target = memory.view(buffer.address, nbytes, writable=True)
            read_into(file, fd, target, window.file_offset, window.nbytes, state, lambda: "a record")

        if file.direct_fd is not None:
            try:
                # Whole blocks: past the end of the file the kernel returns fewer bytes.
                read(file.direct_fd, align_up(window.nbytes, file.offset_align))
                return
            except DirectRefusedError:
                pass
        read(file.fd, window.nbytes)
