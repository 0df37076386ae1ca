"""Which part of a plan goes straight between storage and GPU, and which by way of the host. Pure data, no I/O.

cuFile moves whole blocks of one storage. What is left, such as ragged ends of unaligned files, headers, host tensors
and small storages, stays a plan of windows for the host engine. The two never touch the same block of a new file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchdirect.plan import Extent, Window, read_windows
from torchdirect.units import BLOCK


class Request(NamedTuple):
    """Whole blocks of one storage, to be moved by one cuFile call.

    Attributes
    ----------
    file_offset, nbytes
        Where in the file; multiples of the block size.
    storage, storage_offset
        Index of the storage, and first byte in it.
    done
        Bytes that earlier calls have moved.
    deadline
        Time of the monotonic clock at which to give up if nothing moves; 0.0 while it moves.
    """

    file_offset: int
    nbytes: int
    storage: int
    storage_offset: int
    done: int = 0
    deadline: float = 0.0


def _requests(extent: Extent, first: int, last: int, request_bytes: int) -> list[Request]:
    return [
        Request(at, min(request_bytes, last - at), extent.storage, extent.storage_offset + at - extent.file_offset)
        for at in range(first, last, request_bytes)
    ]


def split_read(
    windows: Sequence[Window],
    straight: Sequence[bool],
    *,
    request_bytes: int,
    chunk_bytes: int,
    file_size: int,
    block: int = BLOCK,
) -> tuple[list[Request], list[Window]]:
    """Split a read plan into requests and windows for the host; together they cover the same bytes once.

    Parameters
    ----------
    windows
        A read plan.
    straight
        For each storage, whether its whole blocks go straight to the GPU.
    request_bytes
        Upper bound of a request; a multiple of `block`.
    chunk_bytes, file_size, block
        As for `read_windows`.
    """
    requests: list[Request] = []
    rest: list[Extent] = []
    for window in windows:
        for extent in window.extents:
            first, last = extent.core(block)
            if not straight[extent.storage] or first == last:
                rest.append(extent)
                continue
            requests += _requests(extent, first, last, request_bytes)
            ends = (extent.part(extent.file_offset, first), extent.part(last, extent.end))
            rest += [end for end in ends if end is not None]
    return requests, read_windows(rest, chunk_bytes=chunk_bytes, file_size=file_size, block=block)


def split_write(
    windows: Sequence[Window], straight: Sequence[bool], *, request_bytes: int, block: int = BLOCK
) -> tuple[list[Request], list[Window]]:
    """Split a write plan into requests and windows for the host; together they cover every byte once.

    Parameters as for `split_read`. The windows begin and end on block boundaries, but for the end of the file.
    """
    requests: list[Request] = []
    rest: list[Window] = []
    for window in windows:
        position = window.file_offset
        for extent in window.extents:
            first, last = extent.core(block)
            if straight[extent.storage] and first < last:
                requests += _requests(extent, first, last, request_bytes)
                if first > position:
                    rest.append(_part(window, position, first))
                position = last
        if position == window.file_offset:
            rest.append(window)
        elif position < window.end:
            rest.append(_part(window, position, window.end))
    return requests, rest


def _part(window: Window, start: int, stop: int) -> Window:
    clipped = (extent.part(start, stop) for extent in window.extents)
    gaps = tuple(
        (index, max(offset, start), min(offset + nbytes, stop) - max(offset, start))
        for index, offset, nbytes in window.gaps
        if max(offset, start) < min(offset + nbytes, stop)
    )
    # A checksum in it may be of bytes that are in another part now.
    extents = tuple(extent for extent in clipped if extent is not None)
    return Window(start, stop - start, extents, gaps, window.deferred or bool(gaps))
