"""Saves and loads of GPU tensors on the host paths."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdirect as td
from checkpoints import PLAIN, same
from torchdirect import memory

pytestmark = pytest.mark.gpu
TYPES = ["AUTO", "CPU_GPU", "CPU_ASYNC_GPU", "CPU_CACHED_GPU"]
MIB = 1 << 20


def to_gpu(obj: Any) -> Any:
    if isinstance(obj, torch.Tensor):
        return obj.cuda()
    if isinstance(obj, dict):
        return type(obj)((k, to_gpu(v)) for k, v in obj.items())
    if isinstance(obj, (list, tuple)):
        return type(obj)(map(to_gpu, obj))
    return obj


@pytest.mark.parametrize("transfer_type", TYPES)
@pytest.mark.parametrize("name", ["large and small", "trained", "nested", "not contiguous", "bool, half, complex"])
def test_round_trip(name: str, transfer_type: str, tmp_path: Path) -> None:
    obj, path = to_gpu(PLAIN[name]()), tmp_path / "a.pt"
    td.save(obj, path, transfer_type=transfer_type, chunk_bytes=65536)
    assert same(torch.load(path), obj)
    assert same(td.load(path, transfer_type=transfer_type, chunk_bytes=65536), obj)
    torch.save(obj, path)
    assert same(td.load(path, transfer_type=transfer_type), obj)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("transfer_type", TYPES)
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 * MIB + 1, 40 * MIB, 70 * MIB + 5])
def test_sizes(nbytes: int, transfer_type: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    td.save([tensor, tensor.cpu()], path, transfer_type=transfer_type, durable=False)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    on_gpu, on_host = td.load(path, transfer_type=transfer_type)
    assert (on_gpu.device.type, on_host.device.type) == ("cuda", "cpu")
    assert torch.equal(on_gpu, tensor)
    assert torch.equal(on_host, tensor.cpu())


@pytest.mark.parametrize("location", ["cuda", "cuda:0", torch.device("cuda", 0), {"cpu": "cuda:0"}])
def test_host_files_load_to_the_gpu(location: Any, tmp_path: Path) -> None:
    state = PLAIN["large and small"]()
    td.save(state, tmp_path / "a.pt")
    loaded = td.load(tmp_path / "a.pt", map_location=location)
    assert same(loaded, to_gpu(state))


def test_a_callable_places_on_the_gpu(tmp_path: Path) -> None:
    state = PLAIN["large and small"]()
    td.save(state, tmp_path / "a.pt")
    loaded = td.load(tmp_path / "a.pt", map_location=lambda storage, _: storage.cuda())
    assert same(loaded, to_gpu(state))


def slow(stream: torch.cuda.Stream) -> None:
    """Keep a stream busy for about a tenth of a second."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("transfer_type", TYPES)
@pytest.mark.parametrize("nbytes", [100_000, 30 * MIB])
def test_a_save_waits_for_queued_kernels(nbytes: int, transfer_type: str, tmp_path: Path) -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    slow(stream)
    with torch.cuda.stream(stream):
        tensor.fill_(7)
        td.save(tensor, tmp_path / "a.pt", transfer_type=transfer_type, durable=False)
    assert bool((torch.load(tmp_path / "a.pt", map_location="cpu") == 7).all())
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("transfer_type", TYPES)
def test_a_load_is_ready_on_the_callers_stream_and_spares_memory_in_use(transfer_type: str, tmp_path: Path) -> None:
    path, numel = tmp_path / "a.pt", 8 * MIB
    td.save(torch.ones(numel, device="cuda"), path)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        old = torch.full((numel,), 5.0, device="cuda")
        slow(stream)
        copy = old.clone()
        del old  # its memory may be handed to the load while the copy is still queued
        loaded = td.load(path, transfer_type=transfer_type)
        total = loaded.sum()
    stream.synchronize()
    assert float(total) == numel
    assert bool((copy == 5).all())


@pytest.mark.parametrize("transfer_type", TYPES)
def test_streams_and_devices_of_the_caller_stay(transfer_type: str, tmp_path: Path) -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    threads = threading.active_count()
    with torch.cuda.stream(stream):
        td.save(torch.ones(5 * MIB, device="cuda"), tmp_path / "a.pt", transfer_type=transfer_type)
        td.load(tmp_path / "a.pt", transfer_type=transfer_type, num_threads=1)
        assert torch.cuda.current_stream() == stream
    assert threading.active_count() == threads


def test_pinned_results(tmp_path: Path) -> None:
    state = {"a": torch.randn(MIB), "b": torch.randn(3)}
    td.save(state, tmp_path / "a.pt")
    loaded = td.load(tmp_path / "a.pt", pin_memory=True)
    assert same(loaded, state)
    assert all(t.is_pinned() for t in loaded.values())


def test_cpu_only_refuses_gpu_tensors(tmp_path: Path) -> None:
    tensor = torch.ones(MIB, device="cuda")
    with pytest.raises(td.TransferUnavailableError, match=r"CPU_ONLY.*tensors on a GPU"):
        td.save(tensor, tmp_path / "a.pt", transfer_type="CPU_ONLY")
    assert list(tmp_path.iterdir()) == []


