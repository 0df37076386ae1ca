"""Runs cases on a process group of four, and its subgroups of two and one, in forked processes.

Prints one JSON object: for each case the tracebacks of the ranks that failed.
"""

from __future__ import annotations

import datetime
import inspect
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchdirect as td
from dcp_states import same, small, stock

RANKS = 4
TIMEOUT = datetime.timedelta(seconds=30)
"""After which a rank gives up on one that has failed elsewhere."""
SIZES = (1, 2, 4)
WRITERS = ("ours", "stock")


class Group:
    """The first ranks of the world, with a mesh over them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.group = dist.new_group(list(range(size)), timeout=TIMEOUT)
        self.mesh = DeviceMesh("cpu", list(range(size)))
        self.inside = dist.get_rank() < size

    def save(self, writer: str, state: dict[str, Any], folder: Path, **options: Any) -> None:
        if not self.inside:
            return
        if writer == "ours":
            td.dcp.save(state, folder, process_group=self.group, **options)
        else:
            stock.save(state, checkpoint_id=folder, process_group=self.group, **options)

    def load(self, reader: str, state: dict[str, Any], folder: Path, **options: Any) -> None:
        if not self.inside:
            return
        if reader == "ours":
            td.dcp.load(state, folder, process_group=self.group, **options)
        else:
            stock.load(state, checkpoint_id=folder, process_group=self.group, **options)


def full_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return what is shared out: even, uneven, and too small for every rank to have a part."""
    made = torch.Generator().manual_seed(seed)
    shapes = {
        "even": (64, 128),
        "uneven": (37, 501),
        "few": (3, 2),
        "wide": (5, 40_000),
        "row": (1, 9),
        "empty": (0, 4),
    }
    tensors = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    return {**tensors, "half": torch.randn(33, 65, generator=made).bfloat16()}


def share_out(tensors: dict[str, torch.Tensor], mesh: DeviceMesh, turn: int) -> dict[str, Any]:
    """Return a state of distributed tensors, each placed another way; `turn` says how the ways are dealt."""
    ways = [Shard(0), Shard(1), Replicate()]
    return {
        name: distribute_tensor(tensor.clone(), mesh, [ways[(i + turn) % 3]])
        for i, (name, tensor) in enumerate(tensors.items())
    }


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def reshard(groups: dict[int, Group], folder: Path, saving: int, loading: int, writer: str, reader: str) -> None:
    source, target = groups[saving], groups[loading]
    tensors = full_tensors(saving)
    if source.inside:
        state = share_out(tensors, source.mesh, 0)
        source.save(writer, {"model": state, "plain": torch.arange(7), "n": {"epoch": 3}}, folder)
    dist.barrier()
    for turn in range(3):
        if not target.inside:
            continue
        expected = share_out(tensors, target.mesh, turn)
        found = share_out({name: torch.zeros_like(t) for name, t in tensors.items()}, target.mesh, turn)
        state = {"model": found, "plain": torch.zeros(7, dtype=torch.int64), "n": {"epoch": 0}}
        target.load(reader, state, folder)
        assert state["n"]["epoch"] == 3 and torch.equal(state["plain"], torch.arange(7))
        for name, value in expected.items():
            assert same(local(value), local(state["model"][name])), f"{name}, turn {turn}"


def overwrite_with_fewer(groups: dict[int, Group], folder: Path) -> None:
    for size, value in ((4, 1.0), (2, 2.0), (4, 3.0), (1, 4.0)):
        group = groups[size]
        if group.inside:
            tensor = distribute_tensor(torch.full((64, 100), value), group.mesh, [Shard(0)])
            group.save("ours", {"t": tensor}, folder)
        dist.barrier()
        names = sorted(os.listdir(folder))
        assert len(names) == size + 1, names
        if group.inside:
            found = {"t": distribute_tensor(torch.zeros(64, 100), group.mesh, [Shard(1)])}
            group.load("ours", found, folder)
            assert (local(found["t"]) == value).all()
        dist.barrier()


def replicated_tensors_are_written_once(groups: dict[int, Group], folder: Path) -> None:
    groups[4].save("ours", {"t": torch.ones(250_000)}, folder)
    dist.barrier()
    total = sum(entry.stat().st_size for entry in os.scandir(folder))
    assert 1_000_000 <= total < 1_200_000, total


