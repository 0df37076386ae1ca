"""Save and load for a long time, with several threads, and watch that nothing grows.

Every thread saves random objects, over old files and new ones, loads its own and the others' files in every way, and
compares values. Memory, descriptors, threads, staging bytes and temporary files are sampled; the run fails if a value
is wrong, or if one of them has grown between the first and the last quarter of the samples.

    python benchmarks/soak.py --minutes 30 --output soak.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import torchdirect as td
from torchdirect import memory

ALLOWED_GROWTH_MIB = 64
NAMES = 6


def make_state(generator: random.Random, stamp: int) -> dict[str, torch.Tensor]:
    """Return tensors whose values all tell the same stamp, so that a mixture of two files shows."""
    return {
        f"t{i}": torch.full((generator.choice((1, 100, 5000, 300_000)),), float(stamp))
        for i in range(generator.randint(1, 12))
    }


def check(state: dict[str, torch.Tensor], path: Path) -> None:
    stamps = {float(value) for tensor in state.values() for value in (tensor[0], tensor[-1])}
    if len(stamps) != 1:
        raise AssertionError(f"{path} is a mixture of saves: {sorted(stamps)}")


class Soak:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.stop = threading.Event()
        self.errors: list[str] = []
        self.counts = {"save": 0, "load": 0}
        self.lock = threading.Lock()
        self.saved = 0

    def count(self, what: str) -> int:
        with self.lock:
            self.counts[what] += 1
            return self.counts[what]

    def work(self, number: int) -> None:
        generator = random.Random(self.seed * 1000 + number)
        try:
            while not self.stop.is_set():
                suffix = generator.choice((".pt", ".safetensors"))
                path = self.folder / f"shared{generator.randrange(NAMES)}{suffix}"
                if generator.random() < 0.4:
                    kinds = ("AUTO", "CPU_ONLY", "CPU_CACHED_GPU")
                    options: dict[str, Any] = {
                        "transfer_type": generator.choice(kinds),
                        "durable": generator.random() < 0.2,
                        "chunk_bytes": generator.choice((None, 65536)),
                    }
                    td.save(make_state(generator, self.count("save")), path, **options)
                    continue
                try:
                    self.load(path, generator)
                    self.count("load")
                except FileNotFoundError:
                    pass
        except BaseException as exc:
            self.errors.append(f"{type(exc).__name__}: {exc}")
            self.stop.set()

    def load(self, path: Path, generator: random.Random) -> None:
        how = generator.randrange(4)
        if how == 0:
            state = td.load(path)
        elif how == 1:
            state = td.load(path, transfer_type="CPU_CACHED_GPU", chunk_bytes=65536)
        elif how == 2:
            with td.open(path) as file:
                state = file.load()
        else:
            with td.open(path) as file:
                infos = [file.info(name) for name in file]
            target = {info.name: torch.zeros(info.shape, dtype=info.dtype) for info in infos}
            try:
                td.load_into(target, path)
            except RuntimeError as exc:  # the file was replaced by one of other shapes in between
                if "loading state_dict" not in str(exc):
                    raise
                return
            state = target
        check(state, path)


def sample(folder: Path) -> dict[str, float]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024
    temporary = [name for name in os.listdir(folder) if not name.startswith("shared")]
    return {
        "rss_mib": rss,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "staging_mib": memory.staging_pool.nbytes / 2**20,
        "temporary_files": len(temporary),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        soak = Soak(Path(name), options.seed)
        workers = [threading.Thread(target=soak.work, args=(i,)) for i in range(options.threads)]
        for worker in workers:
            worker.start()
        samples: list[dict[str, float]] = []
        end = time.monotonic() + options.minutes * 60
        pause = max(0.5, options.minutes * 60 / 100)
        while time.monotonic() < end and not soak.stop.wait(pause):
            samples.append(sample(Path(name)))
        soak.stop.set()
        for worker in workers:
            worker.join()
        last = sample(Path(name))
    if soak.errors:
        raise SystemExit(f"WRONG RESULT after {soak.counts}: {soak.errors[0]}")
    quarter = max(1, len(samples) // 4)
    growth = {
        key: statistics.median(s[key] for s in samples[-quarter:])
        - statistics.median(s[key] for s in samples[:quarter])
        for key in samples[0]
    }
    result = {
        "command": f"soak.py --minutes {options.minutes} --threads {options.threads} --seed {options.seed}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__},
        "counts": soak.counts,
        "growth from first to last quarter": growth,
        "at the end, workers gone": last,
        "samples": samples,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "samples"}, indent=1))
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    if (
        growth["rss_mib"] > ALLOWED_GROWTH_MIB
        or growth["descriptors"] > 16
        or last["temporary_files"]
        or last["threads"] > 1
    ):
        raise SystemExit("something grows or was left behind; see above")


if __name__ == "__main__":
    main()