def test_out_of_gpu_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    td.save(torch.ones(64 * MIB), path, durable=False)
    torch.cuda.empty_cache()
    fraction = (torch.cuda.memory_reserved() + 32 * MIB) / torch.cuda.get_device_properties(0).total_memory
    fds = len(os.listdir("/proc/self/fd"))
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            td.load(path, map_location="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert memory.staging_pool._reserved == 0
    assert bool((td.load(path, map_location="cuda") == 1).all())


def test_saving_needs_no_gpu_memory_to_speak_of(tmp_path: Path) -> None:
    """Checksums are folded on the GPU where it has room, and by way of the host where it has not."""
    tensor = torch.randint(0, 255, (64 * MIB,), dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    fraction = (torch.cuda.memory_reserved() + 4 * MIB) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        td.save(tensor, tmp_path / "a.pt", durable=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_failing_transfer_leaves_nothing_behind(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, path = {"w": torch.ones(8 * MIB, device="cuda")}, tmp_path / "a.pt"
    td.save(state, path)
    name = "pwritev" if call == "save" else "preadv"
    real: Callable[..., int] = getattr(os, name)
    turn = iter(range(10_000))

    def fail(*arguments: Any) -> int:
        if next(turn) == 3:
            raise OSError(5, "Input/output error")
        return real(*arguments)

    threads = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with pytest.raises(td.SaveError if call == "save" else td.LoadError):
            if call == "save":
                td.save(state, path, chunk_bytes=MIB)
            else:
                td.load(path, chunk_bytes=MIB)
    assert threading.active_count() == threads
    assert memory.staging_pool._reserved == 0
    assert same(td.load(path), state)
    assert os.listdir(tmp_path) == ["a.pt"]


def test_several_gpus_in_one_object(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    state = [torch.full((3 * MIB,), float(i), device=f"cuda:{i}") for i in range(count)]
    td.save([*state, torch.ones(5)], tmp_path / "a.pt")
    assert same(td.load(tmp_path / "a.pt"), [*state, torch.ones(5)])


def test_safetensors_lazy_reads_and_loads_in_place(tmp_path: Path) -> None:
    state = {f"t{n}": torch.randn(n, 1000, device="cuda") for n in (1, 700, 5000)}
    for path in (tmp_path / "a.safetensors", tmp_path / "a.pt"):
        td.save(state, path)
        loaded = td.load(path, map_location="cuda")  # in the order of the file
        assert same({name: loaded[name] for name in state}, state)
        with td.open(path, device="cuda") as file:
            assert same({name: file[name] for name in state}, state)
            assert torch.equal(file.get_slice("t5000")[17:40, 3:900], state["t5000"][17:40, 3:900])
        half = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in state.items()}
        target = {name: torch.zeros_like(t) for name, t in state.items()}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        td.load_into(target, path)
        assert torch.cuda.max_memory_allocated() - before < 64 * MIB
        assert same(target, state)
        td.load_into(half, path)
        assert same(half, {name: t.bfloat16() for name, t in state.items()})
    td.save_sharded(state, tmp_path / "m", 8 * MIB)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        total = sum(t.sum() for t in td.load_sharded(tmp_path / "m", device="cuda").values())
    side.synchronize()
    assert torch.isfinite(torch.as_tensor(total))


CAPTURE = """
import sys, threading, torch, torchdirect as td

path, call, mode = sys.argv[1:]
state = {"w": torch.arange(20 << 20, dtype=torch.uint8, device="cuda")}
td.save(state, path)
td.release_staging()
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
    td.save(state, path) if call == "save" else td.load(path)
finally:
    go_on.set()
    thread.join(30)
assert not failures, failures
graph.replay()
assert bool((x == 2).all())
assert torch.equal(td.load(path)["w"], state["w"])
"""


@pytest.mark.parametrize("call, mode", [("save", "global"), ("load", "thread_local")])
def test_a_graph_can_be_captured_in_another_thread(call: str, mode: str, tmp_path: Path) -> None:
    """In the global mode a wait in any thread breaks a capture, and so does an allocation by PyTorch itself."""
    command = [sys.executable, "-c", CAPTURE, str(tmp_path / "a.pt"), call, mode]
    env = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)}
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr[-3000:]


def test_copies_fall_back_to_pytorchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchdirect.engines import streams

    monkeypatch.setattr(streams, "cuda_driver", lambda: None)
    monkeypatch.setattr(streams, "stream_pool", streams.StreamPool())
    state = {"w": torch.arange(20 * MIB, dtype=torch.uint8, device="cuda"), "s": torch.ones(5, device="cuda")}
    td.save(state, tmp_path / "a.pt")
    assert same(td.load(tmp_path / "a.pt"), state)


def test_a_copy_that_the_driver_refuses() -> None:
    from torchdirect.engines.cuda_driver import cuda_driver

    driver = cuda_driver()
    assert driver is not None
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"CUDA error \d+ while copying 8 bytes .*: \w+"):
        driver.to_device(1, 1, 8, torch.cuda.current_stream().cuda_stream)
    assert float(torch.ones(2, device="cuda").sum()) == 2
