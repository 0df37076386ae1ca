"""`CheckpointManager`: what it keeps, in which order it works, and what it finds after a crash."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import torchdirect as td
from checkpoints import same
from torchdirect import memory, pending, publish
from torchdirect.manager import name_of, to_delete

ROOT = Path(__file__).parents[1]


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300_000,), value), "b": torch.full((3,), value), "step": int(value)}


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path: Path) -> Iterator[None]:
    pending.writer.drain()
    before = memory.snapshot_pool._reserved
    yield
    pending.writer.drain()
    gc.collect()
    assert memory.snapshot_pool._reserved == before
    assert [p for p in tmp_path.rglob("*") if "tmp-torchdirect" in p.name] == []


def damage(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(500_000)
        file.write(b"\xff" * 100)


# ------------------------------------------------------------------------------------------------------------ keeping


def test_saves_by_step_and_keeps_the_last(tmp_path: Path) -> None:
    manager = td.CheckpointManager(tmp_path / "c", keep_last=2, keep_every=4)
    assert manager.latest() is None
    assert manager.load_latest() is None
    for step in range(1, 8):
        future = manager.save(step, state(step))
        assert isinstance(future, td.PendingSave)
    manager.wait()
    assert manager.steps() == [4, 6, 7]
    assert manager.latest() == 7
    assert sorted(os.listdir(tmp_path / "c")) == [name_of(step) for step in (4, 6, 7)]
    found = manager.load_latest()
    assert found is not None
    assert (found.step, found.path) == (7, manager.path(7))
    assert same(found.state, state(7))
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint of step 5.*4, 6, 7"):
        manager.path(5)


def test_keeps_all_without_a_limit_and_ignores_what_is_not_its_own(tmp_path: Path) -> None:
    for name in ("notes.txt", "step-x.pt", "step-00000001.pt.bak", "best.pt"):
        (tmp_path / name).touch()
    with td.CheckpointManager(tmp_path, keep_last=None) as manager:
        for step in range(4):
            manager.save(step, state(step))
    assert manager.steps() == [0, 1, 2, 3]
    with td.CheckpointManager(tmp_path, keep_last=1, in_background=False, durable=False) as manager:
        manager.save(4, state(4))
        assert manager.steps() == [4]
    assert len(os.listdir(tmp_path)) == 5


@given(
    saved=st.lists(st.integers(0, 50), unique=True, min_size=1),
    keep_last=st.integers(1, 8) | st.none(),
    keep_every=st.integers(1, 10) | st.none(),
)
def test_what_goes(saved: list[int], keep_last: int | None, keep_every: int | None) -> None:
    gone = to_delete(saved, keep_last, keep_every)
    kept = [step for step in saved if step not in gone]
    assert kept[-1] == saved[-1]
    assert kept[-(keep_last or len(saved)) :] == saved[-(keep_last or len(saved)) :]
    for step in gone:
        assert keep_every is None or step % keep_every
    if keep_every is None and keep_last is not None:
        assert len(kept) == min(keep_last, len(saved))


def test_after_going_back_the_new_ones_are_kept(tmp_path: Path) -> None:
    with td.CheckpointManager(tmp_path, keep_last=3) as manager:
        for step in (100, 200, 300):
            manager.save(step, state(step))
    with td.CheckpointManager(tmp_path, keep_last=2) as manager:
        manager.save(150, state(150))
        manager.wait()
        assert manager.steps() == [150, 300]
        manager.save(200, state(200.5))
    assert manager.steps() == [150, 200]


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    with td.CheckpointManager(tmp_path, keep_last=1) as manager:
        manager.save(5, state(1))
        manager.save(5, state(2))
    found = manager.load_latest()
    assert found is not None
    assert found.state["step"] == 2
    assert os.listdir(tmp_path) == [name_of(5)]


@pytest.mark.parametrize("bad", [{"keep_last": 0}, {"keep_every": -1}, {"keep_last": True}, {"stagging": "host"},
                                 {"staging": "disk"}, {"distributed": True}])  # fmt: skip
def test_bad_arguments(bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(td.SettingsError):
        td.CheckpointManager(tmp_path, **bad)
    with pytest.raises(ValueError, match="-1"):
        td.CheckpointManager(tmp_path).save(-1, {})


# ---------------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("durable", [True, False])
def test_an_old_one_goes_only_when_the_new_one_is_on_storage(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = td.CheckpointManager(tmp_path, keep_last=1, durable=durable)
    manager.save(1, state(1))
    manager.wait()
    calls: list[str] = []

    def record(name: str) -> None:
        real = getattr(os, name)

        def call(what: Any, *arguments: Any, **keywords: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
            kind = "directory" if os.path.isdir(path) else "temporary" if "tmp-torchdirect" in path else "file"
            if str(tmp_path) in path:
                calls.append(f"{name} {kind}")
            return real(what, *arguments, **keywords)

        monkeypatch.setattr(os, name, call)

    for name in ("fdatasync", "fsync", "rename", "unlink"):
        record(name)
    manager.save(2, state(2))
    manager.wait()
    before = ["fdatasync temporary", "rename temporary", "fsync directory"] if durable else ["rename temporary"]
    assert calls == [*before, "fsync file", "fsync directory", "unlink file"]
    assert manager.steps() == [2]


def test_a_save_that_fails_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = td.CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state(1))
    manager.wait()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        future = manager.save(2, state(2))
        with pytest.raises(td.SaveError, match="No space left"):
            manager.wait()
        assert isinstance(future.exception(), td.SaveError)
        manager.save(3, state(3))
        with pytest.raises(td.SaveError, match=r"step-00000003\.pt"):
            manager.save(4, state(4))
    assert manager.steps() == [1]
    manager.save(5, state(5))
    manager.wait()
    assert manager.steps() == [5]


@pytest.mark.parametrize("name", ["fsync", "unlink"])
def test_a_deletion_that_fails_is_no_failed_save(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = td.CheckpointManager(tmp_path, keep_last=1, durable=False)
    manager.save(1, state(1))
    manager.wait()

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        manager.save(2, state(2))
        manager.wait()
    assert manager.steps() == [1, 2]
    assert any("Input/output error" in message for message in caplog.messages)


def test_leaving_the_block_does_not_hide_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "c").mkdir()
    with pytest.raises(ZeroDivisionError), td.CheckpointManager(tmp_path / "c") as manager:
        (tmp_path / "c").rmdir()
        manager.save(1, state(1))
        raise ZeroDivisionError
    assert any("the last save failed" in message for message in caplog.messages)


def test_a_second_save_waits_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = publish.Replacement.commit

    def slowly(self: publish.Replacement) -> None:
        time.sleep(0.3)
        real(self)

    monkeypatch.setattr(publish.Replacement, "commit", slowly)
    manager = td.CheckpointManager(tmp_path, pending="refuse")
    manager.save(1, state(1))
    with pytest.raises(td.SavePendingError, match="has not ended"):
        manager.save(2, state(2))
    manager.wait()
    manager.save(2, state(2))
    manager.wait()
    waiting = td.CheckpointManager(tmp_path)
    first = waiting.save(3, state(3))
    waiting.save(4, state(4))
    assert first.done()
    waiting.wait()
    assert waiting.steps() == [2, 3, 4]


# ----------------------------------------------------------------------------------------------------------- resuming


def test_a_damaged_one_is_passed_over_and_named(tmp_path: Path) -> None:
    with td.CheckpointManager(tmp_path, keep_last=None) as manager:
        for step in (1, 2, 3, 4, 5):
            manager.save(step, state(step))
    damage(tmp_path / name_of(5))
    (tmp_path / name_of(4)).write_bytes(b"")
    (tmp_path / name_of(3)).write_bytes((tmp_path / name_of(3)).read_bytes()[:70_000])
    (tmp_path / name_of(2)).write_text("no checkpoint")
    manager = td.CheckpointManager(tmp_path, keep_last=1)
    with pytest.warns(td.BrokenCheckpointWarning) as caught:
        found = manager.load_latest()
    assert found is not None
    assert found.step == 1
    assert [name_of(5 - i) in str(w.message) for i, w in enumerate(caught)] == [True] * 4
    manager.save(6, state(6))
    manager.wait()
    assert manager.steps() == [2, 3, 4, 5, 6]  # damaged ones are neither counted nor deleted
    manager.save(5, state(5))
    manager.wait()
    assert manager.steps() == [2, 3, 4, 5]


def test_a_run_does_not_begin_anew_unnoticed(tmp_path: Path) -> None:
    with td.CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
    damage(tmp_path / name_of(1))
    with (
        pytest.warns(td.BrokenCheckpointWarning),
        pytest.raises(td.CorruptCheckpointError, match=r"none of its 1 checkpoints.*step-00000001"),
    ):
        manager.load_latest()


class Own:
    pass


def test_a_mistake_of_the_caller_is_no_damage(tmp_path: Path) -> None:
    with td.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"own": Own(), "w": torch.ones(300_000)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Exception, match=r"[Ww]eights.only"):
            manager.load_latest()
        assert manager.load_latest(weights_only=False) is not None
        with pytest.raises(TypeError, match="Leave `state` out"):
            manager.load_latest({})


LOOP = """
import os, signal, sys, threading, torch, torchdirect as td
steps, device = 400, "cpu"
torch.manual_seed(0)
data = torch.randn(400, 8, 32)

