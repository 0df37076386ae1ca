"""Ranks that load together: each reads a share, all have the whole."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import torchdirect as td
from torchdirect.plan import Extent
from torchdirect.replicas import own_extents, share_bytes
from torchdirect.units import BLOCK

RANKS = 2


@given(
    offset=st.integers(0, 1 << 20), nbytes=st.integers(0, 1 << 23), at=st.integers(0, 1 << 20), ranks=st.integers(1, 9)
)
def test_the_shares_of_all_ranks_are_the_extent(offset: int, nbytes: int, at: int, ranks: int) -> None:
    extent = Extent(offset, nbytes, 3, at)
    share = share_bytes(nbytes, ranks)
    assert share % BLOCK == 0
    own = [own_extents(extent, rank, ranks) for rank in range(ranks)]
    if not share:
        assert own == [[extent]] * ranks
        return
    firsts = [parts[0] for parts in own]
    assert [p.file_offset for p in firsts] == [offset + i * share for i in range(ranks)]
    assert [p.storage_offset for p in firsts] == [at + i * share for i in range(ranks)]
    assert {p.nbytes for p in firsts} == {share}
    tail = nbytes - ranks * share
    assert tail < ranks * BLOCK
    assert [parts[1:] for parts in own] == [
        [Extent(offset + ranks * share, tail, 3, at + ranks * share)] if tail else []
    ] * ranks


def state() -> dict[str, torch.Tensor]:
    values = torch.Generator().manual_seed(1)
    made = {f"large.{i}": torch.randn(1000 + i, 1500, generator=values) for i in range(4)}
    return {
        **made,
        "small": torch.arange(7.0),
        "odd": torch.arange(1_000_003, dtype=torch.int16),
        "none": torch.empty(0),
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[k], expected[k]) for k in expected)


def bytes_read() -> int:
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("rchar")).split()[1])


def check_results(rank: int, folder: Path) -> None:
    expected = state()
    size = (folder / "a.pt").stat().st_size
    before = bytes_read()
    with td.replicated():
        loaded = td.load(folder / "a.pt")
    assert same(loaded, expected)
    assert 0.4 * size < bytes_read() - before < 0.7 * size
    report = td.last_transfer()
    assert report is not None
    assert report.reason.endswith("; shared by 2 ranks")

    with td.replicated():
        assert same(td.load(folder / "a.pt", verify=True), expected)
        safetensors = td.load(folder / "a.safetensors")
        sharded = td.load_sharded(folder / "sharded")
        target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        td.load_into(target, folder / "a.pt")
        with td.open(folder / "a.pt") as file:
            part = file.load(prefix="large.")
    assert same({name: safetensors[name] for name in expected}, expected)
    assert same({name: sharded[name] for name in expected}, expected)
    assert same(target, expected)
    assert same(part, {k: v for k, v in expected.items() if k.startswith("large.")})

    # Outside of the block each rank is on its own.
    if rank == 0:
        assert same(td.load(folder / "a.pt"), expected)


def check_errors(rank: int, folder: Path) -> None:
    # A rank that cannot read.
    real = os.preadv

    def fail(*arguments: Any) -> int:
        raise OSError(5, "Input/output error")

    if rank == 1:
        os.preadv = fail
    try:
        with pytest.raises(td.LoadError, match="Input/output error") as caught, td.replicated():
            td.load(folder / "a.pt", transfer_type="CPU_CACHED_GPU")
    finally:
        os.preadv = real
    assert ("rank 1 of the group could not read its share" in str(caught.value)) == (rank == 0)

    # Ranks that load different things.
    name = "a.pt" if rank == 0 else "other.pt"
    other = f"rank {1 - rank} of the group loads other bytes than rank {rank}"
    with pytest.raises(td.LoadError, match=other), td.replicated():
        td.load(folder / name)

    # A damaged share is found by every rank.
    with pytest.raises(td.CorruptCheckpointError, match=r"large\.3"), td.replicated():
        td.load(folder / "damaged.pt", verify=True)

    alone = dist.new_group([0])
    if rank == 1:
        with pytest.raises(td.SettingsError, match="this rank is not in"), td.replicated(alone):
            pass
    else:
        with td.replicated(alone):
            assert same(td.load(folder / "a.pt"), state())


def run_rank(rank: int, folder: str, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    try:
        check_results(rank, Path(folder))
        check_errors(rank, Path(folder))
    except BaseException:
        Path(folder, f"failed.{rank}").write_text(traceback.format_exc())
        os._exit(1)
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    td.save(state(), tmp_path / "a.pt", durable=False)
    td.save({"x": torch.zeros(3_000_000)}, tmp_path / "other.pt", durable=False)
    td.save(state(), tmp_path / "a.safetensors", durable=False)
    td.save_sharded(state(), tmp_path / "sharded", max_shard_bytes="12MB", durable=False)
    content = bytearray((tmp_path / "a.pt").read_bytes())
    with td.open(tmp_path / "a.pt") as file:
        content[file.info("large.3").file_offset + 5] ^= 1
    (tmp_path / "damaged.pt").write_bytes(content)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(r, str(tmp_path), str(tmp_path / "store"))) for r in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    failures = "\n".join(path.read_text() for path in tmp_path.glob("failed.*"))
    assert [process.exitcode for process in ranks] == [0] * RANKS, failures


def test_without_a_process_group() -> None:
    with pytest.raises(td.SettingsError, match="init_process_group first"), td.replicated():
        pass
