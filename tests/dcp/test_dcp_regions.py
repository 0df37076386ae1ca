"""Arithmetic of parts of stored tensors: extents move exactly the bytes that a strided copy would."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchdirect as td
from dcp_states import stock
from torchdirect.dcp.items import FileBuilder, store_bytes, store_tensor
from torchdirect.dcp.regions import count_runs, find_runs, is_dense, is_worth_runs, region_extents
from torchdirect.plan import write_windows


@st.composite
def regions(draw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a part of a stored tensor and a target of its shape, both strided in any way without overlap."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))

    def strided(shape: list[int]) -> torch.Tensor:
        order = draw(st.permutations(range(len(shape))))
        steps = [draw(st.integers(1, 2)) for _ in shape]
        pads = [draw(st.integers(0, 3)) for _ in shape]
        whole = torch.zeros([shape[d] * steps[d] + pads[d] for d in order], dtype=torch.int32)
        part = whole.permute([order.index(d) for d in range(len(shape))])
        for d, size in enumerate(shape):
            part = part.narrow(d, draw(st.integers(0, pads[d])), size * steps[d])
            part = part[(slice(None),) * d + (slice(None, None, steps[d]),)]
        return part

    return strided(shape), strided(shape)


@given(regions())
def test_extents_of_a_region_are_a_strided_copy(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    source, target = pair
    source.copy_(torch.arange(source.numel(), dtype=torch.int32).reshape(source.shape) + 1)
    stored = source.untyped_storage()
    extents = region_extents(
        int(source.storage_offset()) * 4, source.shape, source.stride(), target.stride(), 4, storage=7
    )
    into = bytearray(target.untyped_storage().nbytes())
    first = target.storage_offset() * 4
    for extent in extents:
        assert extent.storage == 7
        data = bytes(stored[extent.file_offset : extent.end])
        into[first + extent.storage_offset : first + extent.storage_offset + extent.nbytes] = data
    moved = torch.frombuffer(into, dtype=torch.int32) if into else torch.zeros(0, dtype=torch.int32)
    found = moved.as_strided(target.shape, target.stride(), target.storage_offset() if into else 0)
    assert torch.equal(found, source)
    assert sum(extent.nbytes for extent in extents) == source.numel() * 4, "no byte more than is needed"
    assert extents == sorted(extents)
    count, length = count_runs(source.shape, source.stride(), target.stride())
    assert count == len(extents) and count * length == source.numel()


@pytest.mark.parametrize(
    ("shape", "source", "target", "count", "length"),
    [
        ((), (), (), 1, 1),
        ((4, 8), (8, 1), (8, 1), 1, 32),
        ((2, 8), (8, 1), (8, 1), 1, 16),  # rows of a matrix
        ((4, 3), (8, 1), (3, 1), 4, 3),  # columns of one
        ((4, 1), (8, 1), (1, 1), 4, 1),
        ((1, 3), (8, 1), (99, 1), 1, 3),
        ((8, 4), (1, 8), (1, 8), 1, 32),  # both transposed alike
        ((8, 4), (1, 8), (4, 1), 32, 1),  # one transposed
        ((5, 2, 4), (100, 4, 1), (8, 4, 1), 5, 8),
        ((3, 0), (8, 1), (1, 1), 0, 0),
    ],
)
def test_runs_are_as_long_as_they_can_be(shape: Any, source: Any, target: Any, count: int, length: int) -> None:
    assert count_runs(shape, source, target) == (count, length)
    runs = find_runs(shape, source, target)
    assert (len(runs.places), runs.length) == (count, length)


def test_many_short_runs_go_through_a_buffer() -> None:
    assert is_worth_runs((100, 10), (1000, 1), (10, 1), 4)
    assert not is_worth_runs((10_000, 10), (1000, 1), (10, 1), 4)
    assert is_worth_runs((10_000, 20_000), (30_000, 1), (20_000, 1), 4)


@given(regions())
def test_dense_is_what_a_clone_keeps(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    part = pair[0]
    if part.numel():
        addresses = {
            sum(i * s for i, s in zip(at, part.stride(), strict=True))
            for at in itertools.product(*(range(n) for n in part.shape))
        }
        assert is_dense(part.shape, part.stride()) == (addresses == set(range(part.numel())))
    assert not is_dense((3, 4), (0, 1)) and not is_dense((2, 2), (1, 1))


@given(st.lists(st.integers(0, 9000), max_size=8), st.booleans())
def test_a_file_of_items_has_no_hole_and_aligned_payload(sizes: list[int], crc: bool) -> None:
    import io

    builder = FileBuilder()
    places = []
    for i, size in enumerate(sizes):
        if i % 3 == 2:
            item = store_bytes(io.BytesIO(bytes(size)))
        else:
            item = store_tensor(torch.zeros(size, dtype=torch.uint8), crc=crc)
        places.append((builder.add(item), item))
    layout = builder.layout()
    windows = write_windows(layout.extents, layout.gaps, chunk_bytes=8192, file_size=layout.file_size)
    assert sum(window.nbytes for window in windows) == layout.file_size
    end = 0
    for offset, item in places:
        assert end <= offset < end + 8192
        end = offset + item.nbytes
        for extent in item.layout.extents:
            if extent.nbytes >= 4096:
                assert (offset + extent.file_offset) % 4096 == 0
    assert end == layout.file_size


def test_only_the_bytes_that_are_needed_are_read(tmp_path: Path) -> None:
    full = torch.randn(4000, 1000)
    stock.save({"t": full}, checkpoint_id=tmp_path)
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    class Planner(stock.DefaultLoadPlanner):  # type: ignore[misc]
        def __init__(self, target: torch.Tensor) -> None:
            super().__init__()
            self.target = target

        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return self.target

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            assert tensor.data_ptr() == self.target.data_ptr()

    for where, size in (((100, 0), (50, 1000)), ((3999, 990), (1, 10)), ((0, 300), (4000, 7)), ((7, 5), (90, 600))):
        target = torch.zeros(size)
        reader = td.dcp.DirectReader(tmp_path)
        reader.set_up_storage_reader(reader.read_metadata(), True)
        item = ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex("t", torch.Size(where)),
            torch.Size((0, 0)),
            MetadataIndex("t", torch.Size((0, 0)), 0),
            torch.Size(where),
            torch.Size(size),
        )
        reader.read_data(LoadPlan([item]), Planner(target)).wait()
        assert torch.equal(target, full.narrow(0, where[0], size[0]).narrow(1, where[1], size[1]))
        report = td.last_transfer()
        assert report is not None
        span = ((size[0] - 1) * 1000 + size[1]) * 4
        assert math.prod(size) * 4 <= report.payload_bytes <= span + 4 * 4096
