"""Damaged and hostile checkpoint directories: refused with the file and the entry, before any target changes."""

from __future__ import annotations

import collections
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import torchdirect as td
from dcp_states import stock
from torchdirect.dcp.metadata import parse_metadata, stored_files, unpickle_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Size = torch.Size


def tensors() -> dict[str, Any]:
    return {"a": torch.arange(3000.0).reshape(30, 100), "b": torch.arange(6.0), "c": torch.ones(2, 3), "text": "x"}


def blank() -> dict[str, Any]:
    return {"a": torch.full((30, 100), -1.0), "b": torch.full((6,), -1.0), "c": torch.full((2, 3), -1.0), "text": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    td.dcp.save(tensors(), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def read(folder: Path) -> Metadata:
    made: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return made


def place(made: Metadata, name: str) -> filesystem._StorageInfo:
    found: filesystem._StorageInfo = next(info for index, info in made.storage_data.items() if index.fqn == name)
    return found


def refused(folder: Path, match: str) -> str:
    state = blank()
    with pytest.raises(td.CorruptCheckpointError, match=match) as caught:
        td.dcp.load(state, folder)
    assert str(folder) in str(caught.value)
    assert all(bool((state[name] == -1).all()) for name in "abc"), "a target was changed"
    return str(caught.value)


def set_place(**fields: Any) -> Callable[[Metadata], None]:
    def change(made: Metadata) -> None:
        for name, value in fields.items():
            setattr(place(made, "b"), name, value)

    return change


def set_chunk(**fields: Any) -> Callable[[Metadata], None]:
    def change(made: Metadata) -> None:
        (chunk,) = made.state_dict_metadata["b"].chunks  # type: ignore[union-attr]
        for name, value in fields.items():
            setattr(chunk, name, value)

    return change


def set_field(name: str, value: Any) -> Callable[[Metadata], None]:
    return lambda made: setattr(made, name, value)


def swap(made: Metadata) -> None:
    b, c = place(made, "b"), place(made, "c")
    b.offset, c.offset, b.length, c.length = c.offset, b.offset, c.length, b.length


def overlap(made: Metadata) -> None:
    place(made, "b").offset = place(made, "a").offset + 64


def twice(made: Metadata) -> None:
    entry: Any = made.state_dict_metadata["b"]
    entry.chunks = entry.chunks * 2


def forget(made: Metadata) -> None:
    made.storage_data = {index: info for index, info in made.storage_data.items() if index.fqn != "b"}


def more_chunks(made: Metadata) -> None:
    entry: Any = made.state_dict_metadata["b"]
    entry.chunks.append(ChunkStorageMetadata(Size([1]), Size([5])))
    made.storage_data[MetadataIndex("b", Size([1]))] = filesystem._StorageInfo("__9_9.distcp", 0, 10)


CHANGES: dict[str, tuple[Callable[[Metadata], None], str]] = {
    "absolute path": (set_place(relative_path="/etc/passwd"), "'b'.*'/etc/passwd', outside the directory"),
    "path upwards": (set_place(relative_path="../x.distcp"), "'b'.*outside the directory"),
    "path upwards inside": (set_place(relative_path="x/../../y.distcp"), "'b'.*outside the directory"),
    "no path": (set_place(relative_path=""), "'b'.*outside the directory"),
    "path of the directory": (set_place(relative_path="./."), "'b'.*outside the directory"),
    "path with a zero": (set_place(relative_path="a\0b"), "'b'.*outside the directory"),
    "path of bytes": (set_place(relative_path=b"x"), "relative_path of a _StorageInfo is a bytes"),
    "negative offset": (set_place(offset=-64), "'b'.*at offset -64"),
    "offset behind the file": (set_place(offset=1 << 40), "'b' is said to be .* the file ends at"),
    "offset beyond 64 bits": (set_place(offset=1 << 70), "'b'.*at offset"),
    "length behind the file": (set_place(length=1 << 30, offset=10**6), "'b' is said to be .* the file ends at"),
    "negative length": (set_place(length=-1), "'b'.* -1 bytes"),
    "no length": (set_place(length=0), "'b' at offset"),
    "length cut": (set_place(length=500), "'b' at offset"),
    "offset of text": (set_place(offset="0"), "offset of a _StorageInfo is a str"),
    "offset of truth": (set_place(offset=True), "offset of a _StorageInfo is a bool"),
    "stream extensions": (set_place(transform_descriptors=["zstd"]), "'b' was written through stream extensions"),
    "places swapped": (swap, "is a tensor of shape .*, and the metadata says"),
    "places overlap": (overlap, "overlap in file"),
    "stored nowhere": (forget, "entry 'b' at .* is stored nowhere"),
    "chunk twice": (twice, "'b' comes twice"),
    "chunks overlap": (more_chunks, "the chunks of entry 'b' overlap"),
    "chunk outside": (set_chunk(offsets=Size([3])), "'b' leaves the tensor's shape"),
    "chunk of other dimensions": (set_chunk(sizes=Size([2, 3])), "'b' has other dimensions"),
    "chunk of another size": (set_chunk(sizes=Size([5])), r"'b' at offset .* is a tensor of shape \[6\]"),
    "chunk of a list": (set_chunk(sizes=[6]), "sizes of a ChunkStorageMetadata is a list"),
    "storage data missing": (set_field("storage_data", None), "where its entries are stored"),
    "storage data of a list": (set_field("storage_data", [1]), "storage_data of a Metadata is a list"),
    "entries of a list": (set_field("state_dict_metadata", []), "state_dict_metadata of a Metadata is a list"),
    "entry of text": (set_field("state_dict_metadata", {"b": "x"}), "'b' is described by a str"),
    "entry named by a number": (
        set_field("state_dict_metadata", {3: metadata.BytesStorageMetadata()}),
        "an entry is named by a int",
    ),
    "place of text": (set_field("storage_data", {"b": "x"}), "is stored nowhere"),
    "version of a number": (set_field("version", 3), "version of a Metadata is a int"),
    "class of another kind": (
        set_field("planner_data", collections.deque([1])),
        "collections.deque, which no metadata",
    ),
    "function": (set_field("planner_data", os.system), "posix.system, which no metadata"),
    "field that there is not": (set_field("surprise", 1), "a Metadata has a field 'surprise'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_hostile_metadata(change: str, folder: Path) -> None:
    alter, match = CHANGES[change]
    made = read(folder)
    alter(made)
    (folder / ".metadata").write_bytes(pickle.dumps(made))
    refused(folder, match)


def test_tensors_larger_than_any_memory(folder: Path) -> None:
    made = read(folder)
    made.state_dict_metadata["b"].size = Size([1 << 40, 1 << 40])  # type: ignore[union-attr]
    (folder / ".metadata").write_bytes(pickle.dumps(made))
    refused(folder, "'b' of shape .* is larger than any memory")


class Runs:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_nothing_of_the_metadata_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = read(folder)
    made.planner_data = {"x": Runs()}
    (folder / ".metadata").write_bytes(pickle.dumps(made))
    refused(folder, "posix.mkdir")
    with pytest.raises(td.CorruptCheckpointError):
        td.verify(folder)
    assert not (tmp_path / "ran").exists()
    td.dcp.load(blank(), folder, trusted_metadata=True)
    assert (tmp_path / "ran").exists(), "the escape does what it says"


def test_no_attribute_of_a_class_is_set(folder: Path) -> None:
    # BUILD on a class, with a state for slots: pickle would call setattr on the class itself.
    data = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadataIndex\nN}X\x07\x00\x00\x00__eq__qK\x01s\x86b."
    (folder / ".metadata").write_bytes(data)
    before = MetadataIndex.__eq__
    refused(folder, "not the metadata")
    assert MetadataIndex.__eq__ is before


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_metadata_cut_short(share: float, folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[: int(len(data) * share)])
    refused(folder, "not the metadata of a distributed checkpoint")


@pytest.mark.parametrize(
    "data", [b"\x80\x04N.", b"PK\x03\x04", b"\0" * 1000, pickle.dumps({"a": 1}), pickle.dumps(Size([1]))]
)
def test_what_is_no_metadata(data: bytes, folder: Path) -> None:
    (folder / ".metadata").write_bytes(data)
    refused(folder, "metadata")
    with pytest.raises(td.CorruptCheckpointError, match=r"Metadata|unpickling"):
        unpickle_metadata(data, "x")


def test_deep_nesting_is_no_crash(folder: Path) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    made = read(folder)
    made.planner_data = deep
    (folder / ".metadata").write_bytes(pickle.dumps(made))
    refused(folder, "nested more than")


def test_pytorchs_own_load_tells_the_reason(folder: Path) -> None:
    made = read(folder)
    set_place(relative_path="../x")(made)
    (folder / ".metadata").write_bytes(pickle.dumps(made))
    with pytest.raises(CheckpointException, match="outside the directory"):
        stock.load(blank(), storage_reader=td.dcp.DirectReader(folder))


# ------------------------------------------------------------------------------------------------------ files


def data_file(folder: Path) -> Path:
    (path,) = folder.glob("*.distcp")
    return path


def test_symbolic_link_out_of_the_directory(folder: Path, tmp_path: Path) -> None:
    path = data_file(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refused(folder, "outside the checkpoint's directory")


def test_symbolic_links_inside_and_to_the_directory(folder: Path, tmp_path: Path) -> None:
    path = data_file(folder)
    path.rename(folder / "here")
    path.symlink_to("here")
    (tmp_path / "link").symlink_to(folder)
    state = blank()
    td.dcp.load(state, tmp_path / "link")
    assert torch.equal(state["b"], tensors()["b"])


def test_what_is_no_regular_file(folder: Path) -> None:
    path = data_file(folder)
    path.unlink()
    os.mkfifo(path)
    refused(folder, "not a regular file")


def test_missing_file_and_missing_checkpoint(folder: Path, tmp_path: Path) -> None:
    data_file(folder).unlink()
    with pytest.raises(FileNotFoundError, match="distcp"):
        td.dcp.load(blank(), folder)
    with pytest.raises(CheckpointException, match=r"metadata is None|No such file"):
        td.dcp.load(blank(), tmp_path / "nowhere")


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_file_cut_short(size: int, folder: Path) -> None:
    with open(data_file(folder), "r+b") as file:
        file.truncate(size)
    refused(folder, "the file ends at|cut short")


def test_item_that_is_no_tensor(folder: Path) -> None:
    made = read(folder)
    b, text = place(made, "b"), place(made, "text")
    b.offset, text.offset, b.length, text.length = text.offset, b.offset, text.length, b.length
    (folder / ".metadata").write_bytes(pickle.dumps(made))
    with pytest.raises(td.CorruptCheckpointError, match=r"'b' at offset .* no tensor"):
        td.dcp.load(blank(), folder)


def test_damaged_payload_is_found_with_verify(folder: Path) -> None:
    path = data_file(folder)
    data = bytearray(path.read_bytes())
    at = data.index(tensors()["a"].numpy().tobytes()[400:800])
    data[at] ^= 1
    path.write_bytes(data)
    td.dcp.load(blank(), folder)
    with pytest.raises(td.CorruptCheckpointError, match="tensor 'a' is damaged"):
        td.dcp.load(blank(), folder, verify=True)


# --------------------------------------------------------------------------------------------------- round trips


def test_parsed_metadata_is_what_pickle_makes(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    assert parse_metadata(data, "x") == pickle.loads(data)
    assert stored_files(data, "x") == {data_file(folder).name}


def test_metadata_of_older_versions(folder: Path) -> None:
    made = read(folder)
    for name in ("version", "storage_meta"):
        made.__dict__.pop(name, None)
    for info in made.storage_data.values():
        info.__dict__.pop("transform_descriptors", None)
    (folder / ".metadata").write_bytes(pickle.dumps(made, protocol=2))
    state = blank()
    td.dcp.load(state, folder)
    assert torch.equal(state["a"], tensors()["a"])


def test_planner_data_of_plain_containers(folder: Path) -> None:
    made = read(folder)
    values = {1, 2}, frozenset({3}), b"4", None, 5.0, torch.float16, torch.strided, torch.device("cuda", 1), Path("/a")
    made.planner_data = collections.OrderedDict(x=values)
    data = pickle.dumps(made)
    assert parse_metadata(data, "x") == made
