"""Measure distributed checkpoints: torchdirect's writer and reader against PyTorch's, and against raw ceilings.

Everything that is compared runs interleaved (A B A B …) on the same tensors; ceilings are measured in the same run;
"cold" files are dropped from the page cache and the residency is proven; what was loaded is compared bit by bit.

    python benchmarks/distributed.py --directory /mnt/nvme --gb 16 --rounds 3 --output results.json
    torchrun --nproc-per-node 4 benchmarks/distributed.py --directory /mnt/nvme --gb 16 --output results.json

Under torchrun each rank holds its share of every tensor, on its own GPU if there are any. Rates are those of all ranks
together: from the moment when all begin to that when the last has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import foundation
import torchdirect as td
from torchdirect import system

GB = foundation.GB
stock: Any = torch.distributed.checkpoint
THREADS = (8, 16)


class Ranks:
    """The processes of the run: one, or those that torchrun has started."""

    def __init__(self) -> None:
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        cuda = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        self.mesh: DeviceMesh | None = None
        if self.count > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
            self.mesh = DeviceMesh(self.device.type, list(range(self.count)))
            self.host = dist.new_group(backend="gloo")

    def together(self) -> None:
        """Wait until all ranks, and the work that they have queued, are here."""
        foundation.synchronize()
        if self.count > 1:
            dist.barrier(group=self.host)

    def share(self, value: Any) -> Any:
        """Return the value of the first rank."""
        values = [value]
        if self.count > 1:
            dist.broadcast_object_list(values, group=self.host)
        return values[0]

    def timed(self, work: Callable[[], object]) -> float:
        """Return the seconds until the last rank has done its work."""
        self.together()
        start = time.perf_counter()
        work()
        self.together()
        return time.perf_counter() - start

    def alone(self, work: Callable[[], float]) -> float:
        """Let the first rank work while the others wait; return its result."""
        self.together()
        return float(self.share(work() if self.rank == 0 else None))


def states(ranks: Ranks, gb: float, count: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return a state of random tensors, one of zeros to load into, and the bytes of all ranks together."""
    rows = max(1, round(gb * GB / 2 / count / 4096 / ranks.count))
    state: dict[str, Any] = {}
    target: dict[str, Any] = {}
    for i in range(count):
        local = torch.randn(rows, 4096, device=ranks.device).bfloat16()
        zeros = torch.zeros_like(local)
        name = f"layers.{i:03d}.weight"
        state[name] = local if ranks.mesh is None else DTensor.from_local(local, ranks.mesh, [Shard(0)])
        target[name] = zeros if ranks.mesh is None else DTensor.from_local(zeros, ranks.mesh, [Shard(0)])
    return state, target, count * rows * ranks.count * 4096 * 2


def local_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value.to_local() if isinstance(value, DTensor) else value for value in state.values()]


