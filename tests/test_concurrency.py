"""Many threads and processes on the same and on different files, and the places where users call from."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchdirect as td
from torchdirect.pending import writer

ROOT = Path(__file__).parents[1]


def stamped(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((200_000,), value), "b": torch.full((3,), value)}


def stamp(state: dict[str, torch.Tensor]) -> float:
    values = {float(v) for t in state.values() for v in (t.min(), t.max())}
    assert len(values) == 1, f"a mixture of {values}"
    return values.pop()


def in_threads(works: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def body(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=body, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("kind", ["AUTO", "CPU_ONLY", "CPU_CACHED_GPU"])
def test_savers_and_loaders_of_one_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    td.save(stamped(0), path)

    def save(number: int) -> Callable[[], None]:
        def work() -> None:
            for i in range(6):
                td.save(stamped(number * 100 + i), path, durable=False, transfer_type=kind)

        return work

    def load() -> None:
        for _ in range(12):
            stamp(td.load(path, transfer_type=kind))

    in_threads([save(1), save(2), save(3), load, load])
    assert stamp(td.load(path)) % 100 == 5
    assert os.listdir(tmp_path) == ["a.pt"]


def test_savers_in_the_background_and_in_the_foreground(tmp_path: Path) -> None:
    """What is at a path in the end is what was saved to it last, by whichever way."""

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            own, shared = tmp_path / f"{number}.pt", tmp_path / "shared.pt"
            for i in range(8):
                state = stamped(number * 100 + i)
                pending = td.save_async(state, own, durable=False)
                td.save_async(state, shared, durable=False)
                for tensor in state.values():
                    tensor.fill_(-1)
                if i % 3 == 0:
                    td.save(stamped(number * 100 + i + 0.5), own, durable=False)
                    assert pending.done()
                    assert stamp(td.load(own)) == number * 100 + i + 0.5
                elif i % 3 == 1:
                    pending.result(60)
                    assert stamp(td.load(own)) == number * 100 + i
            td.save_async(stamped(number * 100 + 99), own).result(60)

        return run

    in_threads([work(1), work(2), work(3)])
    writer.drain()
    assert [stamp(td.load(tmp_path / f"{n}.pt")) for n in (1, 2, 3)] == [199, 299, 399]
    assert stamp(td.load(tmp_path / "shared.pt")) in (107, 207, 307)
    assert sorted(os.listdir(tmp_path)) == ["1.pt", "2.pt", "3.pt", "shared.pt"]


def test_different_files_share_the_staging_bound(tmp_path: Path) -> None:
    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            path = tmp_path / f"{number}.pt"
            for i in range(4):
                td.save(stamped(number + i), path, durable=False, transfer_type="CPU_CACHED_GPU", chunk_bytes=65536)
                assert stamp(td.load(path, transfer_type="CPU_ONLY", chunk_bytes=65536)) == number + i

        return run

    with td.settings(staging_bytes="1MiB"):
        in_threads([work(n * 10) for n in range(8)])


def test_processes_that_save_to_one_path(tmp_path: Path) -> None:
    script = (
        "import sys, torch, torchdirect as td\n"
        "for i in range(8):\n"
        "    value = float(sys.argv[2]) + i\n"
        "    td.save({'a': torch.full((200_000,), value), 'b': torch.full((3,), value)}, sys.argv[1], durable=False)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    path = tmp_path / "a.pt"
    savers = [
        subprocess.Popen([sys.executable, "-c", script, str(path), str(n * 100)], env=environment) for n in (1, 2)
    ]
    seen = set()
    while any(saver.poll() is None for saver in savers):
        if path.exists():
            seen.add(stamp(td.load(path, transfer_type="CPU_CACHED_GPU")))
    assert [saver.returncode for saver in savers] == [0, 0]
    assert stamp(td.load(path)) % 100 == 7
    assert os.listdir(tmp_path) == ["a.pt"]


def test_after_a_fork(tmp_path: Path) -> None:
    """Buffers, locks and threads of the parent are of no use to the child, and it does without them."""
    td.save(stamped(1), tmp_path / "a.pt", transfer_type="CPU_CACHED_GPU")

    def child() -> None:
        torch.set_num_threads(1)  # OpenMP's own threads are gone after a fork, and PyTorch would wait for them
        assert stamp(td.load(tmp_path / "a.pt", transfer_type="CPU_ONLY")) == 1
        td.save(stamped(2), tmp_path / "b.pt", transfer_type="CPU_CACHED_GPU")

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert stamp(td.load(tmp_path / "b.pt")) == 2


class Files(torch.utils.data.Dataset[float]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> float:
        return stamp(td.load(self.folder / f"{index}.pt", transfer_type="CPU_CACHED_GPU"))


def test_data_loader_workers(tmp_path: Path) -> None:
    for i in range(6):
        td.save(stamped(i), tmp_path / f"{i}.pt", durable=False)
    loader = torch.utils.data.DataLoader(Files(tmp_path), num_workers=2, batch_size=None)
    assert sorted(float(value) for value in loader) == [0, 1, 2, 3, 4, 5]


def test_inference_mode_and_default_settings_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with torch.inference_mode():
        td.save(stamped(4), path)
        assert stamp(td.load(path, transfer_type="CPU_ONLY")) == 4
        td.load_into(target := stamped(0), path)
        assert stamp(target) == 4
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert stamp(td.load(path, transfer_type="CPU_ONLY")) == 4
            td.save(td.load(path, transfer_type="CPU_CACHED_GPU"), path)
    finally:
        torch.set_default_dtype(before)
    assert stamp(torch.load(path)) == 4


def test_a_short_soak() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--minutes", "0.15"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
