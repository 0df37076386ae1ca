"""Runs saves in forked children and strikes them at every file-system call. Started with the shim preloaded.

Prints one JSON object: how many strikes there were for each scenario, and every one after which something was wrong.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import torchdirect as td
from torchdirect import pending

shim = ctypes.CDLL(os.environ["STRIKE_SHIM"])
shim.strike_count.restype = ctypes.c_long
shim.strike_arm.argtypes = (ctypes.c_long, ctypes.c_int)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((70_000,), value), "b": torch.full((5,), value), "c": torch.full((300_000,), value)}


OPTIONS = {"chunk_bytes": 262_144, "num_threads": 2}


class Scenario:
    """What is done, and how its result is read: as a stamp that all values share."""

    def __init__(
        self,
        act: Callable[[Path, float], object],
        names: Callable[[str], bool],
        read: Callable[[Path], dict[str, torch.Tensor]],
        files: int | None = None,
    ) -> None:
        self.act, self.names, self.read, self.files = act, names, read, files

    def stamp(self, folder: Path) -> float | None:
        """Return the stamp of what is there; None if nothing is."""
        try:
            loaded = self.read(folder)
        except FileNotFoundError:
            return None
        values = {float(v) for t in loaded.values() for v in (t.min(), t.max())}
        assert len(values) == 1, f"a mixture of {values}"
        assert loaded.keys() == state(0).keys()
        return values.pop()


def save(**options: object) -> Callable[[Path, float], object]:
    return lambda folder, value: td.save(state(value), folder / "a.pt", **{**OPTIONS, **options})  # type: ignore[arg-type]


def read_torch(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(folder / "a.pt")
    return loaded


def save_async(folder: Path, value: float) -> object:
    try:
        return td.save_async(state(value), folder / "a.pt", **OPTIONS).result()  # type: ignore[arg-type]
    finally:
        pending.writer.drain()


def rotate(folder: Path, value: float) -> object:
    """Save a step of a run that keeps one checkpoint."""
    try:
        with td.CheckpointManager(folder, keep_last=1, **OPTIONS) as manager:  # type: ignore[arg-type]
            return manager.save(int(value), state(value))
    finally:
        pending.writer.drain()


def read_latest(folder: Path) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a damaged one must not be passed over here
        found = td.CheckpointManager(folder).load_latest()
    if found is None:
        raise FileNotFoundError
    loaded: dict[str, torch.Tensor] = found.state
    return loaded


def convert(folder: Path, value: float) -> object:
    source = folder.parent / f"source{value}.pt"
    if not source.exists():
        torch.save(state(value), source)
    return td.convert(source, folder / "a.pt")


def read_distributed(folder: Path) -> dict[str, torch.Tensor]:
    if not (folder / ".metadata").exists():
        raise FileNotFoundError(folder)
    found = state(-1)
    td.dcp.load(found, folder)
    return found


SCENARIOS = {
    "save": Scenario(save(), lambda n: n == "a.pt", read_torch),
    "save, not durable": Scenario(save(durable=False), lambda n: n == "a.pt", read_torch),
    "save, page cache": Scenario(save(transfer_type="CPU_CACHED_GPU"), lambda n: n == "a.pt", read_torch),
    "save, small": Scenario(
        lambda folder, value: td.save({k: t[:5].clone() for k, t in state(value).items()}, folder / "a.pt"),
        lambda n: n == "a.pt",
        read_torch,
    ),
    "safetensors": Scenario(
        lambda folder, value: td.save(state(value), folder / "a.safetensors", **OPTIONS),  # type: ignore[arg-type]
        lambda n: n == "a.safetensors",
        lambda folder: td.safetensors.load_file(folder / "a.safetensors"),
    ),
    "shards": Scenario(
        lambda folder, value: td.save_sharded(state(value), folder, 300_000, chunk_bytes=262_144, num_threads=2),
        lambda n: n.startswith("model"),
        td.load_sharded,
    ),
    "save_async": Scenario(save_async, lambda n: n == "a.pt", read_torch),
    "rotation": Scenario(rotate, lambda n: re.fullmatch(r"step-\d{8}\.pt", n) is not None, read_latest, files=1),
    "convert": Scenario(convert, lambda n: n == "a.pt", read_torch),
    "dcp": Scenario(
        lambda folder, value: td.dcp.save(state(value), folder, **OPTIONS),  # type: ignore[arg-type]
        lambda n: n == ".metadata" or n.endswith(".distcp"),
        read_distributed,
        files=2,
    ),
    "dcp, files": Scenario(
        lambda folder, value: td.dcp.save(state(value), folder, single_file_per_rank=False, transfer_type="CPU_ONLY"),
        lambda n: n == ".metadata" or n.endswith(".distcp"),
        read_distributed,
        files=4,
    ),
}


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a fork; return its wait status as a Popen would."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as exc:
            print(f"{type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def calls_of(scenario: Scenario, folder: Path) -> int:
    """Return how many calls an undisturbed run makes."""
    count = tempfile.mktemp(dir=folder.parent)

    def work() -> None:
        shim.strike_arm(0, 0)
        scenario.act(folder, 2.0)
        made = shim.strike_count()
        shim.strike_disarm()
        Path(count).write_text(str(made))

    assert in_child(work) == 0
    return int(Path(count).read_text())


def leftovers(scenario: Scenario, folder: Path) -> list[str]:
    return sorted(n for n in os.listdir(folder) if not scenario.names(n) or "tmp-torchdirect" in n)


def descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


class Run:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.wrong: list[str] = []
        self.strikes: dict[str, int] = {}

    def sweep(self, name: str, what: int, old: bool, step: int) -> None:
        """Strike each call of a scenario, over an old file or none."""
        scenario = SCENARIOS[name]
        prepared = self.root / "prepared"
        shutil.rmtree(prepared, ignore_errors=True)
        prepared.mkdir()
        if old:
            scenario.act(prepared, 1.0)
        trial = self.root / "trial"
        shutil.copytree(prepared, trial)
        total = calls_of(scenario, trial)
        kind = signal.Signals(what).name if what > 0 else errno.errorcode[-what]
        label = f"{name}, {'over an old one' if old else 'new'}, {kind}"
        for nth in range(1, total + 1, step):
            shutil.rmtree(trial)
            shutil.copytree(prepared, trial)
            status = in_child(lambda nth=nth: self.struck(scenario, trial, nth, what))  # type: ignore[misc]
            self.strikes[label] = self.strikes.get(label, 0) + 1
            try:
                self.check(scenario, trial, status, what, old)
            except BaseException as exc:
                self.wrong.append(f"{label}, call {nth} of {total}: {type(exc).__name__}: {exc}")
        shutil.rmtree(trial)

    def struck(self, scenario: Scenario, folder: Path, nth: int, what: int) -> None:
        before = descriptors_and_threads()
        shim.strike_arm(nth, what)
        try:
            scenario.act(folder, 2.0)
            done = True
        except (OSError, KeyboardInterrupt):
            done = False
        shim.strike_disarm()
        descriptors, threads = descriptors_and_threads()
        # Python may raise KeyboardInterrupt after os.open has returned and before its result has a name: no program
        # can close that descriptor.
        lost = 1 if what == signal.SIGINT else 0
        assert threads == before[1], f"leaks threads: {before[1]} before, {threads} after"
        assert before[0] <= descriptors <= before[0] + lost, f"leaks descriptors: {before[0]} to {descriptors}"
        assert leftovers(scenario, folder) == [], f"left behind: {leftovers(scenario, folder)}"
        assert not done or scenario.stamp(folder) == 2.0, "no error, and not the new state"

    def check(self, scenario: Scenario, folder: Path, status: int, what: int, old: bool) -> None:
        killed = what in (signal.SIGKILL, signal.SIGTERM)
        assert status == (-what if killed else 0) or status == 0, f"the child ended with {status}"
        assert scenario.stamp(folder) in (1.0 if old else None, 2.0)
        assert in_child(lambda: scenario.act(folder, 3.0)) == 0, "the next save fails"
        assert scenario.stamp(folder) == 3.0
        assert leftovers(scenario, folder) == [], f"the next save leaves {leftovers(scenario, folder)}"
        assert scenario.files in (None, len(os.listdir(folder))), f"the next save leaves {os.listdir(folder)}"


def main() -> None:
    kind, names, step = sys.argv[1], sys.argv[2].split(";"), int(sys.argv[3])
    what = signal.Signals[kind].value if kind.startswith("SIG") else -getattr(errno, kind)
    torch.set_num_threads(1)
    # What PyTorch says at every call without a process group.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        for name in names:
            for old in (True, False):
                run.sweep(name, int(what), old, step)
    print(json.dumps({"strikes": run.strikes, "wrong": run.wrong}))


if __name__ == "__main__":
    main()
