"""Saves in the background: what is written, when, and what happens when something fails."""

from __future__ import annotations

import concurrent.futures
import errno
import gc
import io
import itertools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchdirect as td
from checkpoints import OTHER, PLAIN, record, same
from torchdirect import memory, pending, road, snapshot

STATE = {"first.weight": torch.arange(300_000.0), "second.bias": torch.arange(70_001.0), "third": torch.ones(5)}
SRC = str(Path(__file__).parents[1] / "src")


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path: Path) -> Iterator[None]:
    gc.collect()
    pending.writer.drain()
    before = (sorted(os.listdir("/proc/self/fd")), threading.active_count(), memory.snapshot_pool._reserved)
    yield
    pending.writer.drain()
    gc.collect()
    assert (sorted(os.listdir("/proc/self/fd")), threading.active_count(), memory.snapshot_pool._reserved) == before
    assert [p for p in tmp_path.rglob("*") if "tmp-torchdirect" in p.name] == []


class Gate:
    """Holds back what the writer does until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        real: Callable[..., None] = road.write_file

        def write_file(*arguments: Any, **keywords: Any) -> None:
            if threading.current_thread().name == "torchdirect-writer":
                self.reached.set()
                assert self._open.wait(30)
            real(*arguments, **keywords)

        monkeypatch.setattr(road, "write_file", write_file)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()
    pending.writer.drain()


# --------------------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("name", sorted({**PLAIN, **OTHER}))
def test_the_same_file_as_save(name: str, tmp_path: Path) -> None:
    obj = {**PLAIN, **OTHER}[name]()
    for folder in ("now", "later"):
        (tmp_path / folder).mkdir()
    td.save(obj, tmp_path / "now" / "a.pt")
    report = td.save_async(obj, tmp_path / "later" / "a.pt").result(30)
    assert (tmp_path / "later" / "a.pt").read_bytes() == (tmp_path / "now" / "a.pt").read_bytes()
    assert report.path == str(tmp_path / "later" / "a.pt")
    assert same(td.load(tmp_path / "later" / "a.pt", weights_only=False), obj)


@pytest.mark.parametrize("kind", ["AUTO", "CPU_ONLY", "CPU_CACHED_GPU"])
def test_large_and_safetensors(kind: str, tmp_path: Path) -> None:
    for name in ("a.pt", "a.safetensors"):
        td.save(STATE, tmp_path / f"now.{name}", chunk_bytes=65536)
        done = td.save_async(STATE, tmp_path / name, transfer_type=kind, chunk_bytes=65536)
        report = done.result(30)
        assert "in the background, from a copy in host memory" in report.reason
        assert report.requested is td.TransferType[kind]
        assert report.num_threads <= 4
        assert done.report is report
        assert done.snapshot_bytes == sum(t.nbytes for t in STATE.values())
        assert same(td.load(tmp_path / name), {k: STATE[k] for k in td.load(tmp_path / name)})
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "now.a.safetensors").read_bytes()
    assert record(tmp_path / "a.pt", "data.pkl") == record(tmp_path / "now.a.pt", "data.pkl")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None


def test_the_snapshot_is_as_of_the_call(gate: Gate, tmp_path: Path) -> None:
    """Tensors, objects and settings may change as soon as the call has returned."""
    state: dict[str, Any] = {"w": torch.ones(4_000_000), "small": torch.ones(3), "step": [1]}
    with td.settings(durable=False):
        done = td.save_async(state, tmp_path / "a.pt")
    state["w"].zero_()
    state["small"].zero_()
    state["step"][0] = 2
    assert gate.reached.wait(30)
    assert not done.done()
    assert done.report is None
    with pytest.raises(concurrent.futures.TimeoutError):
        done.result(0.01)
    assert not (tmp_path / "a.pt").exists()
    gate.open()
    done.result(30)
    loaded = td.load(tmp_path / "a.pt")
    assert bool((loaded["w"] == 1).all())
    assert bool((loaded["small"] == 1).all())
    assert loaded["step"] == [1]


def test_views_stay_views(tmp_path: Path) -> None:
    base = torch.arange(100_000.0)
    td.save_async([base[:10], base[2:4]], tmp_path / "a.pt").result(30)
    loaded = torch.load(tmp_path / "a.pt")
    loaded[1][0] = -1
    assert loaded[0][2] == -1
    assert (tmp_path / "a.pt").stat().st_size < 500_000


def test_what_torch_writes_itself(tmp_path: Path) -> None:
    tensor = torch.ones(1000)
    done = td.save_async(tensor, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    tensor.zero_()
    assert "legacy" in done.result(30).reason
    assert bool((torch.load(tmp_path / "legacy.pt") == 1).all())
    with pytest.raises(TypeError, match=r"not to a BytesIO.*td\.save"):
        td.save_async(tensor, io.BytesIO())  # type: ignore[arg-type]


def test_inference_mode_and_default_devices(tmp_path: Path) -> None:
    td.release_staging()
    with torch.inference_mode(), torch.device("meta"):
        state = {"w": torch.ones(3_000_000, device="cpu"), "s": torch.ones(3, device="cpu")}
        td.save_async(state, tmp_path / "a.pt").result(30)
    td.save_async(state, tmp_path / "b.pt").result(30)
    assert same(td.load(tmp_path / "a.pt"), td.load(tmp_path / "b.pt"))
    assert bool((td.load(tmp_path / "b.pt")["w"] == 1).all())


# ---------------------------------------------------------------------------------------------------- order, refusal


def test_two_saves_to_one_path_keep_their_order(gate: Gate, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    first = td.save_async({"v": torch.full((400_000,), 1.0)}, path)
    order: list[str] = []
    first.add_done_callback(lambda _: order.append("first"))
    assert gate.reached.wait(30)
    threading.Timer(0.2, gate.open).start()
    second = td.save_async({"v": torch.full((400_000,), 2.0)}, path)  # waits
    assert first.done()
    second.result(30)
    assert order == ["first"]
    assert float(td.load(path)["v"][0]) == 2


@pytest.mark.parametrize("how", ["save", "legacy", "safetensors"])
def test_a_save_in_the_foreground_comes_after_a_pending_one(how: str, gate: Gate, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    (tmp_path / "link.pt").symlink_to(path)
    td.save_async({"v": torch.full((400_000,), 1.0)}, path)
    assert gate.reached.wait(30)
    threading.Timer(0.2, gate.open).start()
    if how == "save":
        td.save({"v": torch.full((400_000,), 2.0)}, tmp_path / "link.pt")
    elif how == "legacy":
        td.save({"v": torch.full((400_000,), 2.0)}, path, _use_new_zipfile_serialization=False)
    else:
        td.safetensors.save_file({"v": torch.full((400_000,), 2.0)}, path)
    assert pending.writer.pending() == []
    assert float(td.load(path)["v"][0]) == 2


def test_a_second_save_can_be_refused(gate: Gate, tmp_path: Path) -> None:
    first = td.save_async(STATE, tmp_path / "a.pt")
    assert gate.reached.wait(30)
    with pytest.raises(td.SavePendingError, match=r"a\.pt.*has not ended.*result\(\)") as caught:
        td.save_async(STATE, tmp_path / "a.pt", pending="refuse")
    assert caught.value.errno == errno.EBUSY
    other = td.save_async(STATE, tmp_path / "b.pt", pending="refuse")  # to another path: it queues
    gate.open()
    first.result(30)
    other.result(30)
    td.save_async(STATE, tmp_path / "a.pt", pending="refuse").result(30)
    assert same(td.load(tmp_path / "b.pt"), STATE)


def test_memory_for_snapshots_is_bounded(gate: Gate, tmp_path: Path) -> None:
    big = {"v": torch.full((1_000_000,), 1.0)}
    td.release_staging()
    with td.settings(snapshot_bytes="5MiB"):
        with pytest.raises(td.SaveError, match=r"a\.pt.*8.* MB.*snapshot_bytes.*td\.save") as caught:
            td.save_async([torch.ones(2_000_000)], tmp_path / "a.pt", staging="host")
        assert caught.value.errno == errno.ENOMEM
        first = td.save_async(big, tmp_path / "a.pt")
        assert gate.reached.wait(30)
        with pytest.raises(td.SavePendingError, match=r"hold the memory.*TORCHDIRECT_SNAPSHOT_BYTES"):
            td.save_async(big, tmp_path / "b.pt", pending="refuse")
        threading.Timer(0.2, gate.open).start()
        second = td.save_async(big, tmp_path / "b.pt")
        assert first.done()
        second.result(30)
    assert memory.snapshot_pool.nbytes <= 5 << 20


def test_without_memory_for_a_copy_the_call_writes(tmp_path: Path) -> None:
    state = {"v": torch.full((2_000_000,), 1.0)}
    with td.settings(snapshot_bytes="5MiB"):
        with pytest.warns(td.TransferFallbackWarning, match=r"a\.pt.*snapshot_bytes.*before the call returned"):
            done = td.save_async(state, tmp_path / "a.pt")
        assert done.done()
        state["v"].zero_()
        assert "before the call returned" in done.result().fallbacks[0]
        assert bool((td.load(tmp_path / "a.pt")["v"] == 1).all())
        with pytest.warns(td.TransferFallbackWarning):
            failed = td.save_async(state, tmp_path / "no" / "a.pt")
        with pytest.raises(FileNotFoundError):
            failed.result()


def test_a_buffer_that_was_outgrown_is_freed(tmp_path: Path) -> None:
    td.release_staging()
    for megabytes in (4, 8, 16, 12):
        td.save_async(torch.ones(megabytes << 18), tmp_path / "a.pt", durable=False).result(30)
    assert 16 << 20 <= memory.snapshot_pool.nbytes <= 20 << 20


def test_callbacks_may_save(tmp_path: Path) -> None:
    """They run in the thread that writes, which must not wait for itself."""
    more: list[td.PendingSave] = []
    done = td.save_async(STATE, tmp_path / "a.pt")
    done.add_done_callback(lambda _: more.append(td.save_async(STATE, tmp_path / "a.pt")))
    done.result(30)
    pending.writer.drain()
    assert more[0].result(30).bytes == (tmp_path / "a.pt").stat().st_size


def test_a_pending_save_cannot_be_cancelled(gate: Gate, tmp_path: Path) -> None:
    first, second = td.save_async(STATE, tmp_path / "a.pt"), td.save_async(STATE, tmp_path / "b.pt")
    assert not second.cancel()
    gate.open()
    first.result(30)
    second.result(30)


# ------------------------------------------------------------------------------------------------------------- errors


def test_a_full_disk_is_told_at_result(tmp_path: Path) -> None:
    done = td.save_async(STATE, "/dev/full")
    with pytest.raises(td.SaveError, match="/dev/full") as caught:
        done.result(30)
    assert caught.value.errno == errno.ENOSPC
    assert done.exception() is caught.value
    assert done.report is None
    td.save_async(STATE, "/dev/null").result(30)


def test_a_file_size_limit_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "good.pt"
    td.save(STATE, path)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        done = td.save_async(torch.ones(4_000_000), path)
        error = done.exception(30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert isinstance(error, td.SaveError)
    assert error.errno == errno.EFBIG
    assert same(torch.load(path), STATE)
    del error, done
    gc.collect()
    assert memory.snapshot_pool._reserved == 0


def test_a_full_file_system(tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs root and mount namespaces")
    script = f"""
