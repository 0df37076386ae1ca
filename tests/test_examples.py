"""The examples run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_raw_dump(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "raw_dump.py"), "--side", "700", "--directory", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "DirectFile AUTO: write" in done.stdout
    assert os.listdir(tmp_path) == []


def test_training_survives_the_death_of_a_rank() -> None:
    """Two ranks, one of them killed; three go on, to the losses of an unbroken run."""
    command = [sys.executable, str(ROOT / "examples" / "train_fsdp.py"), "--demonstrate", "--steps", "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"rank [01] of 2 was killed after step \d+; going on from step \d+ on 3 ranks", done.stdout)
    assert "20 losses" in done.stdout
