"""Background saves of GPU tensors: stream order, both kinds of staging, and what happens when memory is short."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdirect as td
from checkpoints import PLAIN, same
from torchdirect import memory, pending, snapshot

pytestmark = pytest.mark.gpu
MIB = 1 << 20
STAGING = ["host", "device"]


def to_gpu(obj: Any) -> Any:
    if isinstance(obj, torch.Tensor):
        return obj.cuda()
    if isinstance(obj, dict):
        return type(obj)((k, to_gpu(v)) for k, v in obj.items())
    if isinstance(obj, (list, tuple)):
        return type(obj)(map(to_gpu, obj))
    return obj


def slow(stream: torch.cuda.Stream | None = None) -> None:
    """Keep a stream, by default the current one, busy for about a tenth of a second."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path: Path) -> Iterator[None]:
    pending.writer.drain()
    threads = threading.active_count()
    yield
    pending.writer.drain()
    gc.collect()
    assert memory.snapshot_pool._reserved == 0
    assert threading.active_count() == threads
    assert [p for p in tmp_path.rglob("*") if "tmp-torchdirect" in p.name] == []


@pytest.mark.parametrize("staging", STAGING)
@pytest.mark.parametrize("name", ["large and small", "trained", "nested", "not contiguous", "bool, half, complex"])
def test_the_same_file_as_save(name: str, staging: str, tmp_path: Path) -> None:
    obj = [to_gpu(PLAIN[name]()), PLAIN[name]()]
    (tmp_path / "now").mkdir()
    td.save(obj, tmp_path / "now" / "a.pt")
    done = td.save_async(obj, tmp_path / "a.pt", staging=staging)
    assert done.staging == staging
    done.result(60)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "now" / "a.pt").read_bytes()
    assert same(td.load(tmp_path / "a.pt"), obj)


@pytest.mark.parametrize("staging", STAGING)
def test_many_small_and_large_ones(staging: str, tmp_path: Path) -> None:
    """Small storages are gathered in runs; what lies between them in the buffer is of no account."""
    state: dict[str, torch.Tensor] = {}
    for i in range(1500):
        state[f"s{i}"] = torch.randint(0, 255, (i * 97 % 180_000,), dtype=torch.uint8, device="cuda")
        if i % 100 == 0:
            state[f"l{i}"] = torch.randint(0, 255, (3 * MIB + i,), dtype=torch.uint8, device="cuda")
            state[f"h{i}"] = torch.randint(0, 255, (MIB + i,), dtype=torch.uint8)
    for name in ("a.pt", "a.safetensors"):
        kept = {k: t for k, t in state.items() if t.numel()}
        done = td.save_async(kept, tmp_path / name, staging=staging)
        copies = {k: t.clone() for k, t in kept.items()}
        for tensor in kept.values():
            tensor.bitwise_not_()
        done.result(60)
        loaded = td.load(tmp_path / name, map_location="cpu")
        assert all(torch.equal(loaded[k], t.cpu()) for k, t in copies.items())


