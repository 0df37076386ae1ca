"""A save struck at every file-system call: the old or the new checkpoint is whole, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EVERYTHING = "save;save, not durable;save, page cache;save, small;safetensors;shards;save_async;rotation;convert;dcp"


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the shim needs a C compiler (gcc), and none was found")
    target = tmp_path_factory.mktemp("shim") / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", "-o", str(target)]
    subprocess.run([*command, str(HERE / "shim.c"), "-ldl"], check=True)
    return target


def strike(shim: Path, what: str, scenarios: str, step: int = 1) -> dict[str, Any]:
    environment = {**os.environ, "LD_PRELOAD": str(shim), "STRIKE_SHIM": str(shim), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(HERE / "driver.py"), what, scenarios, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["wrong"] == [], f"{len(result['wrong'])} strikes went wrong; {done.stderr[-2000:]}"
    return result


def test_killed_at_every_call(shim: Path) -> None:
    strikes = strike(shim, "SIGKILL", f"{EVERYTHING};dcp, files")["strikes"]
    assert len(strikes) == 22
    assert all(count >= 5 for count in strikes.values()), "the shim sees the calls"


@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
def test_interrupted_at_every_call(signal: str, shim: Path) -> None:
    strike(shim, signal, "save;save, small;shards;rotation;dcp")


@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EDQUOT", "EROFS", "EMFILE", "EINTR"])
def test_every_call_fails_once(error: str, shim: Path) -> None:
    strike(shim, error, EVERYTHING if error == "EIO" else "save;shards;dcp", 2)
