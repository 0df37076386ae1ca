"""Converting checkpoints, and the commands that look at files."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as theirs

import torchdirect as td
from checkpoints import OTHER
from torchdirect import conversion
from torchdirect.cli.main import main


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, torch.Tensor]:
    weight = torch.randn(300, 70)
    state = {"a": weight, "tied": weight, "turned": torch.randn(90, 40).t(), "view": weight[5:7], "n": torch.arange(7),
             "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "half": torch.randn(9).half()}  # fmt: skip
    td.save({"model": state, "epoch": 3}, tmp_path / "a.pt")
    return {f"model.{name}": tensor for name, tensor in state.items()}


@pytest.mark.parametrize("bound", [64 << 20, 4096])
@pytest.mark.parametrize("stock", [False, True])
def test_there_and_back(
    stock: bool, bound: int, saved: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_PIECE_BYTES", bound)
    if stock:
        torch.save(torch.load(tmp_path / "a.pt"), tmp_path / "a.pt")
    done = td.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert done.left_out == {"model.tied": "model.a"}
    assert done.tensors == len(saved) - 1
    loaded = theirs.load_file(tmp_path / "b.safetensors")
    assert loaded.keys() | {"model.tied"} == saved.keys()
    assert all(torch.equal(loaded[k], saved[k]) for k in loaded)
    td.convert(tmp_path / "b.safetensors", tmp_path / "c.pt")
    again = torch.load(tmp_path / "c.pt")
    assert all(torch.equal(again[k], saved[k]) for k in loaded)
    td.convert(tmp_path / "a.pt", tmp_path / "d.pt")
    kept = torch.load(tmp_path / "d.pt")
    assert kept["model.tied"].data_ptr() == kept["model.a"].data_ptr()
    for name in ("c.pt", "d.pt"):
        with zipfile.ZipFile(tmp_path / name) as archive:
            assert archive.testzip() is None


def test_other_dtypes_alignment_and_shards(saved: dict[str, torch.Tensor], tmp_path: Path) -> None:
    files = td.convert(
        tmp_path / "a.pt", tmp_path / "m", dtype=torch.bfloat16, align=True, max_shard_bytes="30kB"
    ).files
    assert len(files) > 2
    loaded = td.load_sharded(tmp_path / "m")
    for name, tensor in loaded.items():
        wanted = saved[name].to(torch.bfloat16) if saved[name].is_floating_point() else saved[name]
        assert torch.equal(tensor, wanted)
    for shard in files[1:]:
        with td.open(shard) as file:
            assert min(file.info(k).file_offset for k in file) % 4096 == 0
    td.convert(tmp_path / "m", tmp_path / "one.pt")
    assert torch.load(tmp_path / "one.pt").keys() == loaded.keys()


def test_memory_is_bounded(tmp_path: Path) -> None:
    td.save({f"t{i}": torch.randn(20_000_000) for i in range(5)}, tmp_path / "a.pt", durable=False)
    script = (
        "import resource, sys, torchdirect as td\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "td.convert(sys.argv[1], sys.argv[2], durable=False)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    for target in ("b.safetensors", "b.pt"):
        command = [sys.executable, "-c", script, str(tmp_path / "a.pt"), str(tmp_path / target)]
        environment = {**os.environ, "PYTHONPATH": str(Path(td.__file__).parents[1])}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert int(done.stdout) < 250, "MiB over the idle process, for 400 MB of tensors"


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    td.save({"q": OTHER["quantized"]()}, tmp_path / "q.pt")
    with pytest.raises(ValueError, match=r"q\.pt: 'q'.*quantized"):
        td.convert(tmp_path / "q.pt", tmp_path / "q.safetensors")
    td.save({"epoch": 3}, tmp_path / "e.pt")
    with pytest.raises(ValueError, match="holds no tensors"):
        td.convert(tmp_path / "e.pt", tmp_path / "e.safetensors")
    td.save({"a": torch.ones(2_000_000)}, tmp_path / "a.pt")
    (tmp_path / "old.safetensors").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        with pytest.raises(td.SaveError, match=r"old\.safetensors"):
            td.convert(tmp_path / "a.pt", tmp_path / "old.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "old.safetensors").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "e.pt", "old.safetensors", "q.pt"]


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def test_inspect(saved: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", tmp_path / "a.pt", "--sort", "bytes", "--limit", "2") == 0
    out = capsys.readouterr().out
    assert "model.a" in out
    assert "300 x 70" in out
    assert "and 6 more" in out
    assert "torch._utils._rebuild_tensor_v2" in out.replace("\n", "")
    assert run("inspect", tmp_path / "a.pt", "--filter", "*.n", "--json") == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    (tensor,) = shown["tensors"]
    assert (tensor["name"], tensor["dtype"], tensor["shape"], tensor["nbytes"]) == ("model.n", "int64", [7], 56)
    assert tensor["file_offset"] % 4096 == 0
    assert run("inspect", tmp_path / "none.pt") == 1
    assert "none.pt" in capsys.readouterr().err
    assert run("inspect", tmp_path / "a.pt", "--sort", "colour") == 2


def test_convert_command(saved: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors", "--dtype", "float16", "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert done["left_out"] == {"model.tied": "model.a"}
    assert theirs.load_file(tmp_path / "b.safetensors")["model.a"].dtype is torch.float16
    assert run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors") == 2
    assert run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors", "--force") == 0
    assert "model.tied is model.a" in capsys.readouterr().out
    assert run("convert", tmp_path / "a.pt", tmp_path / "c.safetensors", "--dtype", "int8") == 2
    assert run("convert", tmp_path / "none.pt", tmp_path / "c.safetensors") == 1
    assert not (tmp_path / "c.safetensors").exists()


@pytest.mark.parametrize("command", ["convert", "verify"])
def test_ctrl_c(
    command: str, saved: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchdirect.conversion.convert", interrupt)
    monkeypatch.setattr("torchdirect.verification.verify", interrupt)
    more = [tmp_path / "z.safetensors"] if command == "convert" else []
    assert run(command, tmp_path / "a.pt", *more) == 130
    assert capsys.readouterr().err == "torchdirect: interrupted\n"