import errno, os, subprocess, torch, torchdirect as td
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", {str(tmp_path)!r}], check=True)
os.chdir({str(tmp_path)!r})
td.save(torch.arange(3.), "a.pt")
done = td.save_async(torch.ones(4_000_000), "a.pt")
error = done.exception()
assert isinstance(error, td.SaveError) and error.errno == errno.ENOSPC and "16" in str(error), error
assert os.listdir() == ["a.pt"], os.listdir()
assert torch.equal(td.load("a.pt"), torch.arange(3.))
"""
    command = ["unshare", "-m", sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": SRC}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_error_holds_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A future that is kept for its error must not keep the copies alive."""
    copies: list[weakref.ref[torch.Tensor]] = []
    real = snapshot.take

    def take(*arguments: Any, **keywords: Any) -> snapshot.Snapshot:
        taken = real(*arguments, **keywords)
        copies.extend(weakref.ref(tensor) for tensor in taken.tensors)
        return taken

    monkeypatch.setattr(snapshot, "take", take)
    done = td.save_async(STATE, tmp_path / "no" / "a.pt")
    error = done.exception(30)
    assert isinstance(error, FileNotFoundError)
    assert len(copies) == 3
    assert [copy() for copy in copies] == [None] * 3


def test_an_error_that_nobody_asks_for_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "torchdirect"):
        td.save_async(STATE, tmp_path / "no" / "a.pt")
        pending.writer.drain()
        gc.collect()
    assert [r for r in caplog.messages if "nobody asked" in r and "a.pt" in r and "No such file" in r]
    caplog.clear()
    with caplog.at_level(logging.ERROR, "torchdirect"):
        assert td.save_async(STATE, tmp_path / "no" / "a.pt").exception(30) is not None
        gc.collect()
    assert caplog.messages == []


