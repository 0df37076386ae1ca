"""Converting checkpoints between torch and safetensors files, in bounded memory, published as a whole."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from torchdirect import checksum, defaults, memory, publish, sharded
from torchdirect import progress as progress_module
from torchdirect.checkpoint import STORAGE_ALIGNMENT
from torchdirect.defaults import Settings
from torchdirect.engines.base import OpenFile, TransferState
from torchdirect.engines.file_io import write_all
from torchdirect.errors import save_error
from torchdirect.formats import safetensors, torch_zip
from torchdirect.formats.layout import FileLayout
from torchdirect.plan import Extent
from torchdirect.road import Reading
from torchdirect.tensor_file import TensorFile, TensorInfo, shaped, span
from torchdirect.units import MIB

_PIECE_BYTES = 64 * MIB
"""Bound of what is held of a tensor at a time."""


@dataclass(frozen=True)
class Converted:
    """What a conversion did.

    Attributes
    ----------
    files
        The files that were written.
    tensors, nbytes
        How many tensors, and their bytes in the new files.
    left_out
        Names of duplicates (tied tensors), by the name that stands for them.
    seconds
        Wall-clock time.
    """

    files: tuple[str, ...]
    tensors: int
    nbytes: int
    left_out: dict[str, str]
    seconds: float


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    align: bool = False,
    max_shard_bytes: int | str | None = None,
    durable: bool | None = None,
    progress: defaults.Progress | None = None,
) -> Converted:
    """Convert a checkpoint to the format that the destination's suffix names.

    Only tensors are carried over; names of nested ones are dotted paths. Nothing of a torch file is executed.

    Parameters
    ----------
    source
        A torch or safetensors file, or a directory or index of shards.
    destination
        A ``.safetensors`` file, a torch file (any other suffix), or, with `max_shard_bytes`, a directory.
    dtype
        What floating-point tensors become; as they are if not given.
    align
        Whether the data of safetensors files begins on a multiple of 4096 bytes.
    max_shard_bytes
        Write safetensors shards of this size, such as ``"5GB"``, and an index.
    durable, progress
        As for `save`.

    Raises
    ------
    FileNotFoundError, CorruptCheckpointError
        If a source file is missing or damaged.
    ValueError
        If the source has tensors that no other format can hold.
    SaveError
        If the destination cannot be written; what was there is untouched.
    """
    start = time.perf_counter()
    settings = defaults.current(durable=durable, progress=progress)
    target = os.fspath(destination)
    limit = None if max_shard_bytes is None else sharded.parse_size(max_shard_bytes)
    with contextlib.ExitStack() as stack:
        sources = _open_sources(os.fspath(source), stack, settings)
        job = _Job(sources, dtype, align, settings)
        sizes = {name: job.size_of(name) for name in job.kept}
        job.state.total = 2 * sum(sizes.values())
        job.tick = stack.enter_context(progress_module.shown(settings.progress, f"writing {target}", job.state))
        if limit is not None:
            files = sharded.write_shards(target, sizes, limit, job.write_safetensors, durable=settings.durable)
        elif target.endswith(".safetensors"):
            job.write_safetensors(job.kept, target)
            files = [target]
        else:
            job.write_torch(target)
            files = [target]
    return Converted(tuple(files), len(sizes), sum(sizes.values()), job.left_out, time.perf_counter() - start)


Source = tuple[Reading, TensorInfo]
"""A tensor, and the file that it is read from."""


def _open_sources(path: str, stack: contextlib.ExitStack, settings: Settings) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    index = sharded.find_index(path)
    for shard in sharded.read_shards(index):
        file = TensorFile(shard)
        stack.callback(file.close)
        if file.opaque:
            raise ValueError(
                f"{shard}: {file.opaque[0]!r} ({len(file.opaque)} such) is quantized, sparse or a subclass, which only "
                "PyTorch's own pickles hold; leave it out of the checkpoint first"
            )
        # With a state of its own it shows no progress: that is the conversion's.
        cpu = [torch.device("cpu")]
        reading = stack.enter_context(Reading(shard, file.fd, file.size, cpu, settings, TransferState()))
        sources.update({name: (reading, info) for name, info in file.tensors.items()})
    if not sources:
        raise ValueError(f"{path} holds no tensors")
    return sources


class _Job:
    def __init__(
        self,
        sources: dict[str, Source],
        dtype: torch.dtype | None,
        align: bool,
        settings: Settings,
    ) -> None:
        self.sources = sources
        self.dtype = dtype
        self.align = align
        self.settings = settings
        self.state = TransferState()
        self.tick: Callable[[], None] | None = None
        self.kept: list[str] = []
        self.left_out: dict[str, str] = {}
        first: dict[object, str] = {}
        for name, (reading, info) in sources.items():
            kept = first.setdefault((reading.path, info.place) if info.nbytes else name, name)
            if kept == name:
                self.kept.append(name)
            else:
                self.left_out[name] = kept

    def dtype_of(self, name: str) -> torch.dtype:
        stored = self.sources[name][1].dtype
        return self.dtype if self.dtype is not None and stored.is_floating_point else stored

    def size_of(self, name: str) -> int:
        elements = 1
        for size in self.sources[name][1].shape:
            elements *= size
        return elements * self.dtype_of(name).itemsize

    def _stand_in(self, name: str) -> torch.Tensor:
        """Return a tensor of the result's dtype and shape whose memory is never touched, so that it takes none."""
        return torch.empty(self.sources[name][1].shape, dtype=self.dtype_of(name), device="cpu")

    def write_safetensors(self, names: Sequence[str], path: str) -> None:
        """Write a safetensors file of these tensors; tied ones that were left out are noted, as the library does."""
        noted = {"format": "pt"}
        here = set(names)
        noted.update({name: kept for name, kept in self.left_out.items() if kept in here})
        layout, order = safetensors.layout_file({n: self._stand_in(n) for n in names}, noted, align=self.align)
        self._write(path, layout, order, crc=False)

    def write_torch(self, path: str) -> None:
        """Write a torch file of all tensors; tied ones stay tied."""
        state = {name: self._stand_in(name) for name in self.kept}
        state.update({name: state[kept] for name, kept in self.left_out.items()})
        ordered = {name: state[name] for name in self.sources}
        pickled = torch_zip.pickle_object(ordered, pickle, torch.serialization.DEFAULT_PROTOCOL)
        layout = torch_zip.layout_file(
            torch_zip.archive_name(path),
            pickled.data,
            [s.nbytes() for s in pickled.storages],
            alignment=STORAGE_ALIGNMENT,
            byteorder=sys.byteorder,
            crc=True,
        )
        self._write(path, layout, self.kept, crc=True)

    def _write(self, path: str, layout: FileLayout, order: Sequence[str], *, crc: bool) -> None:
        crcs = [0] * len(order)
        try:
            with publish.replacing(path, durable=self.settings.durable) as replacement:
                replacement.reserve(layout.file_size)
                file = OpenFile(path, replacement.fd, None, layout.file_size)
                for extent in layout.extents:
                    crcs[extent.storage] = self._move(order[extent.storage], file, extent.file_offset, crc)
                for gap in layout.gaps:
                    write_all(file, file.fd, memoryview(gap.render(crcs)), gap.file_offset, TransferState())
                replacement.commit()
        except OSError as exc:
            raise save_error(exc, path, f"writing {layout.file_size} bytes") from exc

    def _move(self, name: str, target: OpenFile, offset: int, crc: bool) -> int:
        """Read a tensor piece by piece, convert it, and write it; return its CRC-32."""
        source, info = self.sources[name]
        value = 0
        for piece in self._pieces(source, info):
            data = piece.to(self.dtype_of(name)).contiguous()
            view = memory.view(data.data_ptr(), data.nbytes, writable=False)
            value = checksum.crc32(view, value) if crc else 0
            write_all(target, target.fd, view, offset, TransferState())
            offset += data.nbytes
            self.state.advance(data.nbytes)
            if self.tick is not None:
                self.tick()
        return value

    def _pieces(self, source: Reading, info: TensorInfo) -> Iterator[torch.Tensor]:
        """Yield the elements of a tensor in order, in contiguous parts of a bounded size."""
        if info.is_contiguous:
            step = _PIECE_BYTES // info.dtype.itemsize * info.dtype.itemsize
            for start in range(0, info.nbytes, step):
                nbytes = min(step, info.nbytes - start)
                buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                self._read(source, info, start, buffer)
                yield buffer.view(info.dtype)
        elif info.nbytes <= _PIECE_BYTES or len(info.shape) < 2:
            buffer = torch.empty(info.nbytes, dtype=torch.uint8, device="cpu")
            self._read(source, info, 0, buffer)
            yield shaped(buffer, info)
        else:
            for i in range(info.shape[0]):
                at = info.file_offset + i * info.stride[0] * info.dtype.itemsize
                shape, stride = info.shape[1:], info.stride[1:]
                nbytes = span(shape, stride) * info.dtype.itemsize
                row = TensorInfo(info.name, info.dtype, shape, stride, at, nbytes)
                yield from self._pieces(source, row)

    def _read(self, source: Reading, info: TensorInfo, start: int, buffer: torch.Tensor) -> None:
        extent = Extent(info.file_offset + start, buffer.numel(), 0)
        source.fill([extent], [buffer], lambda _: f"tensor {info.name!r}")
        self.state.advance(buffer.numel())
