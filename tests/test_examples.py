"""The examples run as they are."""

from __future__ import annotations

import os
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
