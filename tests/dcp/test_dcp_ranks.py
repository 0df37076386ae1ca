"""Distributed checkpoints of several ranks: the cases of `ranks.py`, all in one process group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcp.ranks import CASES

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(HERE / "ranks.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", CASES)
def test_on_four_ranks(case: str, failures: dict[str, str]) -> None:
    assert failures[case] == ""
