"""Train a small transformer with FSDP2 on any number of ranks, with a checkpoint every few steps; kill it, and go on.

    torchrun --nproc-per-node 2 examples/train_fsdp.py --directory run --losses losses.json
    torchrun --nproc-per-node 3 examples/train_fsdp.py --directory run --losses losses.json   # goes on, on three ranks

    python examples/train_fsdp.py --demonstrate   # kills a run by SIGKILL, compares its losses with an unbroken one's

It runs on CPUs with Gloo, or on as many GPUs as there are ranks with NCCL. The batch of a step depends on the step
alone, and each rank takes its part of it, so the losses do not depend on the number of ranks but for the order of sums.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchdirect as td

BATCH = 12  # of all ranks together: 1, 2, 3, 4, 6 or 12 of them
LENGTH = 16
WORDS = 50
WIDTH = 32


class Transformer(torch.nn.Module):
    """Predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        result: torch.Tensor = self.head(hidden)
        return result


def batch_of(step: int, rank: int, ranks: int) -> torch.Tensor:
    """Return this rank's part of a step's batch: every sentence counts up from its first word."""
    first = torch.randint(WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return ((first + torch.arange(LENGTH + 1)) % WORDS)[rank::ranks]


def train(arguments: argparse.Namespace) -> None:
    """Run one rank."""
    kind = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if BATCH % ranks:
        raise SystemExit(f"the batch of {BATCH} cannot be shared by {ranks} ranks")

    torch.manual_seed(0)  # the same model on all ranks, before it is sharded
    mesh = init_device_mesh(kind, (ranks,))
    model = Transformer().to(kind)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses: dict[str, float] = {}
    with td.CheckpointManager(arguments.directory, keep_last=2) as manager:
        state = state_of(model, optimizer, losses)
        found = manager.load_latest(state)
        if found is not None:
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            losses.update(json.loads(state["losses"]))
            if rank == 0:
                print(f"going on from step {found.step} on {ranks} ranks", flush=True)
        for step in range(0 if found is None else found.step + 1, arguments.steps):
            words = batch_of(step, rank, ranks).to(kind)
            predicted = model(words[:, :-1])
            loss = torch.nn.functional.cross_entropy(predicted.flatten(0, 1), words[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach()
            dist.all_reduce(total)
            losses[str(step)] = float(total) / ranks
            if step % arguments.every == arguments.every - 1:
                manager.save(step, state_of(model, optimizer, losses))
            if (rank, step) == (arguments.kill_rank, arguments.kill_step):
                os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        arguments.losses.write_text(json.dumps(losses))
        print(f"done on {ranks} ranks; last loss {losses[str(arguments.steps - 1)]:.4f}", flush=True)
    dist.destroy_process_group()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, losses: dict[str, float]) -> dict[str, Any]:
    """Return everything that a checkpoint holds."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "losses": json.dumps(losses)}


def run(ranks: int, directory: Path, losses: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run this file on some ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    command += ["--directory", str(directory), "--losses", str(losses), *more]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def demonstrate(steps: int, every: int) -> None:
    """Compare an unbroken run with one that is killed, and goes on with another number of ranks."""
    common = ("--steps", str(steps), "--every", str(every))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        whole = run(2, root / "whole", root / "whole.json", *common)
        assert whole.returncode == 0, whole.stderr
        kill_step = random.randrange(2 * every, steps - 1)  # by then a checkpoint is complete
        victim = random.randrange(2)
        kill = ("--kill-rank", str(victim), "--kill-step", str(kill_step))
        broken = run(2, root / "broken", root / "broken.json", *common, *kill)
        assert broken.returncode != 0, "the run survived its death"
        resumed = run(3, root / "broken", root / "broken.json", *common)
        assert resumed.returncode == 0, resumed.stderr
        first = json.loads((root / "whole.json").read_text())
        second = json.loads((root / "broken.json").read_text())
        assert first.keys() == second.keys()
        apart = max(abs(first[step] - second[step]) for step in first)
        print(f"rank {victim} of 2 was killed after step {kill_step}; {resumed.stdout.splitlines()[0]}")
        print(f"{len(first)} losses, at most {apart:.1e} apart; the last {first[str(steps - 1)]:.4f}")
        assert apart < 1e-3, f"the losses are {apart} apart"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--directory", type=Path, default=Path("checkpoints"), help="of the checkpoints")
    parser.add_argument("--losses", type=Path, default=Path("losses.json"), help="file for the loss of each step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--kill-rank", type=int, default=-1, help="rank that dies by SIGKILL …")
    parser.add_argument("--kill-step", type=int, default=-1, help="… after this step")
    parser.add_argument("--demonstrate", action="store_true", help="run, kill, go on, and compare")
    arguments = parser.parse_args()
    if arguments.demonstrate:
        demonstrate(arguments.steps, arguments.every)
    else:
        train(arguments)


if __name__ == "__main__":
    main()
