"""Measure saves and loads against PyTorch and against the machine's own ceilings, all in one run.

Everything that is compared runs interleaved (A B A B …) in this process; ceilings are measured in the same run, and
again around each part, because absolute figures move from hour to hour. "Cold" files are dropped from the page cache
and the residency is proven. Peak host memory is taken in fresh processes.

    python benchmarks/foundation.py --output results.json
    python benchmarks/foundation.py --parts host,small --size-gb 2      # without a GPU
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchdirect as td
from torchdirect import system

GB = 1e9
CHUNK = 8 << 20
PARTS = ("save", "cold", "warm", "many", "small", "host", "memory")

Samples = dict[str, list[float]]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Return wall-clock and CPU seconds of `work`."""
    synchronize()
    cpu, start = cpu_seconds(), time.perf_counter()
    result = work()
    synchronize()
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    del result
    return seconds, cpu


def in_threads(count: int, size: int, body: Callable[[int, int], object]) -> float:
    """Run ``body(thread, offset)`` over chunks of `size` bytes; return seconds."""

    def work(thread: int) -> None:
        for offset in range(thread * CHUNK, size - CHUNK + 1, count * CHUNK):
            body(thread, offset)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def buffers(count: int) -> list[mmap.mmap]:
    made = []
    for _ in range(count):
        buffer = mmap.mmap(-1, CHUNK)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer.write(os.urandom(1 << 20) * (CHUNK >> 20))
        made.append(buffer)
    return made


def raw_write(path: Path, size: int, threads: int) -> float:
    """Seconds to write a new file with O_DIRECT and fdatasync."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        os.posix_fallocate(fd, 0, size)
        made = buffers(threads)
        seconds = in_threads(threads, size, lambda i, offset: os.pwritev(fd, [made[i]], offset))
        start = time.perf_counter()
        os.fdatasync(fd)
        return seconds + time.perf_counter() - start
    finally:
        os.close(fd)


def raw_read(path: Path, threads: int, *, direct: bool) -> float:
    """Seconds to read a file into warm buffers."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        made = buffers(threads)
        return in_threads(threads, path.stat().st_size, lambda i, offset: os.preadv(fd, [made[i]], offset))
    finally:
        os.close(fd)