def train(model, optimizer, step):
    optimizer.zero_grad()
    (model(data[step]) - data[step].sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    if step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_loop_in_the_documentation_survives_a_kill(tmp_path: Path) -> None:
    block = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)[0]
    script = LOOP + block + "\nprint([p.tolist() for p in model.parameters()], found and found.step)"

    def run(folder: str, kill_at: int) -> subprocess.CompletedProcess[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [sys.executable, "-c", script, str(kill_at)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        return subprocess.run(
            command, cwd=tmp_path / folder, env=environment, capture_output=True, text=True, check=False, timeout=60
        )

    unbroken = run("a", -1)
    assert unbroken.returncode == 0, unbroken.stderr
    assert run("b", 263).returncode == -signal.SIGKILL
    resumed = run("b", -1)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.split("]] ")[0].rpartition(" ")[0] == unbroken.stdout.split("]] ")[0].rpartition(" ")[0]
    assert int(resumed.stdout.split()[-1]) in (239, 249, 259)
    names = [name_of(step) for step in (379, 389, 399)]
    assert sorted(os.listdir(tmp_path / "b" / "checkpoints")) == names


# ---------------------------------------------------------------------------------------------------------- many ranks


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_directories(tmp_path: Path) -> None:
    manager = td.CheckpointManager(tmp_path / "c", keep_last=2)
    for step in (1, 2, 3):
        manager.save(step, {"w": torch.full((1000,), float(step))})
    manager.wait()
    assert manager.steps() == [2, 3]
    assert sorted(os.listdir(tmp_path / "c")) == ["step-00000002", "step-00000003"]
    target = {"w": torch.zeros(1000)}
    found = manager.load_latest(target)
    assert found is not None
    assert found.step == 3
    assert bool((target["w"] == 3).all())
    with pytest.raises(TypeError, match="give it as `state`"):
        manager.load_latest()


@pytest.mark.usefixtures("group")
def test_a_directory_that_is_saved_again_stays_until_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = td.CheckpointManager(tmp_path / "c", keep_last=1)
    manager.save(1, {"w": torch.ones(1000)})
    manager.wait()
    real = os.rename

    def rename(source: Any, target: Any, **keywords: Any) -> None:
        if os.path.basename(target) == ".metadata":
            raise OSError(5, "Input/output error")
        real(source, target, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        patch.setattr(Path, "rename", lambda self, target: rename(self, target))
        manager.save(1, {"w": torch.full((1000,), 2.0)})
        with pytest.raises(td.SaveError, match="Input/output error"):
            manager.wait()
    assert manager.steps() == [1]
    target = {"w": torch.zeros(1000)}
    assert manager.load_latest(target) is not None
    assert bool((target["w"] == 1).all())
    manager.save(1, {"w": torch.full((1000,), 3.0)})
    manager.wait()
    assert os.listdir(tmp_path / "c") == ["step-00000001"]
    assert manager.load_latest(target) is not None
    assert bool((target["w"] == 3).all())


@pytest.mark.usefixtures("group")
def test_what_dead_saves_and_deletions_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    (folder / ".step-00000001.deleted").mkdir(parents=True)
    (folder / ".step-00000001.deleted" / "__0_0.distcp").touch()
    dcp_save({"w": torch.ones(3)}, checkpoint_id=folder / "step-00000002")
    (folder / "step-00000002" / ".metadata").unlink()
    manager = td.CheckpointManager(folder, keep_last=1)
    assert manager.steps() == []
    assert manager.load_latest({"w": torch.ones(3)}) is None
    manager.save(3, {"w": torch.ones(3)})
    manager.wait()
    assert os.listdir(folder) == ["step-00000003"]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("how", ["metadata cut", "data gone"])
def test_a_damaged_directory_is_passed_over(how: str, tmp_path: Path) -> None:
    with td.CheckpointManager(tmp_path / "c") as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((1000,), float(step))})
    metadata, data = sorted((tmp_path / "c" / "step-00000002").iterdir())
    if how == "metadata cut":
        metadata.write_bytes(metadata.read_bytes()[:50])
    else:
        data.unlink()
    target = {"w": torch.zeros(1000)}
    with pytest.warns(td.BrokenCheckpointWarning, match="step-00000002"):
        found = manager.load_latest(target)
    assert found is not None
    assert found.step == 1
    assert bool((target["w"] == 1).all())
    (tmp_path / "c" / "step-00000002" / ".metadata").unlink()
    with pytest.raises(BaseException, match="other"):  # PyTorch's is no Exception
        manager.load_latest({"other": torch.zeros(1000)})


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.usefixtures("group")
def test_saves_in_the_foreground(distributed: bool, tmp_path: Path) -> None:
    manager = td.CheckpointManager(tmp_path / "c", keep_last=1, distributed=distributed, in_background=False)
    before = memory.snapshot_pool.nbytes
    for step in (1, 2):
        assert manager.save(step, {"w": torch.full((1000,), float(step))}).done()
        assert manager.steps() == [step]
    assert memory.snapshot_pool.nbytes == before, "it makes no copy"
    failing = td.CheckpointManager(
        tmp_path / "c", in_background=False, transfer_type="GDS", distributed=distributed, keep_last=1
    )
    with pytest.raises(td.TransferUnavailableError):
        failing.save(3, {"w": torch.ones(1_000_000)})
    failing.wait()
    assert manager.steps() == [2]


@pytest.mark.usefixtures("group")
def test_files_of_rank_0(tmp_path: Path) -> None:
    with td.CheckpointManager(tmp_path / "c", distributed=False) as manager:
        assert isinstance(manager.save(1, state(1)), td.PendingSave)
    assert os.listdir(tmp_path / "c") == [name_of(1)]
