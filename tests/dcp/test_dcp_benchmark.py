"""The benchmark of distributed checkpoints runs as its docstring says, on a small state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchdirect import system

ROOT = Path(__file__).parents[2]


def test_one_round(tmp_path: Path) -> None:
    if system.file_system(tmp_path).type == "tmpfs":
        pytest.skip("the benchmark needs files that can be dropped from the page cache, and tmpfs has none")
    output = tmp_path / "results.json"
    command = [
        sys.executable, str(ROOT / "benchmarks" / "distributed.py"), "--directory", str(tmp_path), "--gb", "0.05",
        "--tensors", "5", "--rounds", "1", "--output", str(output),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert found["ranks"] == 1 and found["bytes"] > 4e7
    names = [row[0] for row in found["table"]]
    for what in ("save, durable", "load cold", "load warm"):
        assert {f"{what}: of the ceiling", f"{what}: over PyTorch"} <= set(names)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
