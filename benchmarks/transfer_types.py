"""Measure every transfer type on one file system, against raw disk ceilings and bare cuFile calls, in one run.

One GPU tensor is saved (durable, into a new file) and loaded (cold page cache, proven) through each type in turn, the
types interleaved. What cuFile's types show is marked *direct* only where the bytes really moved by DMA between storage
and GPU; otherwise they ran in cuFile's compatibility mode, which is not GPUDirect Storage.

    python benchmarks/transfer_types.py --directory /mnt/nvme --output results.json
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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import foundation
import torchdirect as td
from torchdirect import cufile, system
from torchdirect.gds_status import gds_status

GB = 1e9
CHUNK = 8 << 20
THREADS = 8
ROWS = {t.name: (t, "cufile") for t in td.TransferType if t not in (td.TransferType.AUTO, td.TransferType.CPU_ONLY)}
ROWS["GDS by KvikIO"] = (td.TransferType.GDS, "kvikio")


def bare_cufile(path: Path, tensor: torch.Tensor, *, write: bool) -> float:
    """Seconds for bare cuFileRead or cuFileWrite calls of 8 MiB from 8 threads; writes end with fdatasync."""
    size = tensor.nbytes // CHUNK * CHUNK
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
    try:
        if write:
            os.posix_fallocate(fd, 0, size)
        with cufile.FileHandle(fd, path=str(path)) as handle:
            move = handle.write if write else handle.read

            def work(thread: int) -> None:
                torch.cuda.set_device(0)
                for offset in range(thread * CHUNK, size, THREADS * CHUNK):
                    done = 0
                    while done < CHUNK:
                        done += move(tensor.data_ptr(), CHUNK - done, offset + done, offset + done)

            threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
            start = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if write:
                os.fdatasync(fd)
            return (time.perf_counter() - start) * tensor.nbytes / size
    finally:
        os.close(fd)


class Run:
    """Samples by direction and row."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.samples: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}}
        self.notes: dict[str, str] = {}
        side = round((options.size_gb * GB / 4) ** 0.5)
        self.tensor = torch.randn(side, side, device="cuda")

    def sample(self, direction: str, row: str, work: Callable[[], object], seconds: float | None = None) -> None:
        try:
            if seconds is None:
                seconds, _ = foundation.timed(work)
        except (td.TransferUnavailableError, cufile.CuFileError, cufile.CuFileUnavailableError) as exc:
            self.notes[row] = f"unavailable: {exc}"
            return
        rate = self.tensor.nbytes / seconds / GB
        self.samples[direction].setdefault(row, []).append(rate)
        print(f"  {direction} {row}: {rate:.3g} GB/s", flush=True)

    def quality(self, row: str) -> None:
        report = td.last_transfer()
        if report is not None and report.used is not None and report.used.uses_cufile:
            self.notes[row] = "direct" if report.direct else "cuFile compatibility mode"

    def once(self) -> None:
        size, raw = self.tensor.nbytes, self.folder / "raw.bin"
        self.sample("save", "raw O_DIRECT writes", int, foundation.raw_write(raw, size, THREADS))
        raw.unlink()
        self.sample("save", "bare cuFileWrite", int, self._bare(raw, write=True))
        raw.unlink(missing_ok=True)
        for name, (kind, backend) in ROWS.items():
            path = self.path(name)
            path.unlink(missing_ok=True)
            os.sync()
            with td.settings(gds_backend=backend):
                self.sample("save", name, lambda p=path, k=kind: td.save(self.tensor, p, transfer_type=k))  # type: ignore[misc]
            self.quality(name)
        whole = self.path("CPU_GPU")
        foundation.make_cold(whole)
        self.sample("load", "raw O_DIRECT reads", int, foundation.raw_read(whole, THREADS, direct=True))
        foundation.make_cold(whole)
        self.sample("load", "bare cuFileRead", int, self._bare(whole, write=False))
        for name, (kind, backend) in ROWS.items():
            path = self.path(name) if self.path(name).exists() else whole
            foundation.make_cold(path)
            with td.settings(gds_backend=backend):
                self.sample("load", name, lambda p=path, k=kind: td.load(p, transfer_type=k))  # type: ignore[misc]
            self.quality(name)

    def path(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.pt"

    def _bare(self, path: Path, *, write: bool) -> float:
        tensor = self.tensor if write else torch.empty_like(self.tensor)
        torch.cuda.synchronize()
        try:
            return bare_cufile(path, tensor, write=write)
        except (cufile.CuFileError, cufile.CuFileUnavailableError) as exc:
            self.notes["bare cuFileWrite" if write else "bare cuFileRead"] = f"unavailable: {exc}"
            return float("nan")

    def warm_up(self) -> None:
        """Pay once for what a process pays once: opening cuFile's driver, pinning staging buffers."""
        small, path = torch.ones(32 << 20, dtype=torch.uint8, device="cuda"), self.folder / "warm-up.pt"
        for name, (kind, backend) in ROWS.items():
            try:
                start = time.perf_counter()
                with td.settings(gds_backend=backend):
                    td.save(small, path, transfer_type=kind)
                    td.load(path, transfer_type=kind)
                self.notes[f"{name}, first save and load of 32 MiB"] = f"{time.perf_counter() - start:.2f} s"
            except td.TransferUnavailableError as exc:
                self.notes[name] = f"unavailable: {exc}"

    def check(self) -> None:
        for name, (kind, backend) in ROWS.items():
            if self.path(name).exists():
                with td.settings(gds_backend=backend):
                    ours = td.load(self.path(name), transfer_type=kind)
                for loaded in (ours, torch.load(self.path(name), map_location="cuda", mmap=True)):
                    foundation.require(torch.equal(loaded, self.tensor), f"{name} is not equal bit for bit")

    def table(self) -> list[tuple[str, str, str, str, str, str]]:
        rows = [("transfer type", "save GB/s", "of raw", "load cold GB/s", "of raw", "quality")]
        names = ["raw O_DIRECT writes", "raw O_DIRECT reads", "bare cuFileWrite", "bare cuFileRead"]
        for name in [*names, *ROWS]:
            cells = [name]
            for direction, ceiling in (("save", "raw O_DIRECT writes"), ("load", "raw O_DIRECT reads")):
                values = self.samples[direction].get(name)
                if not values:
                    cells += ["", ""]
                    continue
                raw = statistics.median(self.samples[direction][ceiling])
                median = statistics.median(values)
                cells += [f"{median:.2f} ({min(values):.2f} to {max(values):.2f})", f"{median / raw:.2f}"]
            rows.append((*cells, self.notes.get(name, "")))  # type: ignore[arg-type]
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=".", help="where the files go: the file system that is measured")
    parser.add_argument("--size-gb", type=float, default=4.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", help="JSON file for every sample")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device, and torch.cuda.is_available() is False")
    need = (len(ROWS) + 1) * options.size_gb * GB
    if shutil.disk_usage(options.directory).free < need:
        raise SystemExit(f"{options.directory}: needs {need / GB:.0f} GB of free space; use --directory or --size-gb")
    folder = Path(tempfile.mkdtemp(prefix="torchdirect-bench-", dir=options.directory))
    try:
        run = Run(options, folder)
        run.warm_up()
        for _ in range(options.repeat):
            run.once()
        run.check()
        status = gds_status(folder)
        result: dict[str, Any] = {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": {
                "gpu": torch.cuda.get_device_name(),
                "cpus": os.cpu_count(),
                "kernel": platform.release(),
                "file_system": system.file_system(folder).type,
                "gds": {"direct": status.direct, "reason": status.reason},
            },
            "versions": {
                "torchdirect": td.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "libcufile": str(cufile.driver.version()),
            },
            "table": run.table(),
            "notes": run.notes,
            "samples": run.samples,
        }
    finally:
        shutil.rmtree(folder)
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    widths = [max(len(row[i]) for row in run.table()) for i in range(5)]
    print()
    for row in run.table():
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=True)).rstrip())
    print(f"\nGPUDirect Storage on this file system: {'direct' if status.direct else 'no'}; {status.reason}")


if __name__ == "__main__":
    main()
