"""The safetensors format: header bytes <-> names, dtypes, shapes and places.

Reading lets the ``safetensors`` library judge the header first, so everything that it rejects is rejected here. Writing
lays a file out exactly as the library does. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import functools
import json
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchdirect.errors import CorruptCheckpointError
from torchdirect.formats.layout import FileLayout
from torchdirect.formats.zip_directory import ReadAt
from torchdirect.plan import Extent, Gap
from torchdirect.units import BLOCK

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
    **{
        name: getattr(torch, attribute)
        for name, attribute in (
            ("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2"), ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
            ("F8_E5M2FNUZ", "float8_e5m2fnuz"), ("F8_E8M0", "float8_e8m0fnu"), ("F4", "float4_e2m1fn_x2"),
        )
        if hasattr(torch, attribute)
    },
}  # fmt: skip
"""The library's dtype names and what they are in this PyTorch."""

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# The library sorts tensors by the alignment of their dtype, largest first, in the order of its own enumeration.
_RANK = [
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
]  # fmt: skip

_PACKED = {"F4": 2}
"""Elements in one element of the PyTorch dtype, which the library counts in the last dimension."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file.

    Attributes
    ----------
    name
        Its key.
    dtype, shape
        As PyTorch has them.
    file_offset, nbytes
        Where its bytes lie in the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file_offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsIndex:
    """The header of a file.

    Attributes
    ----------
    path, file_size
        The file.
    tensors
        By name, in the order of the header.
    metadata
        Free text of the writer.
    """

    path: str
    file_size: int
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def library() -> Any:
    """Return the ``safetensors`` package.

    Raises
    ------
    ImportError
        With the remedy, if it is not installed.
    """
    try:
        import safetensors
    except ImportError as exc:
        raise ImportError(
            f"safetensors files need the package safetensors ({exc}). Run: pip install 'torchdirect[safetensors]'"
        ) from exc
    return safetensors


def looks_like(head: bytes) -> bool:
    """Whether a file that begins with these bytes can be a safetensors file: a length, then JSON."""
    return len(head) >= 10 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= 100_000_000


def read_index(read_at: ReadAt, fd: int, file_size: int, path: str) -> SafetensorsIndex:
    """Read and check the header of an open file; nothing of the payload is read.

    The library opens files by name, and another file may have this one's by now; so it gets the descriptor's name.

    Raises
    ------
    CorruptCheckpointError
        For every header that the library refuses, with its reason.
    """
    package = library()
    try:
        # Maps the file and checks the whole header: lengths, shapes, gaps, overlaps, names.
        with package.safe_open(f"/proc/self/fd/{fd}", framework="pt") as opened:
            metadata = opened.metadata() or {}
            names = list(opened.keys())
    except package.SafetensorError as exc:
        raise CorruptCheckpointError(
            f"{path}: not a valid safetensors file ({file_size} bytes): {exc}. Take an intact copy"
        ) from exc
    (length,) = struct.unpack("<Q", read_at(0, 8))
    text, start = read_at(8, length), 8 + length
    try:
        header = json.loads(text, object_pairs_hook=functools.partial(_unique, path))
        tensors = {name: _stored(path, name, header[name], start) for name in header if name != "__metadata__"}
    except (ValueError, KeyError, TypeError) as exc:
        raise CorruptCheckpointError(f"{path}: the safetensors header cannot be read: {exc}") from exc
    if sorted(tensors) != sorted(names) or any(t.file_offset + t.nbytes > file_size for t in tensors.values()):
        raise CorruptCheckpointError(f"{path}: the file changed while its header was read. Take an intact copy")
    return SafetensorsIndex(path, file_size, tensors, dict(metadata))


def _unique(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CorruptCheckpointError(f"{path}: the safetensors header names {twice!r} twice. Take an intact copy")
    return found


def _stored(path: str, name: str, entry: Mapping[str, Any], start: int) -> StoredTensor:
    dtype_name = entry["dtype"]
    if dtype_name not in _DTYPES:
        raise CorruptCheckpointError(
            f"{path}: tensor {name!r} has dtype {dtype_name}, which PyTorch {torch.__version__} does not have"
        )
    first, last = entry["data_offsets"]
    shape = list(entry["shape"])
    if packed := _PACKED.get(dtype_name):
        shape[-1] //= packed
    return StoredTensor(name, _DTYPES[dtype_name], tuple(shape), start + first, last - first)


def layout_file(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None, *, align: bool
) -> tuple[FileLayout, list[str]]:
    """Lay out a file as the library does; return it with the names of its tensors in file order.

    Parameters
    ----------
    tensors
        Contiguous.
    metadata
        Free text.
    align
        Whether the data begins at a multiple of 4096 bytes, by spaces behind the header, which the format allows.

    Raises
    ------
    ValueError
        If a tensor has a dtype that the format does not know, or the header is over 100 MB.
    """
    if sys.byteorder != "little":
        raise NotImplementedError("safetensors files are little-endian; write them on such a machine")
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}, which safetensors does not know")
        if _NAMES[tensor.dtype] in _PACKED and not tensor.dim():
            raise ValueError(f"tensor {name!r} is a scalar of {tensor.dtype}, whose halves the format cannot count")
    order = sorted(tensors, key=lambda name: (-_RANK.index(_NAMES[tensors[name].dtype]), name.encode()))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name in order:
        tensor = tensors[name]
        dtype_name, shape = _NAMES[tensor.dtype], list(tensor.shape)
        if packed := _PACKED.get(dtype_name):
            shape[-1] *= packed
        header[name] = {"dtype": dtype_name, "shape": shape, "data_offsets": [position, position + tensor.nbytes]}
        position += tensor.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    block = BLOCK if align else 8
    length = math.ceil((8 + len(text)) / block) * block - 8
    if length > 100_000_000:
        raise ValueError(f"the header of {len(tensors)} tensors has {length} bytes; safetensors allows 100,000,000")
    prologue = struct.pack("<Q", length) + text.ljust(length)
    start = len(prologue)
    extents: list[Extent] = []
    for i, name in enumerate(order):
        if tensors[name].nbytes:
            extents.append(Extent(start + header[name]["data_offsets"][0], tensors[name].nbytes, i))
    gap = Gap(0, start, range(0), functools.partial(_prologue, prologue))
    return FileLayout(start + position, tuple(extents), (gap,)), order


def _prologue(prologue: bytes, _crcs: Sequence[int]) -> bytes:
    return prologue