def pinned_copy(size: int = 1 << 30) -> tuple[float, float]:
    """GB/s of pinned host to GPU, and back."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    rates = []
    for target, source in ((device, host), (host, device)):
        target.copy_(source, non_blocking=True)
        seconds, _ = timed(lambda t=target, s=source: [t.copy_(s, non_blocking=True) for _ in range(8)])  # type: ignore[misc]
        rates.append(8 * size / seconds / GB)
    return rates[0], rates[1]


def cached_share(path: Path) -> float:
    fd = os.open(path, os.O_RDONLY)
    try:
        return system.cached_fraction(fd, path.stat().st_size, windows=256)
    finally:
        os.close(fd)


def make_cold(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if (share := cached_share(path)) > 0.01:
        raise SystemExit(f"{path}: {share:.0%} is still in the page cache; a cold figure would be wrong")


def make_warm(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(CHUNK)
        while file.readinto(buffer):
            pass
    if (share := cached_share(path)) < 0.99:
        raise SystemExit(f"{path}: only {share:.0%} is in the page cache; a warm figure would be wrong")


def torch_save_durable(obj: object, path: Path) -> None:
    torch.save(obj, path)
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.close(fd)


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


def require(ok: bool, what: str) -> None:
    if not ok:
        raise SystemExit(f"WRONG RESULT: {what}")


class Bench:
    """One run: its samples, and the table made of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="torchdirect-bench-", dir=options.directory))
        self.samples: dict[str, Samples] = {}
        self.reports: dict[str, str] = {}
        self.rows: list[tuple[str, str, str]] = []

    def sample(self, part: str, name: str, value: float) -> None:
        self.samples.setdefault(part, {}).setdefault(name, []).append(value)
        print(f"  {part}: {name} = {value:.4g}", flush=True)

    def median(self, part: str, name: str) -> float:
        return statistics.median(self.samples[part][name])

    def spread(self, part: str, name: str) -> str:
        values = self.samples[part][name]
        return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"

    def row(self, what: str, measured: str, goal: str) -> None:
        self.rows.append((what, measured, goal))

    def ratio(self, part: str, a: str, b: str) -> float:
        return self.median(part, a) / self.median(part, b)

    # ------------------------------------------------------------------ the big tensor on the GPU

    def big(self) -> torch.Tensor:
        side = round((self.options.size_gb * GB / 4) ** 0.5)
        return torch.randn(side, side, device="cuda")

    def save(self, tensor: torch.Tensor) -> None:
        size = tensor.nbytes
        ours, theirs, raw = (self.folder / name for name in ("td.pt", "torch.pt", "raw.bin"))
        for i in range(self.options.repeat):
            for threads in (8, 16):
                self.sample("save", f"raw write, {threads} threads, GB/s", size / raw_write(raw, size, threads) / GB)
                raw.unlink()
            for path in (ours, theirs):
                path.unlink(missing_ok=True)
            os.sync()
            seconds, cpu = timed(lambda: td.save(tensor, ours))
            self.sample("save", "torchdirect GB/s", size / seconds / GB)
            self.sample("save", "torchdirect CPU s/GB", cpu / size * GB)
            seconds, cpu = timed(lambda: td.save(tensor, ours, checksum=False))
            self.sample("save", "torchdirect over an old file, checksum=False, GB/s", size / seconds / GB)
            seconds, cpu = timed(lambda: td.save(tensor, ours))
            self.sample("save", "torchdirect over an old file, GB/s", size / seconds / GB)
            if i < self.options.peer_repeat:
                seconds, cpu = timed(lambda: torch_save_durable(tensor, theirs))
                self.sample("save", "torch.save + fsync GB/s", size / seconds / GB)
                theirs.unlink()
        self.reports["save"] = str(td.last_transfer())
        ceiling = max(self.median("save", f"raw write, {n} threads, GB/s") for n in (8, 16))
        mine = self.median("save", "torchdirect GB/s")
        self.row("save, durable, new file, GB/s", self.spread("save", "torchdirect GB/s"), "")
        self.row("  of the O_DIRECT write ceiling", f"{mine / ceiling:.2f} of {ceiling:.3g} GB/s", "0.95")
        self.row(
            "  over torch.save + fsync", f"{self.ratio('save', 'torchdirect GB/s', 'torch.save + fsync GB/s'):.2f}", "3"
        )
        self.row("  CPU s/GB", self.spread("save", "torchdirect CPU s/GB"), "0.08")

    def cold(self, tensor: torch.Tensor) -> None:
        size, path = tensor.nbytes, self.folder / "td.pt"
        td.save(tensor, path)
        for i in range(self.options.repeat):
            for threads in (8, 16):
                make_cold(path)
                self.sample(
                    "cold", f"raw read, {threads} threads, GB/s", size / raw_read(path, threads, direct=True) / GB
                )
            make_cold(path)
            seconds, cpu = timed(lambda: td.load(path))
            self.sample("cold", "torchdirect GB/s", size / seconds / GB)
            self.sample("cold", "torchdirect CPU s/GB", cpu / size * GB)
            self.sample("cold", "cached afterwards", cached_share(path))
            if i < self.options.peer_repeat:
                make_cold(path)
                seconds, _ = timed(lambda: torch.load(path))
                self.sample("cold", "torch.load GB/s", size / seconds / GB)
        make_cold(path)
        require(equal(td.load(path), tensor), "cold load")
        self.reports["cold"] = str(td.last_transfer())
        ceiling = max(self.median("cold", f"raw read, {n} threads, GB/s") for n in (8, 16))
        mine = self.median("cold", "torchdirect GB/s")
        self.row("load cold, GB/s", self.spread("cold", "torchdirect GB/s"), "")
        self.row("  of the O_DIRECT read ceiling", f"{mine / ceiling:.2f} of {ceiling:.3g} GB/s", "0.95")
        self.row("  over torch.load", f"{self.ratio('cold', 'torchdirect GB/s', 'torch.load GB/s'):.2f}", "1.5")
        self.row("  CPU s/GB", self.spread("cold", "torchdirect CPU s/GB"), "0.08")

    def warm(self, tensor: torch.Tensor) -> None:
        size, path = tensor.nbytes, self.folder / "td.pt"
        if not path.exists():
            td.save(tensor, path)
        make_warm(path)
        td.release_staging()
        for i in range(max(5, self.options.repeat)):
            to_gpu, _ = pinned_copy()
            self.sample("warm", "pinned copy to the GPU, GB/s", to_gpu)
            for threads in (8, 12, 16):
                self.sample("warm", f"page cache to warm buffers, {threads} threads, GB/s",
                            size / raw_read(path, threads, direct=False) / GB)  # fmt: skip
            seconds, cpu = timed(lambda: td.load(path))
            name = "torchdirect first call GB/s" if i == 0 else "torchdirect GB/s"
            self.sample("warm", name, size / seconds / GB)
            self.sample("warm", "torchdirect CPU s/GB", cpu / size * GB)
            if i < self.options.peer_repeat:
                seconds, _ = timed(lambda: torch.load(path))
                self.sample("warm", "torch.load GB/s", size / seconds / GB)
                seconds, _ = timed(lambda: torch.load(path, mmap=True))
                self.sample("warm", "torch.load(mmap=True) GB/s", size / seconds / GB)
        require(equal(td.load(path), tensor), "warm load")
        self.reports["warm"] = str(td.last_transfer())
        mine, pinned = self.median("warm", "torchdirect GB/s"), self.median("warm", "pinned copy to the GPU, GB/s")
        cache = max(self.median("warm", f"page cache to warm buffers, {n} threads, GB/s") for n in (8, 12, 16))
        self.row("load warm, GB/s", self.spread("warm", "torchdirect GB/s"), "")
        self.row("  first call, GB/s", self.spread("warm", "torchdirect first call GB/s"), "")
        self.row("  of the pinned-copy ceiling", f"{mine / pinned:.2f} of {pinned:.3g} GB/s", "0.80")
        self.row("  of page cache -> host memory", f"{mine / cache:.2f} of {cache:.3g} GB/s", "")
        self.row("  over torch.load", f"{self.ratio('warm', 'torchdirect GB/s', 'torch.load GB/s'):.1f}", "25")
        self.row("  over torch.load(mmap=True)",
                 f"{self.ratio('warm', 'torchdirect GB/s', 'torch.load(mmap=True) GB/s'):.1f}", "5")  # fmt: skip

    # ------------------------------------------------------------------ many small tensors, small files, host memory

    def many(self) -> None:
        device = self.options.device
        state = {f"layers.{i}.weight": torch.randn(4096, device=device) for i in range(20_000)}
        ours, theirs = self.folder / "many.td.pt", self.folder / "many.torch.pt"
        td.save(state, ours, durable=False)
        torch.save(state, theirs)
        for _ in range(max(3, self.options.repeat)):
            for name, work in (
                ("torchdirect save s", lambda: td.save(state, ours, durable=False)),
                ("torch.save s", lambda: torch.save(state, theirs)),
            ):
                self.sample("many", name, timed(work)[0])
            make_warm(ours)
            make_warm(theirs)
            self.sample("many", "torchdirect load s", timed(lambda: td.load(ours))[0])
            self.sample("many", "torch.load s", timed(lambda: torch.load(theirs))[0])
        require(equal(td.load(ours), state), "many small tensors")
        require(equal(torch.load(ours), state), "many small tensors, read by torch")
        self.row(
            "20,000 tensors of 16 KiB: load over torch.load",
            f"{self.ratio('many', 'torch.load s', 'torchdirect load s'):.2f}",
            "3",
        )
        self.row("  save over torch.save", f"{self.ratio('many', 'torch.save s', 'torchdirect save s'):.2f}", "2")

    def small(self) -> None:
        state = {f"layers.{i}.weight": torch.randn(256) for i in range(10)}
        ours, theirs = self.folder / "small.td.pt", self.folder / "small.torch.pt"
        for _ in range(300):
            self.sample_quietly("small", "torchdirect save s", lambda: td.save(state, ours, durable=False))
            self.sample_quietly("small", "torch.save s", lambda: torch.save(state, theirs))
            self.sample_quietly("small", "torchdirect load s", lambda: td.load(ours))
            self.sample_quietly("small", "torch.load s", lambda: torch.load(theirs))
        require(equal(td.load(ours), state), "small state dict")
        self.row(
            "10 KB state dict: save, times torch's time",
            f"{self.ratio('small', 'torchdirect save s', 'torch.save s'):.2f}",
            "at most 1.5",
        )
        self.row("  load", f"{self.ratio('small', 'torchdirect load s', 'torch.load s'):.2f}", "at most 1.5")

    def sample_quietly(self, part: str, name: str, work: Callable[[], Any]) -> None:
        self.samples.setdefault(part, {}).setdefault(name, []).append(timed(work)[0])

    def host(self) -> None:
        size_gb = min(2.0, self.options.size_gb)
        tensors = round(size_gb * GB / (4 * 4096 * 4096)) or 1
        state = {f"layers.{i}.weight": torch.randn(4096, 4096) for i in range(tensors)}
        size = tensors * 4 * 4096 * 4096
        ours, theirs, raw = self.folder / "host.td.pt", self.folder / "host.torch.pt", self.folder / "raw.bin"
        for _ in range(max(3, self.options.repeat)):
            for path in (ours, theirs):
                path.unlink(missing_ok=True)
            os.sync()
            self.sample("host", "raw write GB/s", size / raw_write(raw, size, 8) / GB)
            raw.unlink()
            seconds, cpu = timed(lambda: td.save(state, ours))
            self.sample("host", "torchdirect save GB/s", size / seconds / GB)
            self.sample("host", "torchdirect save CPU s/GB", cpu / size * GB)
            self.sample(
                "host", "torch.save + fsync GB/s", size / timed(lambda: torch_save_durable(state, theirs))[0] / GB
            )
            make_warm(ours)
            make_warm(theirs)
            for _ in range(3):
                # Alternating: the first load after much memory was freed pays for getting it back from the host.
                self.sample("host", "torch.load warm GB/s", size / timed(lambda: torch.load(theirs))[0] / GB)
                self.sample("host", "torchdirect load warm GB/s", size / timed(lambda: td.load(ours))[0] / GB)
            make_cold(ours)
            make_cold(theirs)
            self.sample("host", "torchdirect load cold GB/s", size / timed(lambda: td.load(ours))[0] / GB)
            self.sample("host", "torch.load cold GB/s", size / timed(lambda: torch.load(theirs))[0] / GB)
        require(equal(td.load(ours), state), "host state dict")
        self.row(
            f"{size / GB:.2g} GB in host memory: load warm over torch.load",
            f"{self.ratio('host', 'torchdirect load warm GB/s', 'torch.load warm GB/s'):.2f}",
            "1.5",
        )
        self.row("  load warm, GB/s", self.spread("host", "torchdirect load warm GB/s"), "")
        self.row(
            "  save, durable, over torch.save + fsync",
            f"{self.ratio('host', 'torchdirect save GB/s', 'torch.save + fsync GB/s'):.2f}",
            "1.5",
        )
        self.row(
            "  save, durable, GB/s",
            self.spread("host", "torchdirect save GB/s"),
            f"raw {self.spread('host', 'raw write GB/s')}",
        )

    def memory(self, tensor: torch.Tensor) -> None:
        path = self.folder / "td.pt"
        if not path.exists():
            td.save(tensor, path)
        for what in ("save", "cold", "warm"):
            if what != "save":
                (make_cold if what == "cold" else make_warm)(path)
            command = [
                sys.executable,
                __file__,
                "--probe",
                what,
                "--probe-file",
                str(path),
                "--size-gb",
                str(self.options.size_gb),
            ]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            self.sample("memory", f"{what}, MiB over the idle process", float(output.split()[-1]))
        peak = max(self.samples["memory"][f"{w}, MiB over the idle process"][0] for w in ("save", "cold", "warm"))
        self.row("extra host memory, MiB (worst of save, cold, warm)", f"{peak:.0f}", "at most 512")

    # ------------------------------------------------------------------ the run

    def run(self) -> None:
        parts = self.options.parts.split(",")
        if unknown := set(parts) - set(PARTS):
            raise SystemExit(f"unknown parts {sorted(unknown)}; the parts are {', '.join(PARTS)}")
        big = {"save", "cold", "warm", "memory"}.intersection(parts)
        if big and not torch.cuda.is_available():
            self.row(f"{', '.join(sorted(big))}: not run", "no CUDA device here", "")
            parts = [p for p in parts if p not in big]
        tensor = self.big() if torch.cuda.is_available() and big else None
        for part in PARTS:
            if part in parts:
                print(f"{part}:", flush=True)
                method = getattr(self, part)
                if part in big:
                    method(tensor)
                else:
                    method()

    def result(self) -> dict[str, Any]:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        return {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": {
                "gpu": gpu,
                "cpus": os.cpu_count(),
                "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                "kernel": platform.release(),
                "file_system": system.file_system(self.folder).type,
                "direct_io": str(system.direct_io(self.folder)),
            },
            "versions": {
                "torchdirect": td.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "cuda": torch.version.cuda,
            },
            "options": {k: v for k, v in vars(self.options).items() if k not in ("directory", "output")},
            "table": self.rows,
            "reports": self.reports,
            "samples": self.samples,
        }


