"""Checksums of loaded tensors, and what a file says they should be."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from torchdirect import checksum, memory, system
from torchdirect.engines import device_checksum
from torchdirect.engines.checksums import PartChecksums
from torchdirect.errors import CorruptCheckpointError
from torchdirect.plan import Extent
from torchdirect.units import MIB

DIGEST_KEY = "torchdirect.crc32"
"""Metadata of a safetensors file under which the CRC-32 of each tensor stands, as JSON."""

_PIECE_BYTES = 16 * MIB


def mismatch(path: str, name: str, extent: Extent, expected: int, found: int) -> CorruptCheckpointError:
    """Return the error for bytes that differ from their checksum."""
    return CorruptCheckpointError(
        f"{path}: {name} is damaged: its {extent.nbytes} bytes at offset {extent.file_offset} have CRC-32 {found:08x}, "
        f"and {expected:08x} is stored. Take an intact copy"
    )


def read_digests(path: str, metadata: dict[str, str]) -> dict[str, int]:
    """Return the CRC-32 of each tensor that a safetensors file carries in its metadata."""
    text = metadata.get(DIGEST_KEY)
    if text is None:
        return {}
    try:
        return {str(name): int(value, 16) for name, value in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as exc:
        raise CorruptCheckpointError(f"{path}: the metadata {DIGEST_KEY!r} is no list of checksums: {exc}") from exc


def checksums_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the CRC-32 of one-dimensional uint8 tensors: on GPUs by the GPU, in host memory by several threads."""
    values = [0] * len(tensors)
    on_host: list[tuple[int, int, int]] = []
    on_gpus: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if tensor.is_cuda:
            on_gpus.setdefault(tensor.device, []).append(i)
        else:
            on_host += [
                (i, at, min(_PIECE_BYTES, tensor.numel() - at)) for at in range(0, tensor.numel(), _PIECE_BYTES)
            ]
    for indices in on_gpus.values():
        for i, value in zip(indices, device_checksum.crc32_of_all([tensors[i] for i in indices]), strict=True):
            values[i] = value

    def piece(job: tuple[int, int, int]) -> int:
        i, at, nbytes = job
        return checksum.crc32(memory.view(tensors[i].data_ptr() + at, nbytes, writable=False))

    if len(on_host) > 1:
        with ThreadPoolExecutor(min(system.cpu_count(), len(on_host)), thread_name_prefix="torchdirect-crc") as pool:
            found = list(pool.map(piece, on_host))
    else:
        found = [piece(job) for job in on_host]
    pieces: dict[int, list[tuple[int, int]]] = {}
    for (i, _, nbytes), crc in zip(on_host, found, strict=True):
        pieces.setdefault(i, []).append((crc, nbytes))
    for i, parts in pieces.items():
        values[i] = checksum.combine(parts)
    return values


def taken_on_arrival(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether workers should take the checksums of what they load, or the GPU that has it in the end.

    Parameters
    ----------
    tensors
        One-dimensional uint8 tensors.
    """
    nbytes = sum(t.numel() for t in tensors)
    large = nbytes >= max(device_checksum.COMPILE_FROM, len(tensors) * device_checksum.FOLD_FROM)
    return not (large and all(t.is_cuda for t in tensors))


def check_loaded(
    path: str,
    extents: Sequence[Extent],
    expected: Sequence[int],
    tensors: Sequence[torch.Tensor],
    seen: PartChecksums,
    describe: Callable[[int], str],
) -> None:
    """Check loaded bytes against their checksums.

    Parameters
    ----------
    extents
        Each a whole storage, by index.
    expected
        Their CRC-32; 0 stands for none.
    tensors
        Their bytes.
    seen
        What workers have seen of them. The rest is read once more, on the GPU.
    describe
        Names a storage for messages.

    Raises
    ------
    CorruptCheckpointError
        If one differs; names the tensor and its place.
    """
    chosen = [i for i, crc in enumerate(expected) if crc and tensors[i].numel()]
    unseen = [i for i in chosen if seen.missing[i]]
    for i, value in zip(unseen, checksums_of([tensors[i] for i in unseen]), strict=True):
        seen.know(i, value)
    for i in chosen:
        if seen.values[i] != expected[i]:
            raise mismatch(path, describe(i), extents[i], expected[i], seen.values[i])
