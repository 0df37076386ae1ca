"""Which bytes of a stored tensor a part of it is, and where they go in a target. Pure arithmetic, no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torchdirect.plan import Extent

_FEW_RUNS = 256
_LONG_RUN_BYTES = 64 << 10


class Runs(NamedTuple):
    """A region of a tensor as runs of elements that are contiguous in the file and in the target.

    Attributes
    ----------
    length
        Elements in each run.
    places
        For each run the elements before it in the file's tensor and in the target.
    """

    length: int
    places: tuple[tuple[int, int], ...]


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor's elements fill a run of memory without holes or overlap, in whatever order."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def count_runs(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> tuple[int, int]:
    """Return how many runs a region has, and the elements in each.

    Parameters
    ----------
    shape
        Of the region.
    source, target
        The strides in elements of the file's tensor and of the target.
    """
    if 0 in shape:
        return 0, 0
    length, outer = _split(shape, source, target)
    return math.prod(size for size, _, _ in outer), length


def find_runs(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> Runs:
    """Return the runs of a region in the order in which they lie in the file.

    Parameters
    ----------
    shape
        Of the region.
    source, target
        The strides in elements of the file's tensor and of the target.
    """
    if 0 in shape:
        return Runs(0, ())
    length, outer = _split(shape, source, target)
    places = [(0, 0)]
    for size, source_step, target_step in outer:
        places = [(s + i * source_step, t + i * target_step) for s, t in places for i in range(size)]
    return Runs(length, tuple(places))


def _split(
    shape: Sequence[int], source: Sequence[int], target: Sequence[int]
) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the elements of a run, and size and both strides of the dimensions that enumerate the runs."""
    # From the dimension that moves least in the file; those of size 1 move nothing.
    dims = sorted((s, t, size) for size, s, t in zip(shape, source, target, strict=True) if size > 1)
    length = 1
    while dims and dims[0][:2] == (length, length):
        length *= dims.pop(0)[2]
    return length, [(size, s, t) for s, t, size in reversed(dims)]


def is_worth_runs(shape: Sequence[int], source: Sequence[int], target: Sequence[int], itemsize: int) -> bool:
    """Whether reading each run to its place beats reading all between the first and the last into a buffer.

    Each run costs the interpreter some microseconds, and the disk reads through small gaps anyway.
    """
    count, length = count_runs(shape, source, target)
    return count <= _FEW_RUNS or length * itemsize >= _LONG_RUN_BYTES


def region_extents(
    file_offset: int,
    shape: Sequence[int],
    source: Sequence[int],
    target: Sequence[int],
    itemsize: int,
    storage: int,
) -> list[Extent]:
    """Return the extents of a region, in file order.

    Parameters
    ----------
    file_offset
        Of the region's first element.
    shape, source, target
        As for `find_runs`.
    itemsize
        Bytes of an element.
    storage
        Index of the target.
    """
    runs = find_runs(shape, source, target)
    nbytes = runs.length * itemsize
    return [Extent(file_offset + s * itemsize, nbytes, storage, t * itemsize) for s, t in runs.places]
