"""Child processes: none is waited for without a bound, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from torchdirect.cufile import child

_SLEEP = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(60)"]


def test_a_child_that_ends() -> None:
    ended = child.run(
        [sys.executable, "-S", "-c", "import os; os.write(1, b'out'); os.write(2, b'err'); os._exit(3)"], 30.0
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, b"out", b"err")


def test_a_child_that_hangs_is_killed() -> None:
    ended = child.run(_SLEEP, 0.5)
    assert ended.returncode is None and ended.stdout == b"up\n"


def test_a_grandchild_that_holds_the_pipes_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_GRACE", 0.1)
    start = time.monotonic()
    ended = child.run(["sh", "-c", "sleep 5 & echo $!; sleep 60"], 0.3)
    assert ended.returncode is None and time.monotonic() - start < 4
    os.kill(int(ended.stdout), signal.SIGKILL)


def test_ctrl_c_kills_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted: list[subprocess.Popen[bytes]] = []
    communicate = subprocess.Popen.communicate

    def interrupt_once(self: subprocess.Popen[bytes], *arguments: float, **options: float) -> tuple[bytes, bytes]:
        if not interrupted:
            interrupted.append(self)
            raise KeyboardInterrupt
        return communicate(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        child.run(_SLEEP, 30.0)
    assert interrupted[0].returncode == -signal.SIGKILL


def test_python_works_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "mine.json")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    program = """
import os, signal, sys
log = os.environ["CUFILE_LOGFILE_PATH"]
assert os.path.dirname(log) == os.getcwd() and 0 < signal.alarm(0) <= 35
open(log, "w").write(" 01:02 [pid=1] ERROR  cufio-cuda:140 no libcuda\\n x ERROR cufio:1 later\\n")
print(os.environ["CUFILE_ENV_PATH_JSON"], os.environ["EXTRA"], sys.argv[1:])
"""
    ended = child.python(program, ["a", "b"], 30.0, environment={"EXTRA": "1"})
    assert ended.stdout.decode() == f"{tmp_path}/mine.json 1 ['a', 'b']\n", ended.stderr
    assert ended.logged == "cufio-cuda:140 no libcuda" and os.listdir(tmp_path) == []


def test_a_frozen_program_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(OSError, match="no Python interpreter"):
        child.python("", [], 1.0)


def test_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(FileNotFoundError):
        child.python("", [], 1.0)
