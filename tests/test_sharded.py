"""Checkpoints in many files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import torchdirect as td
from checkpoints import same
from torchdirect import sharded

State = dict[str, torch.Tensor]


@pytest.fixture
def state() -> State:
    return {f"model.layers.{i}.weight": torch.randn(100, 50 + i) for i in range(10)}


def equal(a: State, b: State) -> bool:
    return list(a) == list(b) and all(same(a[k], b[k]) for k in b)


def test_round_trip_in_hugging_faces_layout(state: State, tmp_path: Path) -> None:
    files = td.save_sharded(state, tmp_path / "m", 70_000)
    index = json.loads((tmp_path / "m" / sharded.SAFETENSORS_INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    assert set(index["weight_map"]) == set(state)
    assert sorted(os.listdir(tmp_path / "m")) == sorted(os.path.basename(f) for f in files)
    assert "model-00001-of-00004.safetensors" in os.listdir(tmp_path / "m")
    assert equal(td.load_sharded(tmp_path / "m"), dict(sorted(state.items())))
    with td.open(files[1]) as shard:
        assert shard.metadata() == {"format": "pt"}
    report = td.last_transfer()
    assert report is not None
    assert report.path.endswith("index.json")


def test_a_small_checkpoint_is_one_file(state: State, tmp_path: Path) -> None:
    td.save_sharded(state, tmp_path, 50_000)
    assert td.save_sharded(state, tmp_path) == [str(tmp_path / "model.safetensors")]
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert td.load_sharded(tmp_path).keys() == state.keys()


def test_an_overwrite_counts_at_once(state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever moment a save ends at, the directory holds the old checkpoint or the new one."""
    td.save_sharded(state, tmp_path, 70_000)
    other = {name: tensor + 1 for name, tensor in state.items()}
    real = os.replace
    for stop in range(1, 8):
        calls = iter(range(100))

        def fail(*arguments: object, stop: int = stop, calls: object = calls) -> None:
            if next(calls) == stop:  # type: ignore[call-overload]
                raise OSError(5, "Input/output error")
            real(*arguments)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            patch.setattr(os, "rename", fail)
            try:
                td.save_sharded(other, tmp_path, 70_000)
            except OSError:
                loaded = td.load_sharded(tmp_path)
                assert all(torch.equal(loaded[k], state[k]) for k in state)
    td.save_sharded(other, tmp_path, 70_000)
    loaded = td.load_sharded(tmp_path)
    assert all(torch.equal(loaded[k], other[k]) for k in other)
    assert len(os.listdir(tmp_path)) == 5


def test_torch_shards(state: State, tmp_path: Path) -> None:
    names = list(state)
    for i, group in enumerate((names[:4], names[4:])):
        torch.save({k: state[k] for k in group}, tmp_path / f"pytorch_model-{i}.bin")
    weights = {k: f"pytorch_model-{0 if i < 4 else 1}.bin" for i, k in enumerate(names)}
    (tmp_path / sharded.TORCH_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    seen: list[int] = []
    assert equal(td.load_sharded(tmp_path, progress=lambda done, total: seen.append(done)), state)
    assert equal(td.load_sharded(tmp_path / sharded.TORCH_INDEX), state)
    assert seen[-1] >= sum(t.nbytes for t in state.values())


def test_bad_shards_are_named(state: State, tmp_path: Path) -> None:
    files = td.save_sharded(state, tmp_path, 70_000)
    index = Path(files[0])
    good = index.read_text()
    with pytest.raises(FileNotFoundError, match="none of model"):
        (tmp_path / "empty").mkdir()
        td.load_sharded(tmp_path / "empty")
    for text, match in (
        ("{}", "no.* index|not an index"),
        ("not json", "not an index"),
        (json.dumps({"weight_map": {"a": "../../etc/passwd"}}), "outside the directory"),
        (json.dumps({"weight_map": {"a": "/etc/passwd"}}), "outside the directory"),
        (json.dumps({"weight_map": {"a": "model-00001-of-00004.safetensors"}}), "holds 'a'.*another checkpoint"),
    ):
        index.write_text(text)
        with pytest.raises(td.CorruptCheckpointError, match=match):
            td.load_sharded(tmp_path)
    index.write_text(good)
    shard = Path(files[2])
    data = shard.read_bytes()
    shard.write_bytes(data[:-5])
    with pytest.raises(td.CorruptCheckpointError, match=shard.name):
        td.load_sharded(tmp_path)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"names a shard that is missing.*{shard.name}"):
        td.load_sharded(tmp_path)


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1 MiB", 1 << 20), ("0.5kb", 500), (7, 7), ("12", 12)])
def test_sizes(text: str | int, size: int) -> None:
    assert sharded.parse_size(text) == size


@pytest.mark.parametrize("bad", ["", "5 apples", -1, 0, "0GB", True])
def test_bad_sizes(bad: str | int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no size"):
        td.save_sharded({"a": torch.ones(1)}, tmp_path / "m", bad)
    assert not (tmp_path / "m").exists()


def test_transformers_reads_what_we_wrote(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=99)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    loaded = td.load_sharded(tmp_path / "theirs")
    state = {k: v for k, v in model.state_dict().items() if k in loaded}
    assert all(torch.equal(loaded[k], state[k]) for k in loaded)
    config.save_pretrained(tmp_path / "ours")
    td.save_sharded(state, tmp_path / "ours", "30KB")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in again.state_dict().items())