class Fails(DefaultSavePlanner):
    """A planner that has no data on one rank."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(5, "the data is gone")
        return super().resolve_data(write_item)


def one_rank_fails(groups: dict[int, Group], folder: Path) -> None:
    group = groups[4]

    def state(value: float) -> dict[str, Any]:
        return {"t": distribute_tensor(torch.full((64, 1000), value), group.mesh, [Shard(0)])}

    group.save("ours", state(1.0), folder)
    dist.barrier()
    before = sorted(os.listdir(folder))
    dist.barrier()
    try:
        group.save("ours", state(2.0), folder, planner=Fails())
        raise AssertionError("no error")
    except OSError as error:
        assert dist.get_rank() == 1 and "the data is gone" in str(error)
    except CheckpointException as error:
        assert dist.get_rank() != 1 and list(error.failures) == [1]
    dist.barrier()
    assert sorted(os.listdir(folder)) == before
    found = state(0.0)
    group.load("ours", found, folder)
    assert (local(found["t"]) == 1).all()


def no_overwriting(groups: dict[int, Group], folder: Path) -> None:
    groups[2].save("ours", small(1), folder)
    dist.barrier()
    before = sorted(os.listdir(folder))
    if groups[2].inside:
        try:
            groups[2].save("ours", small(2), folder, overwrite=False)
            raise AssertionError("no error")
        except td.SaveError as error:
            assert "overwrite=False" in str(error)
    dist.barrier()
    assert sorted(os.listdir(folder)) == before


def a_damaged_file_is_an_error_on_the_rank_that_reads_it(groups: dict[int, Group], folder: Path) -> None:
    group = groups[4]
    state = {"t": distribute_tensor(torch.full((64, 1000), 1.0), group.mesh, [Shard(0)])}
    group.save("ours", state, folder)
    dist.barrier()
    if dist.get_rank() == 0:
        (path,) = folder.glob("*_2_0.distcp")
        with open(path, "r+b") as file:
            file.truncate(100)
    dist.barrier()
    try:
        group.load("ours", state, folder)
        raise AssertionError("no error")
    except td.CorruptCheckpointError as error:
        assert dist.get_rank() == 2 and "_2_0.distcp" in str(error) and "'t'" in str(error)
    except CheckpointException as error:
        assert dist.get_rank() != 2 and list(error.failures) == [2]


def without_collectives(groups: dict[int, Group], folder: Path) -> None:
    rank = dist.get_rank()
    for value in (1.0, 2.0):
        td.dcp.save(small(value + rank), folder, use_collectives=False)
        dist.barrier()
        assert len(os.listdir(folder)) == 2 * RANKS, os.listdir(folder)
        for load in (partial(td.dcp.load, path=folder), partial(stock.load, checkpoint_id=folder)):
            found = small(0)
            load(found)
            assert same(small(value + rank), found)
        dist.barrier()


def in_the_background(groups: dict[int, Group], folder: Path) -> None:
    tensor = distribute_tensor(torch.full((640, 1000), 1.0), groups[4].mesh, [Shard(0)])
    future = td.dcp.async_save({"t": tensor}, folder)
    local(tensor).zero_()
    future.result()
    dist.barrier()
    found = {"t": distribute_tensor(torch.zeros(640, 1000), groups[4].mesh, [Shard(1)])}
    groups[4].load("ours", found, folder)
    assert (local(found["t"]) == 1).all()


def two_dimensions(groups: dict[int, Group], folder: Path) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    full = torch.arange(37 * 50.0).reshape(37, 50)
    ways: tuple[list[Any], ...] = (
        [Replicate(), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(1), Replicate()],
        [Shard(0), Shard(0)],
    )
    for i, saved in enumerate(ways):
        target = folder / str(i)
        td.dcp.save({"t": distribute_tensor(full, mesh, saved)}, target)
        dist.barrier()
        for way in ways:
            for load in (partial(td.dcp.load, path=target), partial(stock.load, checkpoint_id=target)):
                found = {"t": distribute_tensor(torch.zeros(37, 50), mesh, way)}
                load(found)
                assert torch.equal(local(found["t"]), local(distribute_tensor(full, mesh, way))), (saved, way)


def fully_sharded(groups: dict[int, Group], folder: Path) -> None:
    def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(30, 41), torch.nn.Linear(41, 7))
        fully_shard(model, mesh=groups[4].mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 30)).sum().backward()
        optimizer.step()
        return model, optimizer

    def full(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))

    saved, fresh = trained(1), trained(2)
    model_state, optimizer_state = get_state_dict(*saved)
    td.dcp.save({"model": model_state, "optim": optimizer_state}, folder)
    dist.barrier()
    model_state, optimizer_state = get_state_dict(*fresh)
    state: dict[str, Any] = {"model": model_state, "optim": optimizer_state}
    td.dcp.load(state, folder)
    set_state_dict(*fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
    ours, theirs = full(*fresh), full(*saved)
    assert same(ours[0], theirs[0]) and same(ours[1]["state"], theirs[1]["state"])


CASES: dict[str, Callable[[dict[int, Group], Path], None]] = {
    **{
        f"saved on {saving} by {writer}, loaded on {loading} by {reader}": partial(
            reshard, saving=saving, loading=loading, writer=writer, reader=reader
        )
        for saving in SIZES
        for loading in SIZES
        for writer, reader in (("ours", "ours"), ("ours", "stock"), ("stock", "ours"))
    },
    **{
        case.__name__: case
        for case in (
            overwrite_with_fewer,
            replicated_tensors_are_written_once,
            one_rank_fails,
            no_overwriting,
            a_damaged_file_is_an_error_on_the_rank_that_reads_it,
            in_the_background,
            two_dimensions,
            fully_sharded,
            # Newer versions of PyTorch only.
            *([without_collectives] if "use_collectives" in inspect.signature(stock.save).parameters else []),
        )
    },
}


def run(rank: int, root: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    groups = {size: Group(size) for size in SIZES}
    failures: dict[str, str] = {}
    for name, case in CASES.items():
        folder = Path(root) / name.replace(" ", "_")
        try:
            case(groups, folder)
        except BaseException:
            failures[name] = f"rank {rank}: {traceback.format_exc()[-3000:]}"
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, failures.get(name))
        if rank == 0:
            failures[name] = "\n".join(filter(None, everyone))
            shutil.rmtree(folder, ignore_errors=True)
    if rank == 0:
        (Path(root) / "result").write_text(json.dumps(failures))
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        # Forked, so that torch is imported once; nothing has started a thread yet.
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=run, args=(rank, root)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert all(process.exitcode == 0 for process in processes)
        sys.stdout.write((Path(root) / "result").read_text())


if __name__ == "__main__":
    main()
