"""Distributed checkpoints of GPU tensors, both ways against PyTorch's own writer and reader."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdirect as td
from dcp_states import blank, same, stock, varied

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
TYPES = ["AUTO", "CPU_GPU", "CPU_ASYNC_GPU", "CPU_CACHED_GPU"]
MIB = 1 << 20


def to_gpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: to_gpu(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_gpu(item) for item in value]
    return value.detach().cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("transfer_type", TYPES)
def test_round_trip(transfer_type: str, tmp_path: Path) -> None:
    state = to_gpu(varied(1))
    td.dcp.save(state, tmp_path, transfer_type=transfer_type, chunk_bytes=65536)
    for load in (
        lambda found: td.dcp.load(found, tmp_path, transfer_type=transfer_type, chunk_bytes=65536),
        lambda found: td.dcp.load(found, tmp_path, verify=True),
        lambda found: stock.load(found, checkpoint_id=tmp_path),
    ):
        found = blank(state)
        load(found)
        assert same(state, found)
    assert td.verify(tmp_path).unchecked == ()


def test_we_read_what_pytorch_writes(tmp_path: Path) -> None:
    state = to_gpu(varied(2))
    stock.save(state, checkpoint_id=tmp_path)
    found = blank(state)
    td.dcp.load(found, tmp_path)
    assert same(state, found)
    on_host = blank(varied(2))
    td.dcp.load(on_host, tmp_path)
    assert same(varied(2), on_host)


@pytest.mark.parametrize("transfer_type", ["GDS", "GPU_ASYNC", "GPU_BATCH"])
def test_by_cufile(transfer_type: str, tmp_path: Path) -> None:
    state = {"a": torch.randn(1500, 700, device="cuda"), "b": torch.randn(10, device="cuda")}
    try:
        td.dcp.save(state, tmp_path, transfer_type=transfer_type)
    except td.TransferUnavailableError as error:
        pytest.skip(f"cuFile cannot carry files here: {error}")
    found = blank(state)
    td.dcp.load(found, tmp_path, transfer_type=transfer_type)
    assert same(state, found)


def test_items_say_cpu_as_those_of_pytorch_do(tmp_path: Path) -> None:
    td.dcp.save({"a": torch.ones(5, device="cuda")}, tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    data = path.read_bytes()
    assert b"cuda" not in data and b"cpu" in data


def test_the_work_that_is_queued_comes_first(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        tensor = torch.zeros(64 * MIB // 4, device="cuda")
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        tensor += 1
        td.dcp.save({"a": tensor}, tmp_path, durable=False)
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        tensor.zero_()
        td.dcp.load({"a": tensor}, tmp_path)
        assert bool((tensor == 1).all())


def test_the_snapshot_of_async_save_is_as_of_the_call(tmp_path: Path) -> None:
    tensor = torch.ones(64 * MIB // 4, device="cuda")
    future = td.dcp.async_save({"a": tensor}, tmp_path)
    tensor.zero_()
    future.result()
    td.dcp.load({"a": tensor}, tmp_path)
    assert bool((tensor == 1).all())


def test_neither_a_second_copy_on_the_gpu_nor_one_on_the_host(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(64 * MIB // 4, device="cuda") for i in range(8)}
    td.dcp.save(state, tmp_path)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    td.dcp.save(state, tmp_path)
    td.dcp.load(state, tmp_path)
    assert torch.cuda.max_memory_allocated() - before < 100 * MIB


def test_targets_of_another_dtype_or_layout(tmp_path: Path) -> None:
    source = {"x": torch.randn(3000, 2000, device="cuda"), "y": torch.arange(5000, device="cuda")}
    td.dcp.save(source, tmp_path)
    found = {
        "x": torch.zeros(2000, 3000, dtype=torch.float64, device="cuda").t(),
        "y": torch.zeros(5000, dtype=torch.bfloat16, device="cuda"),
    }
    td.dcp.load(found, tmp_path)
    assert torch.equal(found["x"].float(), source["x"]) and torch.equal(found["y"], source["y"].bfloat16())
