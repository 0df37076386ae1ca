"""What one rank saves: each item as ``torch.save`` would write it, one after another in a file. No I/O."""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.serialization import DEFAULT_PROTOCOL

from torchdirect import memory, originals
from torchdirect.dcp.regions import is_dense
from torchdirect.formats import torch_zip
from torchdirect.formats.layout import FileLayout
from torchdirect.plan import Extent, Gap, align_up
from torchdirect.units import BLOCK

_RECORD_ALIGNMENT = 64  # what torch.save uses, so that an item is what PyTorch's writer would have written


@dataclass(frozen=True)
class StoredItem:
    """One item before it is written.

    Attributes
    ----------
    layout
        Of its bytes, beginning at 0.
    tensors
        One-dimensional uint8 tensors over its storages.
    held_bytes
        Memory that exists for this save only: copies of what cannot be written from where it is.
    """

    layout: FileLayout
    tensors: tuple[torch.Tensor, ...]
    held_bytes: int

    @property
    def nbytes(self) -> int:
        """Length in the file."""
        return self.layout.file_size


def store_bytes(data: io.BytesIO) -> StoredItem:
    """Return the item of an object that the planner has turned into bytes."""
    nbytes = data.getbuffer().nbytes
    if not nbytes:
        return StoredItem(FileLayout(0, (), ()), (), 0)
    tensor = torch.frombuffer(data.getbuffer(), dtype=torch.uint8)
    return StoredItem(FileLayout(nbytes, (Extent(0, nbytes, 0),), ()), (tensor,), nbytes)


def store_tensor(tensor: torch.Tensor, *, crc: bool) -> StoredItem:
    """Return the item of a tensor: its own bytes only, from where they are if they lie together.

    Parameters
    ----------
    tensor
        Of any kind that ``torch.save`` takes.
    crc
        Whether CRC-32 fields are filled in.
    """
    plain = tensor.detach()
    is_copy = plain.device.type not in ("cpu", "cuda") or type(plain) is not torch.Tensor
    if is_copy:
        plain = plain.cpu()
    if type(plain) is not torch.Tensor or plain.layout is not torch.strided or plain.is_quantized or plain.is_nested:
        image = io.BytesIO()
        originals.save(plain.cpu(), image)
        return store_bytes(image)
    is_copy |= plain.is_conj() or plain.is_neg()
    plain = plain.resolve_conj().resolve_neg()
    if not is_dense(plain.shape, plain.stride()):
        plain = plain.clone(memory_format=torch.contiguous_format)
        is_copy = True
    compact = _compact(plain)
    # PyTorch's writer copies tensors to the CPU first, and so notes that as the place of all of them.
    pickled = torch_zip.pickle_object(compact, pickle, DEFAULT_PROTOCOL, location="cpu")
    layout = torch_zip.layout_file(
        "archive", pickled.data, [compact.nbytes], alignment=_RECORD_ALIGNMENT, byteorder=sys.byteorder, crc=crc
    )
    return StoredItem(layout, (memory.bytes_tensor(compact.untyped_storage()),), compact.nbytes if is_copy else 0)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor over a storage of nothing but its elements, without copying them."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes:
        first = tensor.storage_offset() * tensor.element_size()
        storage = storage[first : first + tensor.nbytes]
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, 0, tensor.shape, tensor.stride())


class FileBuilder:
    """Lays items out one after another, each large payload on a block boundary of the file.

    Attributes
    ----------
    tensors
        One-dimensional uint8 tensors over all storages.
    held_bytes
        Sum of the items' `StoredItem.held_bytes`.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.held_bytes = 0
        self._extents: list[Extent] = []
        self._gaps: list[Gap] = []
        self._end = 0

    def add(self, item: StoredItem) -> int:
        """Place an item behind the last one; return its offset in the file."""
        offset = align_up(self._end, _RECORD_ALIGNMENT)
        if item.layout.extents and item.layout.extents[0].nbytes >= BLOCK:
            payload = item.layout.extents[0].file_offset
            offset = align_up(self._end + payload, BLOCK) - payload
        if offset > self._end:
            padding = offset - self._end
            self._gaps.append(Gap(self._end, padding, range(0), functools.partial(_zeros, padding)))
        first, count = len(self.tensors), len(item.tensors)
        self._extents += [Extent(e.file_offset + offset, e.nbytes, e.storage + first) for e in item.layout.extents]
        for gap in item.layout.gaps:
            needs = range(gap.needs.start + first, gap.needs.stop + first)
            render = functools.partial(_render, gap.render, first, count)
            self._gaps.append(Gap(gap.file_offset + offset, gap.nbytes, needs, render))
        self.tensors += item.tensors
        self.held_bytes += item.held_bytes
        self._end = offset + item.nbytes
        return offset

    def layout(self) -> FileLayout:
        """Return the layout of the whole file."""
        return FileLayout(self._end, tuple(self._extents), tuple(self._gaps))


def _zeros(nbytes: int, _crcs: Sequence[int]) -> bytes:
    return bytes(nbytes)


def _render(render: Callable[[Sequence[int]], bytes], first: int, count: int, crcs: Sequence[int]) -> bytes:
    """Render an item's gap, which knows the checksums of its own storages only."""
    return render(crcs[first : first + count])
