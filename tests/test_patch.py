"""A program's own calls on torchdirect's road."""

from __future__ import annotations

import inspect
import io
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import torchdirect as td
from checkpoints import same
from torchdirect import originals
from torchdirect.cli.main import main

STATE = {"a": torch.arange(400_000.0), "b": torch.ones(3)}


def road() -> str:
    report = td.last_transfer()
    assert report is not None
    return report.road


def test_calls_take_our_road_and_come_back(tmp_path: Path) -> None:
    with td.patch_torch():
        assert inspect.signature(torch.load) == inspect.signature(originals.load)
        torch.save(STATE, tmp_path / "a.pt")
        assert road() == "torchdirect"
        assert same(torch.load(tmp_path / "a.pt", "cpu"), STATE)
        assert road() == "torchdirect"
        torch.save(STATE, str(tmp_path / "b.pt"), pickle, 3)
        assert same(torch.load(str(tmp_path / "b.pt"), map_location={"cpu": "cpu"}, weights_only=True), STATE)
    assert torch.save is originals.save
    assert torch.load is originals.load


def test_what_we_cannot_carry_passes_through(tmp_path: Path) -> None:
    with td.patch_torch():
        buffer = io.BytesIO()
        torch.save(STATE, buffer)
        buffer.seek(0)
        assert same(torch.load(buffer), STATE)
        with open(tmp_path / "f.pt", "wb") as file:
            torch.save(STATE, file)
        with open(tmp_path / "f.pt", "rb") as file:
            assert same(torch.load(file), STATE)
        torch.save(STATE, tmp_path / "l.pt", _use_new_zipfile_serialization=False)
        assert same(torch.load(tmp_path / "l.pt"), STATE)
        assert road() == "torch"
        assert same(torch.load(tmp_path / "f.pt", mmap=True), STATE)
        with pytest.raises(FileNotFoundError):
            torch.load(tmp_path / "none.pt")
        with pytest.raises(pickle.UnpicklingError):
            torch.save({"f": pytest.fail}, tmp_path / "g.pt")
            torch.load(tmp_path / "g.pt")
        with torch.serialization.safe_globals([Path]), mock.patch("torch.load", side_effect=KeyError) as replaced:
            with pytest.raises(KeyError):
                torch.load("x")
            assert replaced.call_count == 1
        assert same(torch.load(tmp_path / "f.pt"), STATE)


def test_patches_overlap(tmp_path: Path) -> None:
    first, second = td.patch_torch(), td.patch_torch()
    first.undo()
    first.undo()
    assert torch.save is not originals.save
    second.undo()
    assert torch.save is originals.save
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(5):
                with td.patch_torch():
                    torch.save(STATE, tmp_path / f"{number}.pt")
                    assert same(torch.load(tmp_path / f"{number}.pt"), STATE), i
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert torch.load is originals.load


def test_somebody_elses_patch_stays() -> None:
    patch = td.patch_torch()
    theirs: Any = lambda *_: None  # noqa: E731
    torch.save = theirs
    try:
        patch.undo()
        assert torch.save is theirs
    finally:
        torch.save = originals.save


def test_the_command_runs_a_program(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("NAME = 'out.pt'\n")
    (tmp_path / "train.py").write_text(
        "import sys, torch, helper\n"
        "assert __name__ == '__main__'\n"
        "torch.save({'w': torch.ones(400_000)}, sys.argv[2])\n"
        "import torchdirect\n"
        "print(sys.argv[1:], torchdirect.last_transfer().road)\n"
        "sys.exit(3)\n"
    )
    command = [sys.executable, "-m", "torchdirect", "run", str(tmp_path / "train.py"), "--flag", str(tmp_path / "o.pt")]
    environment = {"PYTHONPATH": str(Path(td.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip().endswith("torchdirect")
    assert "--flag" in done.stdout
    assert main(["run", str(tmp_path / "none.py")]) == 2
