"""Measure safetensors files: whole loads against the library and raw ceilings, lazy reads, loads into a model.

Everything that is compared runs interleaved, in this process, on the same file; "cold" is proven.

    python benchmarks/safetensors_files.py --directory /mnt/nvme --output results.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import torch as theirs

import foundation
import torchdirect as td

GB = 1e9
TENSORS = 291  # as many as a Llama 8B state dict has


def state_dict(size_gb: float, device: str) -> dict[str, torch.Tensor]:
    rows = max(1, round(size_gb * GB / 2 / TENSORS / 4096))
    return {f"model.layers.{i:03d}.weight": torch.randn(rows, 4096, device=device).bfloat16() for i in range(TENSORS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=".")
    parser.add_argument("--size-gb", type=float, default=16.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if shutil.disk_usage(options.directory).free < 1.2 * options.size_gb * GB:
        raise SystemExit(f"{options.directory}: needs {1.2 * options.size_gb:.0f} GB; use --directory or --size-gb")
    folder = Path(tempfile.mkdtemp(prefix="torchdirect-bench-", dir=options.directory))
    samples: dict[str, list[float]] = {}

    def sample(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)
        print(f"  {name}: {value:.4g}", flush=True)

    def timed(name: str, size: int, work: Callable[[], object]) -> None:
        seconds, _ = foundation.timed(work)
        sample(f"{name}, GB/s", size / seconds / GB)

    try:
        path = folder / "model.safetensors"
        state = state_dict(options.size_gb, device)
        size = sum(t.nbytes for t in state.values())
        timed("save, durable", size, lambda: td.safetensors.save_file(state, path))
        first = next(iter(state))
        for i in range(options.repeat):
            foundation.make_warm(path)
            timed("load warm", size, lambda: td.safetensors.load_file(path, device=device))
            timed("load warm, safetensors", size, lambda: theirs.load_file(path, device=device))
            timed("raw page cache, 12 threads", size, lambda: foundation.raw_read(path, 12, direct=False))
            start = time.perf_counter()
            with td.open(path, device=device) as file:
                file[first]
            sample(
                f"lazy read of one tensor of {state[first].nbytes / 2**20:.0f} MiB, ms",
                (time.perf_counter() - start) * 1e3,
            )
            if i:
                continue
            foundation.make_cold(path)
            timed("load cold", size, lambda: td.safetensors.load_file(path, device=device))
            foundation.make_cold(path)
            timed("raw O_DIRECT reads", size, lambda: foundation.raw_read(path, 8, direct=True))
            foundation.make_cold(path)
            timed("load cold, safetensors", size, lambda: theirs.load_file(path, device=device))
        loaded = td.safetensors.load_file(path, device=device)
        foundation.require(all(torch.equal(loaded[k], state[k]) for k in state), "what was loaded differs")
        del loaded
        target = {k: torch.zeros_like(t) for k, t in state.items()}
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        foundation.make_warm(path)
        timed("load_into warm", size, lambda: td.load_into(target, path))
        if device == "cuda":
            sample(
                "load_into, peak GPU memory over the model, MiB", (torch.cuda.max_memory_allocated() - before) / 2**20
            )
        foundation.require(all(torch.equal(target[k], state[k]) for k in state), "what was loaded in place differs")
        script = (
            "import sys, time, torchdirect.tensor_file as f;"
            "f.TensorFile(sys.argv[1]).close(); start = time.perf_counter();"
            "f.TensorFile(sys.argv[1]).close(); print((time.perf_counter() - start) * 1e3)"
        )
        done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
        sample("index of the file, ms", float(done.stdout))
        result: dict[str, Any] = {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": {
                "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
                "cpus": os.cpu_count(),
                "kernel": platform.release(),
            },
            "versions": {
                "torchdirect": td.__version__, "torch": torch.__version__, "python": platform.python_version(),
                "safetensors": safetensors.__version__,
            },
            "bytes": size,
            "samples": samples,
        }  # fmt: skip
        if device == "cuda":
            result["pinned copy, GB/s"] = foundation.pinned_copy()
            print("pinned copy", result["pinned copy, GB/s"])
    finally:
        shutil.rmtree(folder)
    print()
    for name, values in samples.items():
        print(f"{name:<50} {statistics.median(values):10.4g}  ({min(values):.4g} to {max(values):.4g})")
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
