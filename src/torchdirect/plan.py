"""Which bytes move: extents, and the windows of the file that they are moved in. Pure data, no I/O.

A *read plan* covers the extents that a load needs; a *write plan* covers every byte of a new file. Both are cut into
*windows*: runs of the file that one transfer moves. Windows begin on block boundaries of the file, hold many small
extents or a piece of a large one, and come in file order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchdirect.units import BLOCK


class Extent(NamedTuple):
    """One contiguous run of a storage's bytes in the file.

    Attributes
    ----------
    file_offset
        First byte in the file.
    nbytes
        Length in bytes.
    storage
        Index of the storage that the bytes belong to.
    storage_offset
        First byte in that storage.
    """

    file_offset: int
    nbytes: int
    storage: int
    storage_offset: int = 0

    @property
    def end(self) -> int:
        """One past the last byte in the file."""
        return self.file_offset + self.nbytes

    def core(self, block: int) -> tuple[int, int]:
        """Return the bounds in the file of the whole blocks inside; equal if there is none."""
        first = align_up(self.file_offset, block)
        return first, max(first, align_down(self.end, block))

    def part(self, start: int, stop: int) -> Extent | None:
        """Return what lies between two places in the file; None if nothing does."""
        first, last = max(self.file_offset, start), min(self.end, stop)
        if first >= last:
            return None
        return Extent(first, last - first, self.storage, self.storage_offset + first - self.file_offset)


class Gap(NamedTuple):
    """A run of a new file that belongs to no storage: headers, padding, directories.

    Attributes
    ----------
    file_offset, nbytes
        Where it lies in the file.
    needs
        Indices of the storages whose CRC-32 must be known before `render` is called.
    render
        Receives the CRC-32 of every storage (by index; 0 where it is not known yet) and returns the bytes.
    """

    file_offset: int
    nbytes: int
    needs: range
    render: Callable[[Sequence[int]], bytes]

    @property
    def end(self) -> int:
        """One past the last byte in the file."""
        return self.file_offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Window:
    """A run of the file that one transfer moves.

    Attributes
    ----------
    file_offset
        First byte; a multiple of the block size.
    nbytes
        Length; a multiple of the block size, but for a window that ends with the file.
    extents
        The (parts of) extents inside the window, in file order.
    gaps
        Write plans only: the (parts of) gaps inside the window as ``(gap index, file offset, nbytes)``.
    deferred
        Write plans only: the window holds a CRC-32 of bytes that lie in other windows, so it is written last.
    """

    file_offset: int
    nbytes: int
    extents: tuple[Extent, ...]
    gaps: tuple[tuple[int, int, int], ...] = ()
    deferred: bool = False

    @property
    def end(self) -> int:
        """One past the last byte in the file."""
        return self.file_offset + self.nbytes


def align_down(value: int, alignment: int) -> int:
    """Return the largest multiple of `alignment` that is not above `value`."""
    return value - value % alignment


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def read_windows(
    extents: Sequence[Extent],
    *,
    chunk_bytes: int,
    file_size: int,
    block: int = BLOCK,
    max_gap: int | None = None,
) -> list[Window]:
    """Cut the extents of a load into windows.

    Extents are taken in file order. Neighbours share a window while it stays within `chunk_bytes` and the unneeded
    bytes between them stay within `max_gap`: reading a small gap costs less than another request. Extents longer than
    a window are split on block boundaries. The same bytes may be wanted by several extents.

    Parameters
    ----------
    extents
        What to read, in any order. Extents of zero bytes are dropped.
    chunk_bytes
        Upper bound of a window in bytes; a multiple of `block`.
    file_size
        Bytes in the file; the last window is cut there.
    block
        Alignment in bytes of window offsets and lengths.
    max_gap
        Bytes of unneeded data to read through; ``chunk_bytes // 16`` if not given, and at least a block.
    """
    if chunk_bytes <= 0 or chunk_bytes % block:
        raise ValueError(f"chunk_bytes={chunk_bytes} is not a positive multiple of {block}")
    max_gap = max(block, chunk_bytes // 16 if max_gap is None else max_gap)
    windows: list[Window] = []
    start = end = 0
    inside: list[Extent] = []

    def close() -> None:
        if inside:
            stop = min(align_up(end, block), max(file_size, end))
            windows.append(Window(start, stop - start, tuple(inside)))
            inside.clear()

    for extent in sorted((e for e in extents if e.nbytes), key=lambda e: e.file_offset):
        before = extent.file_offset < start  # of bytes that an extent split over several windows has covered
        if inside and (before or extent.file_offset > end + max_gap or extent.file_offset >= start + chunk_bytes):
            close()
        offset, remaining, storage_offset = extent.file_offset, extent.nbytes, extent.storage_offset
        if inside and extent.nbytes > chunk_bytes // 2 and extent.end > start + chunk_bytes:
            # A large extent gets windows of its own, so that its pieces need no copy between buffers.
            close()
        while remaining:
            if not inside:
                start, end = align_down(offset, block), offset
            length = min(remaining, start + chunk_bytes - offset)
            if length <= 0:
                close()
                continue
            inside.append(Extent(offset, length, extent.storage, storage_offset))
            end = max(end, offset + length)
            offset, remaining, storage_offset = offset + length, remaining - length, storage_offset + length
            if end >= start + chunk_bytes and remaining:
                close()
    close()
    return windows


def write_windows(
    extents: Sequence[Extent],
    gaps: Sequence[Gap],
    *,
    chunk_bytes: int,
    file_size: int,
    block: int = BLOCK,
) -> list[Window]:
    """Cut a new file into windows that cover every byte exactly once.

    A large extent is cut out on block boundaries, so that its inner windows hold nothing but its bytes and can move
    straight from its memory; what is left around it (its tail, headers, neighbours) forms the seams. Small extents
    stay whole in one window where block boundaries allow, together with the header and the CRC-32 that belong to them.

    Parameters
    ----------
    extents, gaps
        What the file holds. Together they cover ``[0, file_size)`` without overlap.
    chunk_bytes
        Upper bound of a window in bytes; a multiple of `block`.
    file_size
        Bytes in the finished file.
    block
        Alignment in bytes of window offsets and lengths.

    Raises
    ------
    ValueError
        If the pieces overlap or leave a hole.
    """
    if chunk_bytes <= 0 or chunk_bytes % block:
        raise ValueError(f"chunk_bytes={chunk_bytes} is not a positive multiple of {block}")
    pieces: list[tuple[int, int, int, Extent | None]] = [(e.file_offset, e.nbytes, -1, e) for e in extents if e.nbytes]
    pieces += [(g.file_offset, g.nbytes, i, None) for i, g in enumerate(gaps) if g.nbytes]
    pieces.sort(key=lambda piece: piece[0])

    large = chunk_bytes // 2
    cuts: list[int] = []  # where a window should end, in file order; on block boundaries
    position = 0
    for offset, nbytes, _, extent in pieces:
        if offset != position:
            raise ValueError(f"pieces of the file overlap or leave a hole at offset {min(offset, position)}")
        position += nbytes
        if extent is not None:
            first, last = extent.core(block)
            if nbytes > large and last > first:
                cuts.extend(range(first, last, chunk_bytes))
                cuts.append(last)
    if position != file_size:
        raise ValueError(f"pieces cover {position} of {file_size} bytes")

    bounds = _window_bounds(cuts, pieces, chunk_bytes, file_size, block)
    return _fill_windows(bounds, pieces, gaps)


def _window_bounds(
    cuts: Sequence[int],
    pieces: Sequence[tuple[int, int, int, Extent | None]],
    chunk_bytes: int,
    file_size: int,
    block: int,
) -> list[int]:
    """Return ascending window bounds: every cut, and further ones so that no window exceeds `chunk_bytes`.

    The further ones fall on the beginning of an extent if one lies on a block boundary: that keeps small extents whole.
    """
    starts = [offset for offset, _, _, extent in pieces if extent is not None and offset % block == 0]
    bounds = [0]
    next_start = 0
    for cut in [*(c for c in cuts if c > 0), file_size]:
        while cut - bounds[-1] > chunk_bytes:
            limit = bounds[-1] + chunk_bytes
            while next_start < len(starts) and starts[next_start] <= limit:
                next_start += 1
            best = starts[next_start - 1] if next_start else 0
            bounds.append(best if best > bounds[-1] else align_down(limit, block))
        if cut > bounds[-1]:
            bounds.append(cut)
    return bounds


def _fill_windows(
    bounds: Sequence[int], pieces: Sequence[tuple[int, int, int, Extent | None]], gaps: Sequence[Gap]
) -> list[Window]:
    stored = {extent.storage for _, _, _, extent in pieces if extent is not None}
    windows: list[Window] = []
    at = 0
    used = 0  # bytes of pieces[at] that earlier windows took
    for start, stop in itertools.pairwise(bounds):
        inside: list[Extent] = []
        inside_gaps: list[tuple[int, int, int]] = []
        whole: set[int] = set()
        needs: list[range] = []
        position = start
        while position < stop:
            _, nbytes, gap_index, extent = pieces[at]
            length = min(nbytes - used, stop - position)
            if extent is not None:
                inside.append(Extent(position, length, extent.storage, extent.storage_offset + used))
                if length == nbytes:
                    whole.add(extent.storage)
            else:
                inside_gaps.append((gap_index, position, length))
                needs.append(gaps[gap_index].needs)
            position, used = position + length, used + length
            if used == nbytes:
                at, used = at + 1, 0
        deferred = any(storage in stored and storage not in whole for need in needs for storage in need)
        windows.append(Window(start, stop - start, tuple(inside), tuple(inside_gaps), deferred))
    return windows
