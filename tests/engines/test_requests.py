"""Splitting plans: every byte by one road, once, and no block of a new file by two."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from torchdirect.engines.requests import Request, split_read, split_write
from torchdirect.formats import torch_zip
from torchdirect.plan import Extent, Window, read_windows, write_windows

BLOCK = 4096
sizes = st.lists(st.one_of(st.integers(0, 200), st.integers(1, 300_000)), min_size=1, max_size=12)
chunks = st.integers(1, 24).map(lambda n: n * BLOCK)


def moved(requests: list[Request], windows: list[Window]) -> list[tuple[int, int, int]]:
    """Return (storage, first byte, bytes) of everything that is moved, in order, checking that places agree."""
    parts = [Extent(r.file_offset, r.nbytes, r.storage, r.storage_offset) for r in requests]
    parts += [extent for window in windows for extent in window.extents]
    return sorted((p.storage, p.storage_offset, p.nbytes) for p in parts)


def assert_whole(parts: list[tuple[int, int, int]], wanted: dict[int, int]) -> None:
    for storage, nbytes in wanted.items():
        position = 0
        for _, offset, length in (part for part in parts if part[0] == storage):
            assert offset == position
            position += length
        assert position == nbytes


@given(sizes, st.data(), chunks, chunks, st.integers(0, 5000))
def test_reads(nbytes: list[int], data: st.DataObject, chunk: int, request: int, shift: int) -> None:
    straight = data.draw(st.lists(st.booleans(), min_size=len(nbytes), max_size=len(nbytes)))
    gaps = data.draw(st.lists(st.integers(0, 9000), min_size=len(nbytes), max_size=len(nbytes)))
    extents, position = [], shift
    for i, (size, gap) in enumerate(zip(nbytes, gaps, strict=True)):
        extents.append(Extent(position, size, i))
        position += size + gap
    windows = read_windows(extents, chunk_bytes=chunk, file_size=position)
    requests, rest = split_read(windows, straight, request_bytes=request, chunk_bytes=chunk, file_size=position)
    assert_whole(moved(requests, rest), dict(enumerate(nbytes)))
    for r in requests:
        assert straight[r.storage]
        assert r.file_offset % BLOCK == r.nbytes % BLOCK == 0
        assert 0 < r.nbytes <= request
        assert extents[r.storage].file_offset + r.storage_offset == r.file_offset
    for extent in (e for window in rest for e in window.extents if straight[e.storage]):
        assert extent.nbytes < 2 * BLOCK, "only ragged ends are left to the host"


@given(sizes, st.data(), chunks, chunks, st.sampled_from([64, 512, 4096, 8192]))
def test_writes(nbytes: list[int], data: st.DataObject, chunk: int, request: int, alignment: int) -> None:
    straight = data.draw(st.lists(st.booleans(), min_size=len(nbytes), max_size=len(nbytes)))
    layout = torch_zip.layout_file("a", b"pickle", nbytes, alignment=alignment, byteorder="little", crc=True)
    windows = write_windows(layout.extents, layout.gaps, chunk_bytes=chunk, file_size=layout.file_size)
    requests, rest = split_write(windows, straight, request_bytes=request)
    assert_whole(moved(requests, rest), dict(enumerate(nbytes)))
    spans = sorted([(r.file_offset, r.nbytes) for r in requests] + [(w.file_offset, w.nbytes) for w in rest])
    assert spans[0][0] == 0
    for (offset, length), (following, _) in itertools.pairwise(spans):
        assert offset + length == following
        assert following % BLOCK == 0
    assert sum(spans[-1]) == layout.file_size
    for window in rest:
        pieces = sorted(
            [(e.file_offset, e.nbytes) for e in window.extents] + [(offset, n) for _, offset, n in window.gaps]
        )
        assert pieces[0][0] == window.file_offset
        assert sum(n for _, n in pieces) == window.nbytes
    whole_before = {e.storage for w in rest if not w.deferred for e in w.extents if e.nbytes == nbytes[e.storage]}
    for window in rest:
        if not window.deferred:
            needed = {i for index, _, _ in window.gaps for i in layout.gaps[index].needs if nbytes[i]}
            assert needed <= whole_before | {i for i in needed if straight[i]}
