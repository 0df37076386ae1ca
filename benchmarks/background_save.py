"""Measure what a save in the background costs the program: how long it stops, and how much slower it runs meanwhile.

The stall of `td.save_async` (from the call until the copies have arrived) is set against the time that copying the same
bytes to pinned memory takes in the same run. Steps of a training-like loop are timed undisturbed and during the save,
in turns. PyTorch's own `torch.distributed.checkpoint.async_save`, with pinned memory that it keeps, does the same work.
The file is compared bit for bit with what the tensors held when the call was made; they change right behind it.

    python benchmarks/background_save.py --gb 16 --rounds 5 --output results.json
    python benchmarks/background_save.py --gb 0.5 --rounds 3      # without a GPU: against copies in host memory
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

import foundation
import torchdirect as td
from foundation import GB, require, synchronize
from torchdirect.pending import writer

LARGE, SMALL = 64 << 20, 16 << 10
"""Bytes of the tensors of one pair."""

MOVED = 8 << 30
"""Bytes that are copied for the ceiling."""

UNDISTURBED, DURING = "step undisturbed, ms", "step during {}, ms"


class Training:
    """Steps of some milliseconds: matrix products, and many small operations as an optimizer has them."""

    def __init__(self, device: str) -> None:
        on_gpu = device == "cuda"
        side = 8192 if on_gpu else 256
        self.products = 8 if on_gpu else 2
        self.a = torch.randn(side, side, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
        self.b = torch.randn_like(self.a)
        self.out = torch.empty_like(self.a)
        self.small = [torch.ones(256, device=device) for _ in range(100)]

    def step(self) -> float:
        """Do one step, as far as the value of a loss; return seconds."""
        start = time.perf_counter()
        for _ in range(self.products):
            torch.mm(self.a, self.b, out=self.out)
        for tensor in self.small:
            tensor.mul_(0.999)
        float(self.small[0][0] + self.out[0, 0])
        return time.perf_counter() - start

    def steps_until(self, ended: Callable[[], bool]) -> list[float]:
        """Do steps until something has ended; return the seconds of each."""
        seconds = [self.step()]
        while not ended():
            seconds.append(self.step())
        return seconds


class Background(foundation.Bench):
    """One run of this benchmark."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        pairs = max(1, round(options.gb * GB / (LARGE + SMALL)))
        large = LARGE if pairs > 1 else int(options.gb * GB)
        self.state = {}
        for i in range(pairs):
            for name, nbytes in (("weight", large), ("norm", SMALL)):
                values = torch.randint(1 << 30, (nbytes // 4,), dtype=torch.int32, device=self.device)
                self.state[f"layers.{i}.{name}"] = values
        self.nbytes = sum(t.nbytes for t in self.state.values())
        self.training = Training(self.device)
        self.path, self.peer_path = self.folder / "td.pt", self.folder / "peer"
        on_gpu = self.device == "cuda"
        self.peer_writer = FileSystemWriter(self.peer_path, cache_staged_state_dict=on_gpu, overwrite=True)

    def ceiling(self) -> float:
        """Return GB/s of copies from the tensors' memory to host memory that is ready for them."""
        if self.device == "cuda":
            return foundation.pinned_copy()[1]
        size = min(self.nbytes, 1 << 28)
        source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        times = max(1, min(MOVED, 4 * self.nbytes) // size)
        start = time.perf_counter()
        for _ in range(times):
            target.copy_(source)
        return times * size / (time.perf_counter() - start) / GB

    def change(self) -> None:
        """Change every tensor, by kernels queued on the current stream."""
        torch._foreach_add_(list(self.state.values()), 1)

    def undisturbed(self) -> None:
        end = time.perf_counter() + self.options.seconds
        self.steps("steps", UNDISTURBED, self.training.steps_until(lambda: time.perf_counter() >= end))

    def steps(self, part: str, name: str, seconds: list[float]) -> None:
        self.samples.setdefault(part, {}).setdefault(name, []).extend(1e3 * s for s in seconds)
        print(f"  {part}: {name} = {1e3 * statistics.median(seconds):.4g} ({len(seconds)} steps)", flush=True)

    def ours(self, staging: str, *, first: bool = False) -> None:
        """Save once; the first time memory is pinned, which is counted apart."""
        synchronize()
        start = time.perf_counter()
        pending = td.save_async(self.state, self.path, staging=staging)
        returned = time.perf_counter()
        synchronize()
        arrived = time.perf_counter()
        self.change()
        name = f"save_async, staging={staging!r}"
        self.sample("stall", f"{name}{', first call' if first else ''}, s", arrived - start)
        self.sample("stall", f"{name}{', first call' if first else ''}, until the call returns, s", returned - start)
        seconds = self.training.steps_until(pending.done)
        report = pending.result()
        if first:
            return
        self.steps("steps", DURING.format(name), seconds)
        self.sample("save", f"{name}, GB/s", self.nbytes / (time.perf_counter() - start) / GB)
        self.reports[name] = str(report)

    def peer(self, *, first: bool = False) -> None:
        synchronize()
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            pending: Any = async_save(self.state, storage_writer=self.peer_writer)
        returned = time.perf_counter()
        synchronize()
        arrived = time.perf_counter()
        self.change()
        name = "torch async_save"
        self.sample("stall", f"{name}{', first call' if first else ''}, s", arrived - start)
        self.sample("stall", f"{name}{', first call' if first else ''}, until the call returns, s", returned - start)
        seconds = self.training.steps_until(pending.done)
        pending.result()
        if not first:
            self.steps("steps", DURING.format(name), seconds)
            self.sample("save", f"{name}, GB/s", self.nbytes / (time.perf_counter() - start) / GB)
        shutil.rmtree(self.peer_path)

    def check(self, staging: str) -> None:
        """Compare the file with what the tensors held before they were changed, once, behind the last call."""
        for pending in writer.pending():
            pending.result()
        loaded = td.load(self.path, map_location="cpu", verify=True)
        for name, tensor in self.state.items():
            require(torch.equal(loaded[name] + 1, tensor.cpu()), f"{name}, staging={staging!r}")

    def run(self) -> None:
        stagings = ["host", "device"] if self.device == "cuda" and not self.options.host_only else ["host"]
        for _ in range(20):
            self.training.step()
        print("first calls:", flush=True)
        for staging in stagings:
            self.ours(staging, first=True)
            self.check(staging)
        if self.options.peer_rounds:
            self.peer(first=True)
        for i in range(self.options.rounds):
            print(f"round {i + 1}:", flush=True)
            self.sample("ceiling", "copy to host memory, GB/s", self.ceiling())
            for staging in stagings:
                self.undisturbed()
                self.ours(staging)
            if i < self.options.peer_rounds:
                self.undisturbed()
                self.peer()
        for staging in stagings:
            td.save_async(self.state, self.path, staging=staging)
            self.change()
            self.check(staging)
        self.rows_of(stagings)

    def rows_of(self, stagings: list[str]) -> None:
        rate = self.median("ceiling", "copy to host memory, GB/s")
        at_best = self.nbytes / rate / GB
        self.row("bytes", f"{self.nbytes / GB:.3g} GB", "")
        self.row("copy to host memory, GB/s", self.spread("ceiling", "copy to host memory, GB/s"), "")
        names = [f"save_async, staging={staging!r}" for staging in stagings]
        for name in [*names, *(["torch async_save"] if self.options.peer_rounds else [])]:
            stall = self.median("stall", f"{name}, s")
            goal = "at most 1.15" if name == names[0] else ""
            self.row(f"{name}: stall, s", self.spread("stall", f"{name}, s"), "")
            self.row("  over the copy's time at the ceiling", f"{stall / at_best:.2f}", goal)
            self.row("  first call, s", self.spread("stall", f"{name}, first call, s"), "")
            during, alone = self.samples["steps"][DURING.format(name)], self.samples["steps"][UNDISTURBED]
            ours = "at most 1.05" if name in names else ""
            self.row(
                "  step during it over undisturbed, medians",
                f"{statistics.median(during) / statistics.median(alone):.3f}",
                ours,
            )
            self.row("  means", f"{statistics.mean(during) / statistics.mean(alone):.3f}", "")
            self.row("  whole save, GB/s", self.spread("save", f"{name}, GB/s"), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=16.0, help="bytes of the tensors, in GB (default 16)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-rounds", type=int, default=2, help="rounds in which PyTorch's own is measured too")
    parser.add_argument("--seconds", type=float, default=2.0, help="of undisturbed steps before each save")
    parser.add_argument("--host-only", action="store_true", help="leave out staging in GPU memory")
    parser.add_argument("--directory", default=".", help="where the files go")
    parser.add_argument("--output", help="JSON file for every sample")
    options = parser.parse_args()
    need = 2 * options.gb * GB
    if shutil.disk_usage(options.directory).free < need:
        raise SystemExit(f"{options.directory}: needs {need / GB:.0f} GB of free space; use --directory or --gb")
    bench = Background(options)
    try:
        bench.run()
        result = bench.result()
    finally:
        shutil.rmtree(bench.folder)
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + os.linesep)
    width = max(len(row[0]) for row in bench.rows)
    print()
    for what, measured, goal in bench.rows:
        print(f"{what:<{width}}  {measured:<28}  {goal}")


if __name__ == "__main__":
    main()