class Bench:
    """One run and its samples."""

    def __init__(self, ranks: Ranks, options: argparse.Namespace, folder: Path) -> None:
        self.ranks, self.options, self.folder = ranks, options, folder
        self.samples: dict[str, list[float]] = {}
        self.reports: dict[str, str] = {}
        self.state, self.target, self.size = states(ranks, options.gb, options.tensors)

    def sample(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)
        if self.ranks.rank == 0:
            print(f"  {name}: {value:.4g}", flush=True)

    def rate(self, name: str, seconds: float) -> None:
        self.sample(f"{name}, GB/s", self.size / seconds / GB)

    def remove(self, name: str) -> None:
        self.ranks.together()
        if self.ranks.rank == 0:
            shutil.rmtree(self.folder / name, ignore_errors=True)
            os.sync()
        self.ranks.together()

    def prepare(self, name: str, make: Callable[[Path], None]) -> None:
        """Drop the files of a checkpoint from the page cache, or bring them there."""
        self.ranks.together()
        if self.ranks.rank == 0:
            for path in (self.folder / name).glob("*.distcp"):
                make(path)
        self.ranks.together()

    def saves(self) -> None:
        writers: dict[str, Callable[[], Any]] = {
            "torchdirect": lambda: td.dcp.save(self.state, self.folder / "torchdirect"),
            "PyTorch": lambda: stock.save(self.state, storage_writer=stock.FileSystemWriter(self.folder / "PyTorch")),
        }
        for _ in range(self.options.rounds):
            for threads in THREADS:
                self.write_raw(threads)
            for name, save in writers.items():
                self.remove(name)
                self.rate(f"save, durable, {name}", self.ranks.timed(save))
                self.reports.setdefault(f"save, {name}", str(td.last_transfer()))
        self.rate("save, durable, over an old one, torchdirect", self.ranks.timed(writers["torchdirect"]))

    def write_raw(self, threads: int) -> None:
        path = self.folder / "raw.bin"
        seconds = self.ranks.alone(lambda: foundation.raw_write(path, self.size, threads))
        self.rate(f"raw O_DIRECT write, {threads} threads", seconds)
        if self.ranks.rank == 0:
            path.unlink()

    def load(self, name: str, label: str) -> None:
        for tensor in local_tensors(self.target):
            tensor.zero_()
        path = self.folder / name
        if name == "torchdirect":
            seconds = self.ranks.timed(lambda: td.dcp.load(self.target, path))
        else:
            seconds = self.ranks.timed(lambda: stock.load(self.target, checkpoint_id=path))
        self.rate(f"load {label}, {name}", seconds)
        self.reports[f"load {label}, {name}"] = str(td.last_transfer())
        pairs = zip(local_tensors(self.state), local_tensors(self.target), strict=True)
        same = all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
        foundation.require(same, f"what {name} loaded {label} differs")

    def read_raw(self, label: str, threads: int, *, direct: bool) -> None:
        paths = sorted((self.folder / "torchdirect").glob("*.distcp"))
        self.rate(
            f"{label}, {threads} threads",
            self.ranks.alone(lambda: sum(foundation.raw_read(path, threads, direct=direct) for path in paths)),
        )

    def loads(self) -> None:
        td.release_staging()
        for _ in range(self.options.rounds):
            for threads in THREADS:
                self.prepare("torchdirect", foundation.make_cold)
                self.read_raw("raw O_DIRECT read", threads, direct=True)
            for name in ("torchdirect", "PyTorch"):
                self.prepare(name, foundation.make_cold)
                self.load(name, "cold")
        for name in ("torchdirect", "PyTorch"):
            self.prepare(name, foundation.make_warm)
        for _ in range(self.options.rounds):
            for threads in THREADS:
                self.read_raw("page cache to warm buffers", threads, direct=False)
            for name in ("torchdirect", "PyTorch"):
                self.load(name, "warm")

    def crosswise(self) -> None:
        """Prove that each reads what the other wrote."""
        for name, load in (
            ("PyTorch", lambda path: td.dcp.load(self.target, path)),
            ("torchdirect", lambda path: stock.load(self.target, checkpoint_id=path)),
        ):
            for tensor in local_tensors(self.target):
                tensor.zero_()
            load(self.folder / name)
            pairs = zip(local_tensors(self.state), local_tensors(self.target), strict=True)
            foundation.require(all(torch.equal(a, b) for a, b in pairs), f"reading what {name} wrote")

    def table(self) -> list[tuple[str, str]]:
        """Return medians with their spread, and ratios to the ceilings and to PyTorch."""

        def median(name: str) -> float:
            return statistics.median(self.samples[f"{name}, GB/s"])

        rows = [
            (name, f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})")
            for name, values in self.samples.items()
        ]
        write, read, cache = (
            max(median(f"{what}, {threads} threads") for threads in THREADS)
            for what in ("raw O_DIRECT write", "raw O_DIRECT read", "page cache to warm buffers")
        )
        for what, ceiling in (("save, durable", write), ("load cold", read), ("load warm", cache)):
            mine, theirs = median(f"{what}, torchdirect"), median(f"{what}, PyTorch")
            rows.append((f"{what}: of the ceiling", f"{mine / ceiling:.2f} of {ceiling:.3g} GB/s"))
            rows.append((f"{what}: over PyTorch", f"{mine / theirs:.2f}"))
        return rows


def result(bench: Bench, pinned: tuple[float, float] | None) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "ranks": bench.ranks.count,
        "machine": {
            "gpu": torch.cuda.get_device_name() if cuda else None,
            "cpus": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release(),
            "file_system": system.file_system(bench.folder).type,
            "direct_io": str(system.direct_io(bench.folder)),
        },
        "versions": {
            "torchdirect": td.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "bytes": bench.size,
        "tensors": bench.options.tensors,
        "pinned copy to and from the GPU, GB/s": pinned,
        "table": bench.table(),
        "reports": bench.reports,
        "samples": bench.samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=".", help="where the checkpoints go; all ranks must see it")
    parser.add_argument("--gb", type=float, default=16.0, help="of all ranks together, in GB (default 16)")
    parser.add_argument("--tensors", type=int, default=291, help="how many (default: as a Llama of 8B has)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", help="JSON file for every sample")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    ranks = Ranks()
    need = 3 * options.gb * GB
    if shutil.disk_usage(options.directory).free < need:
        raise SystemExit(f"{options.directory}: needs {need / GB:.0f} GB of free space; use --directory or --gb")
    folder = ranks.share(
        tempfile.mkdtemp(prefix="torchdirect-bench-", dir=options.directory) if ranks.rank == 0 else None
    )
    bench = Bench(ranks, options, Path(folder))
    try:
        bench.saves()
        bench.loads()
        bench.crosswise()
        pinned = foundation.pinned_copy() if torch.cuda.is_available() and ranks.rank == 0 else None
        if ranks.rank == 0:
            found = result(bench, pinned)
            width = max(len(row[0]) for row in found["table"])
            print()
            for what, measured in found["table"]:
                print(f"{what:<{width}}  {measured}")
            if options.output:
                Path(options.output).write_text(json.dumps(found, indent=1) + "\n")
        ranks.together()
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if ranks.count > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