@pytest.mark.parametrize("staging", ["nowhere", 3])
def test_bad_arguments_are_told_at_the_call(staging: Any, tmp_path: Path) -> None:
    with pytest.raises(td.SettingsError, match="staging="):
        td.save_async(STATE, tmp_path / "a.pt", staging=staging)
    with pytest.raises(td.SettingsError, match="pending="):
        td.save_async(STATE, tmp_path / "a.pt", pending="maybe")
    with pytest.raises(ValueError, match="flat dict"):
        td.save_async([torch.ones(1)], tmp_path / "a.safetensors")
    with pytest.raises(td.TransferUnavailableError, match="no tensor is on a GPU"):
        td.save_async(STATE, tmp_path / "a.pt", transfer_type="GDS").result(30)


def test_an_interrupt_during_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "copy_in_host_memory", interrupt)
        with pytest.raises(KeyboardInterrupt):
            td.save_async(STATE, tmp_path / "a.pt")
    assert memory.snapshot_pool._reserved == 0
    assert list(tmp_path.iterdir()) == []
    td.save_async(STATE, tmp_path / "a.pt").result(30)


def test_an_interrupt_while_the_thread_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            td.save_async({"a": torch.ones(3)}, tmp_path / "a.pt")
    assert pending.writer.pending() == []
    td.save_async(STATE, tmp_path / "a.pt").result(30)


