"""Distributed checkpoints in one process: both ways against PyTorch's own writer and reader."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.metadata import Metadata

import torchdirect as td
from dcp_states import blank, same, small, stock, varied

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def metadata_of(folder: Path) -> Metadata:
    with open(folder / ".metadata", "rb") as file:
        made: Metadata = pickle.load(file)
    return made


def loaded(folder: Path, like: Any, **options: Any) -> Any:
    state = blank(like)
    td.dcp.load(state, folder, **options)
    return state


def test_pytorch_reads_what_we_write(tmp_path: Path) -> None:
    state = varied(1)
    td.dcp.save(state, tmp_path / "made" / "here")
    found = blank(state)
    stock.load(found, checkpoint_id=tmp_path / "made" / "here")
    assert same(state, found)


def test_we_read_what_pytorch_writes(tmp_path: Path) -> None:
    state = varied(2)
    stock.save(state, storage_writer=stock.FileSystemWriter(tmp_path, thread_count=3))
    assert same(state, loaded(tmp_path, state))
    assert same(state, loaded(tmp_path, state, verify=True, num_threads=1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transfer_type": "CPU_ONLY", "chunk_bytes": 4096 * 16, "num_threads": 3},
        {"transfer_type": "CPU_CACHED_GPU", "durable": False},
        {"single_file_per_rank": False},
        {"thread_count": 2, "sync_files": False, "per_thread_copy_ahead": 5},
        {"checksum": False},
    ],
)
def test_round_trip(options: dict[str, Any], tmp_path: Path) -> None:
    state = varied(3)
    td.dcp.save(state, tmp_path, **options)
    assert same(state, loaded(tmp_path, state))
    theirs = blank(state)
    stock.load(theirs, checkpoint_id=tmp_path)
    assert same(state, theirs)


@pytest.mark.parametrize("transfer_type", ["CPU_ONLY", "CPU_CACHED_GPU", "AUTO"])
def test_loads_by_each_transfer_type_of_the_host(transfer_type: str, tmp_path: Path) -> None:
    state = varied(4)
    td.dcp.save(state, tmp_path)
    assert same(state, loaded(tmp_path, state, transfer_type=transfer_type, chunk_bytes=65536))
    report = td.last_transfer()
    assert report is not None and report.requested.name == transfer_type and report.path == str(tmp_path)
    if transfer_type != "AUTO":
        assert report.used is not None and report.used.name == transfer_type


def test_a_type_that_cannot_carry_it_is_refused_before_anything_counts(tmp_path: Path) -> None:
    td.dcp.save(small(1), tmp_path)
    with pytest.raises(td.TransferUnavailableError, match="no tensor is on a GPU"):
        td.dcp.save(small(2), tmp_path, transfer_type="GDS")
    with pytest.raises(td.TransferUnavailableError, match="no tensor is on a GPU"):
        loaded(tmp_path, small(1), transfer_type="GDS")
    assert same(small(1), loaded(tmp_path, small(1)))
    assert len(files(tmp_path)) == 2


def test_each_item_is_the_zip_that_pytorch_writes(tmp_path: Path) -> None:
    state = varied(5)
    td.dcp.save(state, tmp_path / "ours")
    stock.save(state, checkpoint_id=tmp_path / "theirs")

    def items(folder: Path) -> dict[Any, bytes]:
        stored = metadata_of(folder).storage_data
        return {
            index: (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
            for index, info in stored.items()
        }

    ours, theirs = items(tmp_path / "ours"), items(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for index, data in ours.items():
        with zipfile.ZipFile(io.BytesIO(data)) as mine, zipfile.ZipFile(io.BytesIO(theirs[index])) as other:
            assert mine.testzip() is None, index
            assert mine.namelist() == other.namelist(), index
            for name in mine.namelist():
                # PyTorch's writer keeps views conjugated and strides of what is expanded.
                if not name.endswith("serialization_id") and index.fqn not in ("conjugate", "expanded"):
                    assert mine.read(name) == other.read(name), (index, name)


def test_payload_of_large_items_lies_on_block_boundaries(tmp_path: Path) -> None:
    td.dcp.save(varied(6), tmp_path)
    for index, info in metadata_of(tmp_path).storage_data.items():
        if index.fqn in ("large", "view"):
            data = (tmp_path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                header = archive.getinfo("archive/data/0").header_offset
            extra = int.from_bytes(data[header + 28 : header + 30], "little")
            assert (info.offset + header + 30 + len("archive/data/0") + extra) % 4096 == 0


def test_a_view_stores_its_own_bytes_only(tmp_path: Path) -> None:
    flat = torch.arange(1_000_000.0)
    td.dcp.save({"a": flat[:50], "b": flat[50:100]}, tmp_path)
    assert sum((tmp_path / name).stat().st_size for name in files(tmp_path)) < 20_000
    assert same({"a": flat[:50], "b": flat[50:100]}, loaded(tmp_path, {"a": flat[:50], "b": flat[50:100]}))


def test_targets_of_another_dtype_or_layout_are_converted_as_pytorch_does(tmp_path: Path) -> None:
    source = {"x": torch.randn(300, 200), "y": torch.arange(5000), "z": torch.randn(40, 30)}
    td.dcp.save(source, tmp_path)

    def targets() -> dict[str, torch.Tensor]:
        return {
            "x": torch.zeros(200, 300, dtype=torch.float64).t(),
            "y": torch.zeros(5000, dtype=torch.bfloat16),
            "z": torch.zeros(80, 60)[::2, ::2],
        }

    ours, theirs = targets(), targets()
    td.dcp.load(ours, tmp_path)
    stock.load(theirs, checkpoint_id=tmp_path)
    assert same(ours, theirs)
    assert torch.equal(ours["x"].float(), source["x"])


def test_a_tensor_of_zeros_dimensions_and_one_of_none(tmp_path: Path) -> None:
    td.dcp.save({"a": torch.tensor(3.0), "b": torch.zeros(0)}, tmp_path)
    assert loaded(tmp_path, {"a": torch.tensor(0.0), "b": torch.zeros(0)})["a"] == 3


def test_converting_functions_of_pytorch(tmp_path: Path) -> None:
    state = {"a": torch.randn(300, 300), "n": {"b": torch.arange(5)}, "epoch": 3}
    td.dcp.save(state, tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "x.pt")
    assert same(state, torch.load(tmp_path / "x.pt"))
    torch_save_to_dcp(tmp_path / "x.pt", tmp_path / "again")
    assert same(state, loaded(tmp_path / "again", state))


def test_model_and_optimizer_states(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 30)).sum().backward()
        optimizer.step()
        return model, optimizer

    saved = trained(1)
    states = get_state_dict(*saved)
    td.dcp.save({"model": states[0], "optim": states[1]}, tmp_path)
    fresh = trained(2)
    model_state, optim_state = get_state_dict(*fresh)
    state: dict[str, Any] = {"model": model_state, "optim": optim_state}
    td.dcp.load(state, tmp_path)
    set_state_dict(*fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert same(dict(saved[0].state_dict()), dict(fresh[0].state_dict()))
    assert same(saved[1].state_dict()["state"], fresh[1].state_dict()["state"])


class Cast(DefaultSavePlanner):
    """A planner that makes tensors of its own."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        return made.bfloat16() if isinstance(made, torch.Tensor) else made


