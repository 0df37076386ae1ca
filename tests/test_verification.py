"""Checksums: every damaged byte is found, and named."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import torch as theirs

import torchdirect as td
from checkpoints import same
from torchdirect.cli.main import main
from torchdirect.digests import checksums_of

STATE = {"layer.weight": torch.arange(300_000.0), "layer.bias": torch.arange(701.0), "half": torch.ones(9).half()}


@pytest.fixture(params=["td", "torch", "torch, 64 bytes"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "a.pt"
    td.save(STATE, path) if request.param == "td" else torch.save(STATE, path)
    return path


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_whole_files(saved: Path) -> None:
    found = td.verify(saved)
    with zipfile.ZipFile(saved) as archive:
        assert found.records == len([i for i in archive.infolist() if i.file_size])
        assert found.nbytes == sum(i.file_size for i in archive.infolist())
    assert found.unchecked == ()
    assert "are whole" in str(found)
    assert same(td.load(saved, verify=True), STATE)
    with td.settings(verify=True):
        assert same(td.load(saved, transfer_type="CPU_ONLY"), STATE)
        with td.open(saved, verify=True) as file:
            assert same(file.load(), STATE)


@given(name=st.sampled_from(list(STATE)), where=st.floats(0, 1, exclude_max=True))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damaged_byte_is_named(name: str, where: float, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    td.save(STATE, path, durable=False)
    with td.open(path) as file:
        info = file.info(name)
    flip(path, info.file_offset + int(where * info.nbytes))
    match = rf"a\.pt: tensor '{name}' is damaged: its {info.nbytes} bytes at offset {info.file_offset} have CRC-32"
    with pytest.raises(td.CorruptCheckpointError, match=match):
        td.verify(path)
    with pytest.raises(td.CorruptCheckpointError, match=match):
        td.load(path, verify=True)
    with pytest.raises(td.CorruptCheckpointError, match=match), td.open(path, verify=True) as file:
        file.load([name])
    td.load(path)


def test_damage_in_other_records_is_found(tmp_path: Path) -> None:
    td.save(STATE, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    flip(tmp_path / "a.pt", data.index(b"layer.bias"))
    with pytest.raises(td.CorruptCheckpointError, match=r"record 'data\.pkl' is damaged"):
        td.verify(tmp_path / "a.pt")


def test_files_without_checksums_say_so(tmp_path: Path) -> None:
    td.save(STATE, tmp_path / "a.pt", checksum=False)
    found = td.verify(tmp_path / "a.pt")
    assert any("layer.weight" in name for name in found.unchecked)
    assert same(td.load(tmp_path / "a.pt", verify=True), STATE)
    td.save(STATE, tmp_path / "a.safetensors")
    found = td.verify(tmp_path / "a.safetensors")
    assert (found.records, len(found.unchecked)) == (0, 3)


def test_safetensors_with_digests(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    td.safetensors.save_file(STATE, path, {"k": "v"}, digest=True)
    assert same(theirs.load_file(path)["half"], STATE["half"])
    assert td.verify(path).records == 3
    assert td.load(path, verify=True).keys() == STATE.keys()
    with td.open(path) as file:
        at = file.info("layer.bias").file_offset
    flip(path, at + 5)
    for call in (lambda: td.verify(path), lambda: td.load(path, verify=True)):
        with pytest.raises(td.CorruptCheckpointError, match=r"tensor 'layer\.bias' is damaged"):
            call()
    td.safetensors.save_file(STATE, path, {"torchdirect.crc32": "nonsense"})
    with pytest.raises(td.CorruptCheckpointError, match="no list of checksums"):
        td.verify(path)


def test_shards_and_compressed_records(tmp_path: Path) -> None:
    files = td.save_sharded(STATE, tmp_path / "m", 3000)
    assert len(td.verify(tmp_path / "m").files) == len(files) - 1
    td.save(STATE, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    assert td.verify(tmp_path / "b.pt").records > 3
    data = (tmp_path / "b.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        at = archive.getinfo("a/data/0").header_offset + 60
    (tmp_path / "b.pt").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(td.CorruptCheckpointError, match="compressed record"):
        td.verify(tmp_path / "b.pt")


@given(st.lists(st.integers(0, 100_000), max_size=5))
@settings(max_examples=20, deadline=None)
def test_checksums_are_those_of_zlib(sizes: list[int]) -> None:
    import zlib

    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchdirect.digests._PIECE_BYTES", 7001)
        assert checksums_of(tensors) == [zlib.crc32(bytes(t.tolist())) for t in tensors]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.pt"
    td.save(STATE, path)
    assert main(["verify", str(path)]) == 0
    assert "are whole" in capsys.readouterr().out
    assert main(["verify", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["whole"] is True
    flip(path, len(path.read_bytes()) // 2)
    assert main(["verify", str(path), "--json"]) == 1
    assert "layer.weight" in json.loads(capsys.readouterr().out)["error"]
    assert main(["verify", str(tmp_path / "none.pt")]) == 1
