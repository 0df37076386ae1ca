"""Properties of the pure plans: what must hold for any layout of a file."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdirect.plan import Extent, Gap, Window, align_down, align_up, read_windows, write_windows

BLOCK = 512
CHUNKS = st.integers(1, 12).map(lambda n: n * BLOCK)


@st.composite
def files(draw: st.DrawFn) -> tuple[list[Extent], list[tuple[int, int]], int]:
    """Extents (some aligned, some not, some empty) with gaps between them, and the file size."""
    extents: list[Extent] = []
    gaps: list[tuple[int, int]] = []
    position = 0
    for index in range(draw(st.integers(0, 12))):
        gap = draw(st.integers(0, 3 * BLOCK))
        if draw(st.booleans()):
            gap = align_up(position + gap, BLOCK) - position
        if gap:
            gaps.append((position, gap))
        position += gap
        nbytes = draw(st.one_of(st.just(0), st.integers(1, 80), st.integers(1, 20 * BLOCK)))
        extents.append(Extent(position, nbytes, index))
        position += nbytes
    tail = draw(st.integers(0, 700))
    if tail:
        gaps.append((position, tail))
    return extents, gaps, position + tail


def bytes_of(windows: Sequence[Window]) -> dict[tuple[int, int], int]:
    """(storage, byte in storage) -> file offset, for every byte that the windows move."""
    moved: dict[tuple[int, int], int] = {}
    for window in windows:
        for extent in window.extents:
            assert window.file_offset <= extent.file_offset
            assert extent.end <= window.end
            for i in range(extent.nbytes):
                key = (extent.storage, extent.storage_offset + i)
                assert key not in moved, f"byte {key} moves twice"
                moved[key] = extent.file_offset + i
    return moved


def expected_bytes(extents: Sequence[Extent]) -> dict[tuple[int, int], int]:
    return {(e.storage, e.storage_offset + i): e.file_offset + i for e in extents for i in range(e.nbytes)}


@given(files(), CHUNKS, st.one_of(st.none(), st.integers(0, 5 * BLOCK)), st.randoms())
@settings(max_examples=150, deadline=None)
def test_read_windows_move_each_wanted_byte_once(file, chunk, max_gap, random):  # type: ignore[no-untyped-def]
    extents, _, size = file
    random.shuffle(extents)
    windows = read_windows(extents, chunk_bytes=chunk, file_size=size, block=BLOCK, max_gap=max_gap)
    assert bytes_of(windows) == expected_bytes(extents)
    for window in windows:
        assert window.file_offset % BLOCK == 0
        assert window.nbytes % BLOCK == 0 or window.end == size
        assert 0 < window.nbytes <= chunk
        assert window.end <= size
    for first, second in itertools.pairwise(windows):
        # Two windows may share the block in which one ends and the next begins, never more.
        assert first.file_offset <= second.file_offset
        assert second.file_offset >= align_down(first.end - 1, BLOCK)


def test_read_windows_serve_extents_that_overlap_in_the_file() -> None:
    extents = [Extent(100, 1000, 0), Extent(400, 200, 1), Extent(100, 1000, 2)]
    windows = read_windows(extents, chunk_bytes=4 * BLOCK, file_size=5000, block=BLOCK)
    assert bytes_of(windows) == expected_bytes(extents)


@given(
    st.lists(st.tuples(st.integers(0, 40 * BLOCK), st.integers(0, 30 * BLOCK)), min_size=1, max_size=6), CHUNKS,
    st.one_of(st.none(), st.integers(0, 5 * BLOCK)),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_read_windows_serve_any_extents(places: list[tuple[int, int]], chunk: int, max_gap: int | None) -> None:
    extents = [Extent(offset, nbytes, i) for i, (offset, nbytes) in enumerate(places)]
    windows = read_windows(extents, chunk_bytes=chunk, file_size=80 * BLOCK, block=BLOCK, max_gap=max_gap)
    assert bytes_of(windows) == expected_bytes(extents)
    for window in windows:
        assert 0 < window.nbytes <= chunk
        assert window.file_offset % BLOCK == 0


def test_read_windows_skip_large_holes_and_read_through_small_ones() -> None:
    extents = [Extent(0, 100, 0), Extent(600, 100, 1), Extent(100 * BLOCK, 100, 2)]
    windows = read_windows(extents, chunk_bytes=200 * BLOCK, file_size=200 * BLOCK, block=BLOCK, max_gap=1000)
    assert [len(w.extents) for w in windows] == [2, 1]


def make_gaps(gaps: list[tuple[int, int]], extents: list[Extent]) -> list[Gap]:
    """Each gap needs the CRC of the extent before it, as in a zip file; the last needs all."""
    made = []
    for i, (offset, nbytes) in enumerate(gaps):
        before = [e.storage for e in extents if e.end <= offset and e.nbytes]
        needs = range(before[-1], before[-1] + 1) if before else range(0)
        if i == len(gaps) - 1:
            needs = range(len(extents))
        made.append(Gap(offset, nbytes, needs, lambda crcs: b""))
    return made


@given(files(), CHUNKS)
@settings(max_examples=150, deadline=None)
def test_write_windows_cover_the_file_exactly_once(file, chunk):  # type: ignore[no-untyped-def]
    extents, raw_gaps, size = file
    gaps = make_gaps(raw_gaps, extents)
    windows = write_windows(extents, gaps, chunk_bytes=chunk, file_size=size, block=BLOCK)
    assert bytes_of(windows) == expected_bytes(extents)
    position = 0
    for window in windows:
        assert window.file_offset == position
        assert window.file_offset % BLOCK == 0
        assert 0 < window.nbytes <= chunk
        position = window.end
        covered = sum(e.nbytes for e in window.extents) + sum(n for _, _, n in window.gaps)
        assert covered == window.nbytes
        whole = {e.storage for e in window.extents if e.nbytes == extents[e.storage].nbytes}
        needed = {s for g, _, _ in window.gaps for s in gaps[g].needs if extents[s].nbytes}
        assert window.deferred or needed <= whole
    assert position == size


def test_small_aligned_extents_stay_whole_with_their_crc() -> None:
    extents, gaps, position = [], [], 0
    for i in range(50):
        gaps.append(Gap(position, BLOCK, range(max(0, i - 1), i), lambda crcs: b""))
        extents.append(Extent(position + BLOCK, BLOCK, i))
        position += 2 * BLOCK
    gaps.append(Gap(position, 10, range(0), lambda crcs: b""))
    windows = write_windows(extents, gaps, chunk_bytes=7 * BLOCK, file_size=position + 10, block=BLOCK)
    for window in windows:
        assert all(e.nbytes == BLOCK for e in window.extents)


def test_large_extents_get_windows_of_their_own() -> None:
    size = 10 * BLOCK + 37
    gaps = [Gap(0, BLOCK, range(0), lambda c: b""), Gap(BLOCK + size, 100, range(1), lambda c: b"")]
    windows = write_windows(
        [Extent(BLOCK, size, 0)], gaps, chunk_bytes=4 * BLOCK, file_size=BLOCK + size + 100, block=BLOCK
    )
    assert [(w.file_offset // BLOCK, w.nbytes, bool(w.gaps), w.deferred) for w in windows] == [
        (0, BLOCK, True, False),
        (1, 4 * BLOCK, False, False),
        (5, 4 * BLOCK, False, False),
        (9, 2 * BLOCK, False, False),
        (11, 137, True, True),
    ]


@pytest.mark.parametrize(
    ("gaps", "size"),
    [([(0, 10)], 110), ([(0, 10), (70, 10)], 80), ([(0, 10), (60, 50)], 110)],
)
def test_holes_and_overlaps_are_refused(gaps: list[tuple[int, int]], size: int) -> None:
    made = [Gap(o, n, range(0), lambda c: b"") for o, n in gaps]
    with pytest.raises(ValueError, match=r"hole|cover"):
        write_windows([Extent(10, 50, 0), Extent(60, 10, 1)] if size == 110 else [Extent(10, 50, 0)], made,
                      chunk_bytes=BLOCK, file_size=size + 1, block=BLOCK)  # fmt: skip


@pytest.mark.parametrize("chunk", [0, -512, 100])
def test_chunk_must_be_a_multiple_of_the_block(chunk: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        read_windows([], chunk_bytes=chunk, file_size=1, block=BLOCK)
    with pytest.raises(ValueError, match="multiple"):
        write_windows([], [], chunk_bytes=chunk, file_size=0, block=BLOCK)
