"""The package's names: each is there, each is typed, and few of them cost anything at import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchdirect as td


@pytest.mark.parametrize("name", td.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(td, name) is getattr(td, name)
    assert name in dir(td)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(td.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        (node.module.rpartition(".")[2], alias.asname or alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "torchdirect"
        for alias in node.names
    }
    assert typed == {(module, name) for module, names in td._MODULES.items() for name in names}
    modules = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(td.__all__) <= modules | {"open"}


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="'torchdirect' has no attribute 'nothing'"):
        _ = td.nothing


def test_a_load_imports_neither_other_formats_nor_the_binding_of_libcufile(tmp_path: Path) -> None:
    script = (
        "import sys, torch, torchdirect as td\n"
        "td.save({'w': torch.ones(8)}, sys.argv[1]); td.load(sys.argv[1])\n"
        "print(sorted(m for m in sys.modules if m.startswith('torchdirect.')))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.pt")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout))
    assert "torchdirect.checkpoint" in loaded
    assert not loaded & {f"torchdirect.{m}" for m in ("cufile", "safetensors", "direct_file", "sharded", "doctor")}
