"""One of two ranks is killed at every step of a save that the other ranks can see: the old or the new one is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcp.killed import MOMENTS

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(HERE / "killed.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed(moment: str, wrong: dict[str, str]) -> None:
    assert wrong[moment] == ""
