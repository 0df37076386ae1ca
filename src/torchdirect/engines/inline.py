"""Small files: assembled in memory and written at once, without threads, staging or direct I/O."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from torchdirect import checksum, memory
from torchdirect.engines.base import OpenFile, TransferState
from torchdirect.engines.file_io import write_all
from torchdirect.plan import Extent, Gap


def write(
    file: OpenFile,
    extents: Sequence[Extent],
    gaps: Sequence[Gap],
    tensors: Sequence[torch.Tensor],
    crc: bool,
    state: TransferState,
) -> None:
    """Write a whole file of storages and gaps."""
    image = bytearray(file.size)
    crcs = [0] * len(tensors)
    for extent in extents:
        tensor = tensors[extent.storage].cpu()
        data = memory.view(tensor.data_ptr(), extent.nbytes, writable=False)
        image[extent.file_offset : extent.end] = data
        if crc:
            crcs[extent.storage] = checksum.crc32(data)
    for gap in gaps:
        image[gap.file_offset : gap.end] = gap.render(crcs)
    state.total += file.size
    write_all(file, file.fd, memoryview(image), 0, state)
    state.advance(file.size)


def read(path_or_fd: int, nbytes: int, offset: int) -> bytes:
    """Read up to `nbytes` at `offset`, fewer only at the end of the file."""
    data = os.pread(path_or_fd, nbytes, offset)
    if len(data) == nbytes or not data:
        return data
    parts = [data]
    while data:
        nbytes -= len(data)
        offset += len(data)
        data = os.pread(path_or_fd, nbytes, offset) if nbytes else b""
        parts.append(data)
    return b"".join(parts)