def test_tensors_that_a_planner_makes_go_into_files_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchdirect.dcp.writer._HELD_BYTES", 100_000)
    state = {f"t{i}": torch.full((20_000,), float(i)) for i in range(7)}
    td.dcp.save(state, tmp_path, planner=Cast())
    assert len(files(tmp_path)) == 5  # two of 40,000 bytes in each, and the metadata
    assert same(state, loaded(tmp_path, state))


@pytest.mark.skipif(not hasattr(stock.SavePlan, "usable") and "usable" not in stock.SavePlan.__annotations__,
                    reason="this PyTorch has no plan caching")  # fmt: skip
def test_a_cached_plan_does_not_write_over_the_files_of_the_checkpoint(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        before = set(files(tmp_path)) - {".metadata"}
        td.dcp.save(small(value), tmp_path, planner=planner)
        assert not before & set(files(tmp_path))
        assert same(small(value), loaded(tmp_path, small(value)))


def test_partial_loads_and_missing_keys(tmp_path: Path) -> None:
    td.dcp.save(small(1), tmp_path)
    assert same({"a": small(1)["a"]}, loaded(tmp_path, {"a": small(1)["a"]}))
    more: dict[str, Any] = {"a": torch.zeros(70_000), "z": torch.zeros(3)}
    td.dcp.load(more, tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert more["a"][0] == 1
    with pytest.raises(BaseException, match="Missing key"):
        td.dcp.load({"z": torch.zeros(3)}, tmp_path)


# --------------------------------------------------------------------------------------------------- async


@pytest.mark.parametrize("ours", [True, False])
def test_async_save_keeps_what_was_there_when_it_was_called(ours: bool, tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(4_000_000), "n": 3}
    if ours:
        future = td.dcp.async_save(state, tmp_path)
    else:
        future = stock.async_save(state, storage_writer=td.dcp.DirectWriter(tmp_path))
    state["w"].zero_()
    future.result()
    assert loaded(tmp_path, state)["w"].min() == 1


def test_async_saves_to_two_paths_and_to_one(tmp_path: Path) -> None:
    first, second = (td.dcp.async_save(small(v), tmp_path / f"{v}") for v in (1.0, 2.0))
    first.result(), second.result()
    for v in (1.0, 2.0):
        assert same(small(v), loaded(tmp_path / f"{v}", small(v)))
    futures = [td.dcp.async_save(small(v), tmp_path / "same") for v in (1.0, 2.0, 3.0)]
    errors = [future.exception() for future in futures]
    assert any(error is None for error in errors)
    assert all(error is None or "overtaken" in str(error) for error in errors)
    found = loaded(tmp_path / "same", small(0))
    assert any(same(found, small(v)) for v in (1.0, 2.0, 3.0)), "a mixture"


def test_async_save_fails_in_its_result(tmp_path: Path) -> None:
    td.dcp.save(small(1), tmp_path)
    future = td.dcp.async_save(small(2), tmp_path, overwrite=False)
    with pytest.raises(BaseException, match="overwrite=False"):
        future.result()
    assert same(small(1), loaded(tmp_path, small(1)))


# --------------------------------------------------------------------------------------------------- directory


def test_overwriting_leaves_nothing_of_the_old(tmp_path: Path) -> None:
    stock.save(small(1), storage_writer=stock.FileSystemWriter(tmp_path, thread_count=4))
    (tmp_path / "__7_0.distcp").write_bytes(b"of a larger save")
    (tmp_path / "mine.distcp").write_bytes(b"not ours")
    (tmp_path / "notes.txt").write_text("not ours")
    td.dcp.save(small(2), tmp_path)
    names = files(tmp_path)
    assert len(names) == 4 and {".metadata", "mine.distcp", "notes.txt"} < set(names)
    assert same(small(2), loaded(tmp_path, small(2)))
    stock.save(small(3), checkpoint_id=tmp_path)
    assert same(small(3), loaded(tmp_path, small(3)))
    td.dcp.save(small(4), tmp_path)
    assert len(files(tmp_path)) == 4


def test_no_overwriting_if_so_asked(tmp_path: Path) -> None:
    td.dcp.save(small(1), tmp_path, overwrite=False)
    before = files(tmp_path)
    with pytest.raises(td.SaveError, match="overwrite=False") as caught:
        td.dcp.save(small(2), tmp_path, overwrite=False)
    assert caught.value.errno == errno.EEXIST
    assert files(tmp_path) == before
    assert same(small(1), loaded(tmp_path, small(1)))


def test_saving_into_a_directory_whose_tensors_are_mapped(tmp_path: Path) -> None:
    td.dcp.save({"a": torch.arange(100_000.0)}, tmp_path)
    (info,) = metadata_of(tmp_path).storage_data.values()
    path = tmp_path / info.relative_path
    mapped = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    before = mapped.clone()
    td.dcp.save({"a": mapped}, tmp_path)
    assert torch.equal(mapped, before)
    assert same({"a": before}, loaded(tmp_path, {"a": before}))


def test_data_is_on_storage_before_the_metadata_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("fdatasync", "fsync", "rename", "unlink"):
        real = getattr(os, name)

        def noted(*arguments: Any, name: str = name, real: Any = real) -> Any:
            of = os.readlink(f"/proc/self/fd/{arguments[0]}") if isinstance(arguments[0], int) else str(arguments[-1])
            kind = "directory" if os.path.isdir(of) else "metadata" if ".metadata" in of else "data"
            order.append(f"{name} {kind}")
            return real(*arguments)

        monkeypatch.setattr(os, name, noted)
    td.dcp.save(small(1), tmp_path)
    td.dcp.save(small(2), tmp_path)
    once = [
        "fdatasync data",
        "rename data",
        "fsync directory",
        "fdatasync metadata",
        "rename metadata",
        "fsync directory",
    ]
    assert order == [*once, *once, "unlink data"]


def test_a_full_disk_leaves_the_old_checkpoint_and_no_files(tmp_path: Path) -> None:
    script = f"""
import resource, signal, warnings
warnings.simplefilter("ignore")
import torch, torchdirect as td
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    td.dcp.save({{"a": torch.zeros(1 << 20), "b": torch.ones(3)}}, {str(tmp_path)!r})
except td.SaveError as error:
    print(error.errno, error)
"""
    td.dcp.save(small(1), tmp_path)
    before = files(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith(f"{errno.EFBIG} {tmp_path}"), done.stdout + done.stderr
    assert files(tmp_path) == before
    assert same(small(1), loaded(tmp_path, small(1)))


def test_a_save_that_fails_in_its_last_step_removes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    td.dcp.save(small(1), tmp_path)
    before = files(tmp_path)

    def fails(path: str, data: bytes, *, durable: bool) -> None:
        raise td.SaveError(f"{path}: no space", errno.ENOSPC, path)

    monkeypatch.setattr("torchdirect.dcp.directory.write_metadata", fails)
    with pytest.raises(td.SaveError, match="no space"):
        td.dcp.save(small(2), tmp_path)
    assert files(tmp_path) == before
    assert same(small(1), loaded(tmp_path, small(1)))


# --------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "options",
    [
        {"_extensions": [object()]},
        {"serialization_format": "safetensors"},
        {"sync_files": True, "durable": False},
        {"thread_count": 2, "num_threads": 3},
        {"chunk_bytes": 5},
    ],
)
def test_what_the_writer_refuses(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(td.SettingsError):
        td.dcp.DirectWriter(tmp_path, **options)


def test_the_format_of_pytorchs_default_is_accepted(tmp_path: Path) -> None:
    if hasattr(filesystem, "SerializationFormat"):
        td.dcp.DirectWriter(tmp_path, serialization_format=filesystem.SerializationFormat.TORCH_SAVE)
        with pytest.raises(td.SettingsError):
            td.dcp.DirectWriter(tmp_path, serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    with pytest.raises(td.SettingsError, match="extensions"):
        td.dcp.DirectReader(tmp_path, object())


def test_settings_in_force_when_the_writer_is_made(tmp_path: Path) -> None:
    with td.settings(transfer_type="CPU_CACHED_GPU", durable=False):
        writer = td.dcp.DirectWriter(tmp_path)
    assert writer.settings.transfer_type is td.TransferType.CPU_CACHED_GPU and not writer.sync_files
    pickle.loads(pickle.dumps(writer))  # to a process that saves in the background


def test_reports_and_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    td.dcp.save(small(1), tmp_path, progress=lambda done, total: seen.append((done, total)))
    report = td.last_transfer()
    assert report is not None and report.operation == "save" and report.path == str(tmp_path)
    assert report.payload_bytes == 70_000 * 4 + 5 * 4 + 300_000 * 4 <= report.bytes
    assert seen
    td.dcp.load(blank({"t": "text"}) or {}, tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    json.dumps(str(td.last_transfer()))


def test_importing_torchdirect_imports_no_distributed_checkpoints() -> None:
    script = "import sys, torchdirect as td; td.load; td.verify; print('torch.distributed.checkpoint' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "False"


def test_a_process_that_saves_in_the_background(tmp_path: Path) -> None:
    script = f"""
import os, torch, torch.distributed as dist, torchdirect as td
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
    state = {{"w": torch.ones(1_000_000)}}
    future = td.dcp.async_save(state, "{tmp_path}/made", async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    state["w"].zero_()
    future.result()
    dist.destroy_process_group()
"""
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(files(tmp_path / "made")) == 2
    assert loaded(tmp_path / "made", {"w": torch.zeros(1_000_000)})["w"].min() == 1