def test_without_threads_the_call_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    done = td.save_async(STATE, tmp_path / "a.pt")
    assert done.done()
    assert same(td.load(tmp_path / "a.pt"), STATE)


# ----------------------------------------------------------------------------------------------- exit, forks, crashes


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SRC}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], check=False, capture_output=True, text=True, env=environment,
        timeout=60,
    )  # fmt: skip


SLOW = """
import os, sys, time, torch, torchdirect as td
from torchdirect import road
real = road.write_file
def slowly(*a, **k):
    time.sleep(0.5)
    real(*a, **k)
road.write_file = slowly
state = {"w": torch.ones(2_000_000)}
"""


def test_exit_waits_for_pending_saves(tmp_path: Path) -> None:
    done = run_script(SLOW + "td.save_async(state, sys.argv[1]); state['w'].zero_()", str(tmp_path / "a.pt"))
    assert done.returncode == 0, done.stderr
    assert bool((td.load(tmp_path / "a.pt")["w"] == 1).all())


def test_a_save_from_an_exit_handler(tmp_path: Path) -> None:
    script = SLOW + "import atexit; atexit.register(lambda: td.save_async(state, sys.argv[1]))"
    done = run_script(script, str(tmp_path / "a.pt"))
    assert done.returncode == 0, done.stderr
    assert bool((td.load(tmp_path / "a.pt")["w"] == 1).all())


def test_an_error_at_exit_is_told(tmp_path: Path) -> None:
    done = run_script(SLOW + "kept = td.save_async(state, sys.argv[1])", str(tmp_path / "no" / "a.pt"))
    assert "nobody asked" in done.stderr
    assert "a.pt" in done.stderr


def test_an_uncaught_exception_does_not_lose_the_save(tmp_path: Path) -> None:
    done = run_script(SLOW + "td.save_async(state, sys.argv[1]); 1 / 0", str(tmp_path / "a.pt"))
    assert done.returncode == 1
    assert bool((td.load(tmp_path / "a.pt")["w"] == 1).all())


