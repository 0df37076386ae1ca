"""`verify` and its command on distributed checkpoints: every record of every entry, on all ranks' files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import torchdirect as td
from dcp_states import small, stock, varied
from torchdirect.cli.app import app

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("ours", [True, False])
def test_whole_checkpoints(ours: bool, tmp_path: Path) -> None:
    state = varied(1)
    if ours:
        td.dcp.save(state, tmp_path, single_file_per_rank=False)
    else:
        stock.save(state, storage_writer=stock.FileSystemWriter(tmp_path, thread_count=3))
    found = td.verify(tmp_path)
    assert sorted(found.files) == sorted(map(str, tmp_path.glob("*.distcp")))
    assert found.records > 5 * len(state) and found.nbytes > 1500 * 700 * 4
    assert found.unchecked == ()


def test_files_without_checksums(tmp_path: Path) -> None:
    td.dcp.save(small(1), tmp_path, checksum=False)
    found = td.verify(tmp_path)
    assert any("tensor 'n.c'" in name for name in found.unchecked)


@pytest.mark.parametrize(("name", "what"), [("b", "tensor 'b'"), ("n.c", "tensor 'n.c'"), ("a", "tensor 'a'")])
def test_a_flipped_bit_is_named_with_its_tensor_and_place(name: str, what: str, tmp_path: Path) -> None:
    td.dcp.save(small(1.5), tmp_path)
    with open(tmp_path / ".metadata", "rb") as file:
        stored = pickle.load(file).storage_data
    (info,) = (info for index, info in stored.items() if index.fqn == name)
    path = tmp_path / info.relative_path
    data = bytearray(path.read_bytes())
    at = data.index(torch.full((5,), 1.5).numpy().tobytes(), info.offset)
    data[at + 3] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(td.CorruptCheckpointError, match=f"{path.name}: {what} is damaged: .* at offset {at} "):
        td.verify(tmp_path)
    result = CliRunner().invoke(app, ["verify", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert what in json.loads(result.stdout)["error"]


def test_a_damaged_pickle_of_an_entry(tmp_path: Path) -> None:
    td.dcp.save({"text": "the words of it"}, tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    path.write_bytes(path.read_bytes().replace(b"the words of it", b"the wards of it"))
    with pytest.raises(td.CorruptCheckpointError, match=r"record 'data.pkl' of 'text' is damaged"):
        td.verify(tmp_path)


def test_missing_and_short_files(tmp_path: Path) -> None:
    td.dcp.save(small(1), tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    data = path.read_bytes()
    path.write_bytes(data[:-5000])
    with pytest.raises(td.CorruptCheckpointError, match="the file ends at"):
        td.verify(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="distcp"):
        td.verify(tmp_path)


def test_bytes_that_are_no_torch_file_cannot_be_checked(tmp_path: Path) -> None:
    import io

    class Raw(stock.DefaultSavePlanner):  # type: ignore[misc]
        def transform_object(self, write_item: object, object: object) -> object:
            return io.BytesIO(b"raw bytes") if isinstance(object, str) else super().transform_object(write_item, object)

    td.dcp.save({"t": torch.ones(5), "text": "x"}, tmp_path, planner=Raw())
    (name,) = td.verify(tmp_path).unchecked
    assert name.endswith("distcp: 'text'")


def test_the_command(tmp_path: Path) -> None:
    td.dcp.save(small(1), tmp_path)
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 0 and "are whole" in result.stdout