@pytest.mark.parametrize("staging", STAGING)
@pytest.mark.parametrize("nbytes", [1000, 40 * MIB])
def test_a_change_queued_right_behind_the_call(nbytes: int, staging: str, tmp_path: Path) -> None:
    """On a stream with work before it: the copy has not begun when the call returns."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        td.save_async(tensor, tmp_path / "a.pt", staging=staging).result(60)  # pins the buffer
        slow()
        tensor.fill_(7)
        done = td.save_async(tensor, tmp_path / "a.pt", staging=staging)
        waited = not stream.query()
        tensor.fill_(9)
    assert waited, "the call must not wait for the stream"
    done.result(60)
    assert bool((torch.load(tmp_path / "a.pt", map_location="cpu") == 7).all())
    assert bool((tensor == 9).all())


@pytest.mark.parametrize("staging", STAGING)
def test_a_change_on_another_stream_that_is_ordered_behind(staging: str, tmp_path: Path) -> None:
    tensor = torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    td.save_async(tensor, tmp_path / "a.pt", staging=staging).result(60)
    slow()
    done = td.save_async(tensor, tmp_path / "a.pt", staging=staging)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.zero_()
    done.result(60)
    assert bool((torch.load(tmp_path / "a.pt", map_location="cpu") == 7).all())


@pytest.mark.parametrize("staging", STAGING)
def test_tensors_may_be_freed_at_once(staging: str, tmp_path: Path) -> None:
    td.save_async(torch.zeros(40 * MIB, dtype=torch.uint8, device="cuda"), tmp_path / "a.pt").result(60)
    tensor = torch.full((40 * MIB,), 7, dtype=torch.uint8, device="cuda")
    slow()
    done = td.save_async(tensor, tmp_path / "a.pt", staging=staging)
    del tensor
    others = [torch.full((40 * MIB,), 9, dtype=torch.uint8, device="cuda") for _ in range(3)]
    done.result(60)
    assert bool((torch.load(tmp_path / "a.pt", map_location="cpu") == 7).all())
    assert len(others) == 3


@pytest.mark.parametrize("kind", ["AUTO", "CPU_ONLY", "CPU_GPU", "CPU_ASYNC_GPU", "CPU_CACHED_GPU"])
def test_types_from_host_staging(kind: str, tmp_path: Path) -> None:
    state = {"w": torch.randn(5 * MIB, device="cuda"), "s": torch.ones(3, device="cuda")}
    report = td.save_async(state, tmp_path / "a.pt", transfer_type=kind, staging="host").result(60)
    assert report.requested is td.TransferType[kind]
    assert report.used in (td.TransferType.CPU_ONLY, td.TransferType.CPU_CACHED_GPU)
    assert "from a copy in host memory" in report.reason
    assert same(td.load(tmp_path / "a.pt"), state)


def test_cufile_types_keep_the_copy_on_the_gpu(tmp_path: Path) -> None:
    state = {"w": torch.randn(5 * MIB, device="cuda")}
    with pytest.raises(td.SettingsError, match=r"staging='host'.*GDS"):
        td.save_async(state, tmp_path / "a.pt", transfer_type="GDS", staging="host")
    done = td.save_async(state, tmp_path / "a.pt", transfer_type="GDS", fallback="warn")
    state["w"].zero_()
    assert done.staging == "device"
    done.result(60)
    assert bool((td.load(tmp_path / "a.pt")["w"] != 0).any())


def test_the_buffer_is_pinned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    td.release_staging()
    state = {"w": torch.randn(8 * MIB, device="cuda")}
    made: list[int] = []
    real = memory.StagingBuffer.__init__

    def count(self: memory.StagingBuffer, nbytes: int, *, pinned: bool) -> None:
        if threading.current_thread() is threading.main_thread():
            made.append(nbytes)
        real(self, nbytes, pinned=pinned)

    monkeypatch.setattr(memory.StagingBuffer, "__init__", count)
    fds = len(os.listdir("/proc/self/fd"))
    for i in range(50):
        td.save_async(state, tmp_path / f"{i % 2}.pt", durable=False).result(60)
    assert len(made) == 1
    assert memory.snapshot_pool.nbytes == made[0]
    assert len(os.listdir("/proc/self/fd")) <= fds + 2
    allocated = torch.cuda.memory_allocated()
    for i in range(10):
        td.save_async(state, tmp_path / f"{i % 2}.pt", durable=False, staging="device").result(60)
    assert torch.cuda.memory_allocated() == allocated
    assert td.release_staging() >= made[0]


def test_host_memory_that_cannot_be_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    td.release_staging()
    real = memory.StagingBuffer.__init__

    def refuse(self: memory.StagingBuffer, nbytes: int, *, pinned: bool) -> None:
        if pinned:
            raise RuntimeError("cannot pin: CUDA error 2")
        real(self, nbytes, pinned=pinned)

    monkeypatch.setattr(memory.StagingBuffer, "__init__", refuse)
    state = {"w": torch.randn(4 * MIB, device="cuda"), "s": torch.ones(3, device="cuda")}
    expected = {k: t.clone() for k, t in state.items()}
    with pytest.raises(td.SaveError, match=r"pinned host memory cannot be had.*staging='auto'") as caught:
        td.save_async(state, tmp_path / "a.pt", staging="host")
    assert caught.value.errno == errno.ENOMEM
    with pytest.warns(td.TransferFallbackWarning, match="cannot be pinned"):
        td.save_async(state, tmp_path / "a.pt", staging="host", fallback="warn").result(60)
    done = td.save_async(state, tmp_path / "a.pt")
    for tensor in state.values():
        tensor.zero_()
    report = done.result(60)
    assert any("cannot be pinned" in text for text in report.fallbacks)
    assert same(torch.load(tmp_path / "a.pt"), expected)


def test_a_snapshot_over_the_bound_stays_on_the_gpu(tmp_path: Path) -> None:
    tensor = torch.randn(4 * MIB, device="cuda")
    with td.settings(snapshot_bytes="4MiB"):
        with pytest.raises(td.SaveError, match="snapshot_bytes"):
            td.save_async(tensor, tmp_path / "a.pt", staging="host")
        done = td.save_async(tensor, tmp_path / "a.pt")
    assert done.staging == "device"
    assert any("snapshot_bytes" in text for text in done.result(60).fallbacks)
    assert same(td.load(tmp_path / "a.pt"), tensor)


def test_no_room_on_the_gpu(tmp_path: Path) -> None:
    tensor = torch.randn(16 * MIB, device="cuda")
    torch.cuda.empty_cache()
    fraction = (torch.cuda.memory_reserved() + 4 * MIB) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        with pytest.raises(td.SaveError, match="staging='device'") as caught:
            td.save_async(tensor, tmp_path / "a.pt", staging="device")
        assert caught.value.errno == errno.ENOMEM
        with pytest.warns(td.TransferFallbackWarning, match="no room"):
            done = td.save_async(tensor, tmp_path / "a.pt", staging="device", fallback="warn")
        assert done.staging == "host"
        done.result(60)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert same(td.load(tmp_path / "a.pt"), tensor)


@pytest.mark.parametrize("where", ["copy_in_host_memory", "_copy_out"])
def test_an_interrupt_during_the_snapshot(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.randn(4 * MIB, device="cuda"), "h": torch.randn(MIB)}

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    slow()
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            td.save_async(state, tmp_path / "a.pt")
    assert memory.snapshot_pool._reserved == 0
    td.save_async(state, tmp_path / "a.pt").result(60)
    assert same(td.load(tmp_path / "a.pt"), state)


@pytest.mark.parametrize("staging", STAGING)
def test_inference_mode(staging: str, tmp_path: Path) -> None:
    td.release_staging()
    with torch.inference_mode():
        state = {"w": torch.ones(4 * MIB, device="cuda"), **{f"s{i}": torch.ones(i, device="cuda") for i in range(9)}}
        td.save_async(state, tmp_path / "a.pt", staging=staging).result(60)
    td.save_async(state, tmp_path / "b.pt", staging=staging).result(60)
    assert (tmp_path / "b.pt").stat().st_size == (tmp_path / "a.pt").stat().st_size
    assert bool((td.load(tmp_path / "b.pt")["w"] == 1).all())


def test_training_queued_behind_does_not_hold_up_the_write(tmp_path: Path) -> None:
    """The writer's streams are its own: the file is there while the default stream is still busy."""
    tensor = torch.ones(4 * MIB, device="cuda")
    td.save_async(tensor, tmp_path / "a.pt", staging="device").result(60)
    done = td.save_async(tensor, tmp_path / "b.pt", staging="device", durable=False)
    for _ in range(30):
        slow()
    done.result(60)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_several_gpus_in_one_object(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    state = [torch.full((n,), float(i), device=f"cuda:{i % count}") for i, n in enumerate([3 * MIB, 5, 7, 3 * MIB] * 2)]
    for staging in STAGING:
        done = td.save_async([*state, torch.ones(5)], tmp_path / "a.pt", staging=staging)
        expected = [t.clone() for t in state]
        for tensor in state:
            tensor.add_(1)
        done.result(60)
        assert same(td.load(tmp_path / "a.pt"), [*expected, torch.ones(5)])


CAPTURE = """
import sys, threading, torch, torchdirect as td

path, staging, mode = sys.argv[1:]
state = {"w": torch.arange(20 << 20, dtype=torch.uint8, device="cuda")}
state |= {f"s{i}": torch.full((i,), i, device="cuda") for i in range(1, 9)}
td.save_async(state, path, staging=staging).result(60)
if mode == "global":
    td.release_staging()  # it is pinned again during the capture
x = torch.ones(1000, device="cuda")
began, go_on, failures, graph = threading.Event(), threading.Event(), [], torch.cuda.CUDAGraph()

def capture():
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            began.set()
            go_on.wait(30)
            x.add_(1)
    except BaseException as exc:
        failures.append(exc)

thread = threading.Thread(target=capture)
thread.start()
assert began.wait(30)
try:
    td.save_async(state, path, staging=staging).result(60)
finally:
    go_on.set()
    thread.join(30)
assert not failures, failures
graph.replay()
assert bool((x == 2).all())
loaded = td.load(path)
assert all(torch.equal(loaded[k], t) for k, t in state.items())
"""


@pytest.mark.parametrize("staging, mode", [("host", "global"), ("host", "thread_local"), ("device", "thread_local")])
def test_a_graph_can_be_captured_in_another_thread(staging: str, mode: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CAPTURE, str(tmp_path / "a.pt"), staging, mode]
    env = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)}
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]


OWN_CAPTURE = """
import sys, torch, torchdirect as td

state = {"w": torch.ones(1000, device="cuda")}
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    state["w"].add_(1)
    try:
        td.save_async(state, sys.argv[1])
    except RuntimeError as exc:
        assert "captures a CUDA graph" in str(exc), exc
    else:
        raise SystemExit("no error")
graph.replay()
assert bool((state["w"] == 2).all())
"""


def test_a_save_on_the_stream_that_captures_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWN_CAPTURE, str(tmp_path / "a.pt")]
    env = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)}
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    assert list(tmp_path.iterdir()) == []
