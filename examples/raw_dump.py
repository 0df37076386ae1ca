"""The experiment of PyTorch RFC 0033: a square float32 tensor, written raw to a file and read back, in GB/s."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import torchdirect as td


def rate(nbytes: int, work: Callable[[], object]) -> float:
    """Run `work`; return GB/s."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return nbytes / (time.perf_counter() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=50_000, help="rows and columns (default 50000: 10 GB)")
    parser.add_argument("--directory", default=".", help="where the files go")
    parser.add_argument("--transfer-type", default="AUTO", help="name or gdsio code")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    tensor = torch.randn(options.side, options.side, device=options.device)
    back = torch.zeros_like(tensor)

    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        raw, checkpoint = Path(folder, "raw.bin"), Path(folder, "tensor.pt")

        def torch_save() -> None:
            torch.save(tensor, checkpoint)
            with open(checkpoint, "rb+") as file:
                os.fsync(file)

        with td.DirectFile(raw, "w+", transfer_type=options.transfer_type) as file:

            def write() -> None:
                file.write(tensor)
                file.sync()

            written = rate(tensor.nbytes, write)
            read = rate(tensor.nbytes, lambda: file.read_into(back))
        if not torch.equal(back, tensor):
            raise SystemExit("WRONG RESULT: what was read is not what was written")
        print(f"DirectFile {options.transfer_type}: write {written:.2f} GB/s, read {read:.2f} GB/s")
        print(f"torch.save + fsync: {rate(tensor.nbytes, torch_save):.2f} GB/s", end=", ")
        print(f"torch.load: {rate(tensor.nbytes, lambda: torch.load(checkpoint)):.2f} GB/s")


if __name__ == "__main__":
    main()