def probe(what: str, path: str, size_gb: float) -> None:
    """Print by how many MiB the peak of host memory exceeds that of the idle process with CUDA started."""

    def status(field: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
        return 0

    side = round((size_gb * GB / 4) ** 0.5)
    tensor = torch.randn(side, side, device="cuda") if what == "save" else torch.zeros(1, device="cuda")
    torch.zeros(1, pin_memory=True)
    synchronize()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    idle = status("VmRSS")
    if what == "save":
        td.save(tensor, path + ".probe")
        os.unlink(path + ".probe")
    else:
        td.load(path)
    synchronize()
    print((status("VmHWM") - idle) / (1 << 20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all of " + ",".join(PARTS))
    parser.add_argument("--size-gb", type=float, default=10.0, help="the big tensor, in GB (default 10)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer-repeat", type=int, default=2, help="runs of the slow peers")
    parser.add_argument("--directory", default=".", help="where the files go")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="for many small tensors"
    )
    parser.add_argument("--output", help="JSON file for every sample")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--probe-file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        probe(options.probe, options.probe_file, options.size_gb)
        return
    need = 3 * options.size_gb * GB
    if shutil.disk_usage(options.directory).free < need:
        raise SystemExit(f"{options.directory}: needs {need / GB:.0f} GB of free space; use --directory or --size-gb")
    del options.probe, options.probe_file
    bench = Bench(options)
    try:
        bench.run()
        result = bench.result()
    finally:
        shutil.rmtree(bench.folder)
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    width = max(len(row[0]) for row in bench.rows)
    print()
    for what, measured, goal in bench.rows:
        print(f"{what:<{width}}  {measured:<28}  {goal}")


if __name__ == "__main__":
    main()
