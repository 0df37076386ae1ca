"""Safetensors files, crosswise with the library that owns the format."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import torch as theirs

import torchdirect as td
from checkpoints import same
from torchdirect.formats import safetensors as format_module

DTYPES = list(format_module._DTYPES.values())
State = dict[str, torch.Tensor]


def make(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    shape = shape or ([3] if "float4" in str(dtype) else [])
    generator = torch.Generator().manual_seed(seed)
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


tensors = st.builds(make, st.lists(st.integers(0, 40), max_size=3), st.sampled_from(DTYPES), st.integers(0, 1000))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = texts.filter(lambda n: n != "__metadata__")


@given(
    state=st.dictionaries(names, tensors, max_size=6),
    note=st.none() | texts,
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_files_are_the_librarys_byte_for_byte(state: State, note: str | None, tmp_path: Path) -> None:
    metadata = None if note is None else {"note": note}
    ours, other = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    theirs.save_file(state, other, metadata)
    td.safetensors.save_file(state, ours, metadata)
    assert ours.read_bytes() == other.read_bytes()
    assert same_state(td.safetensors.load_file(other), state)
    assert same_state(theirs.load_file(ours), state)


def same_state(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in b)


@pytest.fixture
def state() -> State:
    return {f"layer.{n}.weight": make([n, 70], d, n) for n, d in enumerate(DTYPES)} | {"big": torch.randn(300, 1000)}


@pytest.mark.parametrize("kind", ["AUTO", "CPU_ONLY", "CPU_CACHED_GPU"])
@pytest.mark.parametrize("align", [False, True])
def test_round_trip(align: bool, kind: str, state: State, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    td.safetensors.save_file(state, path, {"a": "1", "b": "2"}, align=align, transfer_type=kind, chunk_bytes=65536)
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + header) % (4096 if align else 8) == 0
    assert same_state(theirs.load_file(path), state)
    with td.safetensors.safe_open(path, device="cpu", transfer_type=kind) as file:
        assert file.metadata() == {"a": "1", "b": "2"}
        assert same_state({name: file.get_tensor(name) for name in file.keys()}, state)  # noqa: SIM118
    for loaded in (td.load(path, transfer_type=kind), td.load(path, {"cpu": "cpu"}), td.load(path, lambda s, _: s)):
        assert same_state(loaded, state)
    report = td.last_transfer()
    assert report is not None
    assert report.operation == "load"


def test_save_and_load_by_suffix_and_by_content(state: State, tmp_path: Path) -> None:
    td.save(state, tmp_path / "a.safetensors")
    assert same_state(theirs.load_file(tmp_path / "a.safetensors"), state)
    (tmp_path / "a.safetensors").rename(tmp_path / "model.bin")
    assert same_state(td.load(tmp_path / "model.bin"), state)
    with pytest.raises(ValueError, match="flat dict"):
        td.save([1, 2], tmp_path / "b.safetensors")
    td.save(state, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="torch file"):
        td.safetensors.load_file(tmp_path / "c.pt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pt", "model.bin"]


def test_what_the_format_cannot_hold(tmp_path: Path) -> None:
    base = torch.zeros(4, 4)
    cases: list[tuple[Any, type[Exception], str]] = [
        ({"a": base, "b": base[1]}, RuntimeError, r"share memory.*\['a', 'b'\]"),
        ({"a": base, "x": torch.ones(2, 3).t()}, ValueError, "'x' is not contiguous"),
        ({"a": torch.eye(3).to_sparse()}, ValueError, "'a' is not dense"),
        ({"a": torch.ones(2, device="meta")}, ValueError, "'a' is not dense"),
        ({"a": 3}, ValueError, "'a' is a pair of str and int"),
        ({3: base}, ValueError, "3 is a pair of int and Tensor"),
        ({"__metadata__": base}, ValueError, "format's own"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, ValueError, "'a' has dtype torch.complex128"),
    ]
    for state, kind, match in cases:
        with pytest.raises(kind, match=match):
            td.safetensors.save_file(state, tmp_path / "a.safetensors")
        if "__metadata__" not in state:  # of which the library makes a file that it cannot read
            with pytest.raises(Exception):  # noqa: B017 - each in its own way
                theirs.save_file(state, tmp_path / "b.safetensors")
    with pytest.raises(TypeError, match="metadata maps text to text"):
        td.safetensors.save_file({"a": base}, tmp_path / "a.safetensors", {"n": 1})  # type: ignore[dict-item]
    td.safetensors.save_file({"a": base[:2], "b": base[2:]}, tmp_path / "a.safetensors")
    assert [p.name for p in tmp_path.iterdir() if p.name[0] == "a"] == ["a.safetensors"]


def header(entries: Any, payload: int = 16, *, length: int | None = None, raw: bytes | None = None) -> bytes:
    text = json.dumps(entries).encode() if raw is None else raw
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(payload)


def entry(first: int, last: int, dtype: str = "F32", shape: Any = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


MALFORMED: dict[str, bytes] = {
    "length over the file": header({"a": entry(0, 16)}, length=1 << 20),
    "length over the limit": header({"a": entry(0, 16)}, length=1 << 40),
    "no JSON": header({}, raw=b"{not json}"),
    "no object": header({}, raw=b"[1, 2, 3]"),
    "not UTF-8": header({}, raw=b'{"\xff": 1}'),
    "cut short": header({"a": entry(0, 16)})[:20],
    "payload too short": header({"a": entry(0, 16)}, payload=8),
    "payload too long": header({"a": entry(0, 16)}, payload=24),
    "hole": header({"a": entry(0, 8, shape=(2,)), "b": entry(12, 16, shape=(1,))}),
    "overlap": header({"a": entry(0, 16), "b": entry(8, 16, shape=(2,))}),
    "offsets backwards": header({"a": entry(16, 0)}),
    "size and shape disagree": header({"a": entry(0, 16, shape=(5,))}),
    "shape overflows": header({"a": entry(0, 16, shape=(1 << 62, 1 << 62))}),
    "negative offset": header({"a": entry(-16, 0)}),
    "unknown dtype": header({"a": entry(0, 16, dtype="F128")}),
    "missing field": header({"a": {"dtype": "F32", "shape": [4]}}),
    "metadata is no text": header({"__metadata__": {"a": 1}, "b": entry(0, 16)}),
    "name twice": header({}, raw=b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 16)).encode(),) * 2)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_headers(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(MALFORMED[name])
    with pytest.raises((td.CorruptCheckpointError, EOFError), match=r"bad\.safetensors"):
        td.open(path)
    if name != "name twice":
        with pytest.raises(safetensors.SafetensorError):
            theirs.load_file(path)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_gives_one_error_or_none(data: st.DataObject, tmp_path: Path) -> None:
    good = bytearray(header({"__metadata__": {"k": "v"}, "a": entry(0, 16), "b": entry(16, 24, "I64", (1,))}, 24))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 25))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.safetensors"
    path.write_bytes(good)
    try:
        with td.open(path) as file:
            file.load()
    except td.CorruptCheckpointError:
        return
    assert same_state(td.safetensors.load_file(path), theirs.load_file(path))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.other = torch.nn.Linear(3, 2)


def test_models_with_tied_weights(tmp_path: Path) -> None:
    model, path = Tied(), tmp_path / "m.safetensors"
    td.safetensors.save_model(model, path)
    theirs.save_model(model, str(tmp_path / "t.safetensors"))
    assert path.read_bytes() == (tmp_path / "t.safetensors").read_bytes()
    fresh = Tied()
    assert td.safetensors.load_model(fresh, tmp_path / "t.safetensors") == ([], [])
    assert all(map(torch.equal, fresh.state_dict().values(), model.state_dict().values()))
    missing, unexpected = theirs.load_model(Tied(), path)
    assert not missing
    assert not unexpected
    td.safetensors.save_file({"other.weight": torch.ones(2, 3), "more": torch.ones(1)}, path)
    for load in (td.safetensors.load_model, theirs.load_model):
        with pytest.raises(RuntimeError, match=r"(?s)Missing key.*other\.bias.*Unexpected key.*more"):
            load(Tied(), path)
