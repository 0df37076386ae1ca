"""A few seconds of coverage-guided fuzzing, and every input that once found something."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FUZZ = ROOT / "fuzz"


@pytest.mark.parametrize("target", ["zip", "pickle", "safetensors", "dcp"])
def test_fuzzing(target: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed (it has wheels for some versions of Python only)")
    command = [
        sys.executable, str(FUZZ / "fuzz_files.py"), target, "-max_total_time=3", "-rss_limit_mb=2000", "-timeout=10",
        str(tmp_path), str(FUZZ / "corpus" / target),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done " in done.stderr