FORK = (
    SLOW
    + """
pending = td.save_async(state, sys.argv[1])
pid = os.fork()
if pid == 0:
    torch.set_num_threads(1)
    try:
        pending.result(5)
    except RuntimeError as exc:
        assert "parent process" in str(exc), exc
    else:
        raise SystemExit("the child has the parent's save")
    assert not os.path.exists(sys.argv[1])
    td.save_async({"w": torch.zeros(2_000_000)}, sys.argv[1] + ".child").result(20)
    raise SystemExit(0)
start = time.time()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
pending.result(20)
"""
)


def test_a_forked_child_has_no_pending_saves(tmp_path: Path) -> None:
    done = run_script(FORK, str(tmp_path / "a.pt"))
    assert done.returncode == 0, done.stderr
    assert bool((td.load(tmp_path / "a.pt")["w"] == 1).all())
    assert bool((td.load(tmp_path / "a.pt.child")["w"] == 0).all())
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "a.pt.child"]


def test_a_killed_process_publishes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    td.save({"w": torch.zeros(2_000_000)}, path)
    script = SLOW + "td.save_async(state, sys.argv[1]); time.sleep(0.1); os.kill(os.getpid(), 9)"
    assert run_script(script, str(path)).returncode == -9
    assert bool((td.load(path)["w"] == 0).all())
    td.save_async({"w": torch.ones(5)}, path).result(30)
    assert os.listdir(tmp_path) == ["a.pt"]


# ------------------------------------------------------------------------------------------------------------- memory


def test_nothing_grows(tmp_path: Path) -> None:
    """Buffers are reused; threads and descriptors come and go."""
    td.release_staging()
    made: list[int] = []
    real = memory.StagingBuffer.__init__

    def count(self: memory.StagingBuffer, nbytes: int, *, pinned: bool) -> None:
        if threading.current_thread() is threading.main_thread():
            made.append(nbytes)
        real(self, nbytes, pinned=pinned)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.StagingBuffer, "__init__", count)
        for i in range(50):
            td.save_async(STATE, tmp_path / f"{i % 3}.pt", durable=False).result(30)
    assert len(made) == 1
    assert memory.snapshot_pool.nbytes == made[0] <= sum(t.nbytes for t in STATE.values()) + (4 << 20)
    assert td.release_staging() >= made[0]
    assert memory.snapshot_pool.nbytes == 0


@given(
    sizes=st.lists(st.integers(0, 30_000), max_size=30),
    offsets=st.lists(st.integers(0, 1 << 40), min_size=30, max_size=30),
)
@settings(max_examples=200, deadline=None)
def test_places_in_the_buffer(sizes: list[int], offsets: list[int]) -> None:
    offsets = offsets[: len(sizes)]
    places, nbytes = snapshot.place(sizes, offsets, large_bytes=10_000)
    spans = sorted((at, at + size) for at, size in zip(places, sizes, strict=True) if size)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert all(end <= nbytes for _, end in spans)
    assert nbytes <= sum(sizes) + sum(2 * 4096 if size >= 10_000 else 64 for size in sizes)
    for at, size, offset in zip(places, sizes, offsets, strict=True):
        assert size < 10_000 or at % 4096 == offset % 4096
    small = [at for at, size in zip(places, sizes, strict=True) if size < 10_000]
    assert small == sorted(small)
    assert all(at >= place for at in small for place, size in zip(places, sizes, strict=True) if size >= 10_000)


def test_copies_of_host_memory() -> None:
    sources = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in (1, 0, 40 << 20, 5, 17 << 20, 300)]
    targets = [torch.zeros_like(t) for t in sources]
    snapshot.copy_in_host_memory(
        [(t.data_ptr(), s.data_ptr(), s.numel()) for t, s in zip(targets, sources, strict=True)]
    )
    assert same(targets, sources)


def test_the_benchmark_runs_without_a_gpu(tmp_path: Path) -> None:
    script = Path(SRC).parent / "benchmarks" / "background_save.py"
    output = tmp_path / "result.json"
    options = ["--gb", "0.01", "--rounds", "1", "--seconds", "0.1", "--directory", str(tmp_path)]
    command = [sys.executable, str(script), *options, "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": SRC}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert {"command", "machine", "versions", "samples", "table", "reports"} <= result.keys()
    assert {"ceiling", "stall", "steps", "save"} <= result["samples"].keys()
    assert os.listdir(tmp_path) == ["result.json"]
