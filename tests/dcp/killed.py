"""Saves on two ranks of which one is killed, and what the directory then holds. Run by `test_dcp_killed.py`.

Prints one JSON object: for each moment what was wrong, or nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import torchdirect as td
from torchdirect.dcp import directory

RANKS = 2


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(name: str, owner: Any) -> None:
    """Die when `owner` is asked to do something."""
    setattr(owner, name, die)


def after(name: str, owner: Any) -> None:
    """Die when `owner` has done something."""
    real = getattr(owner, name)

    def done(*arguments: Any, **keywords: Any) -> Any:
        real(*arguments, **keywords)
        die()

    setattr(owner, name, done)


WRITER = td.dcp.DirectWriter
MOMENTS: dict[str, tuple[int, Callable[[], None], float]] = {
    # which rank dies, when, and the value that the directory must hold then
    "a rank before it writes": (1, partial(before, "write_data", WRITER), 1.0),
    "a rank that has written": (1, partial(after, "write_data", WRITER), 1.0),
    "the coordinator while it plans": (0, partial(after, "prepare_global_plan", WRITER), 1.0),
    "the coordinator that has written": (0, partial(after, "write_data", WRITER), 1.0),
    "the coordinator before the metadata": (0, partial(before, "write_metadata", directory), 1.0),
    "the coordinator behind the metadata": (0, partial(after, "write_metadata", directory), 2.0),
}


def save(rank: int, root: str, name: str, value: float, moment: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store-{value}-{name}", rank=rank, world_size=RANKS)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    tensor = distribute_tensor(torch.full((64, 2000), value), mesh, [Shard(0)])
    if moment and MOMENTS[moment][0] == rank:
        MOMENTS[moment][1]()
    try:
        td.dcp.save({"t": tensor, "value": value}, Path(root) / name)
    except BaseException:
        os._exit(3)  # the other rank is gone, and with it the group
    os._exit(0)


def on_two_ranks(root: str, name: str, value: float, moment: str = "") -> list[int | None]:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=save, args=(rank, root, name, value, moment)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def found(root: str, name: str) -> float:
    state = {"t": torch.zeros(64, 2000), "value": 0.0}
    td.dcp.load(state, Path(root) / name, no_dist=True)
    tensor, value = state["t"], state["value"]
    assert isinstance(tensor, torch.Tensor) and isinstance(value, float)
    assert (tensor == value).all(), "a mixture"
    return value


def strike(root: str, name: str, moment: str) -> None:
    rank, _, value = MOMENTS[moment]
    shutil.copytree(Path(root) / "old", Path(root) / name)
    codes = on_two_ranks(root, name, 2.0, moment)
    assert codes[rank] == -signal.SIGKILL, codes
    assert found(root, name) == value
    assert on_two_ranks(root, name, 3.0) == [0, 0], "the next save fails"
    assert found(root, name) == 3.0
    names = os.listdir(Path(root) / name)
    assert len(names) == RANKS + 1, f"the next save leaves {names}"


def main() -> None:
    torch.set_num_threads(1)  # forked later: no threads here
    wrong: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as root:
        assert on_two_ranks(root, "old", 1.0) == [0, 0]
        for number, moment in enumerate(MOMENTS):
            try:
                strike(root, str(number), moment)
                wrong[moment] = ""
            except BaseException as error:
                wrong[moment] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(wrong))


if __name__ == "__main__":
    main()
