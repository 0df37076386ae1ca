"""Every kind of object, both ways: what we write and what PyTorch writes, read by either."""

from __future__ import annotations

import io
import pickle
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdirect as td
from checkpoints import OTHER, PLAIN, record, same

EVERY = {**PLAIN, **OTHER}
TYPES = ["CPU_ONLY", "CPU_CACHED_GPU"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", EVERY)
def test_the_pickle_is_what_torch_save_writes(name: str, protocol: int, tmp_path: Path) -> None:
    obj = EVERY[name]()
    torch.save(obj, tmp_path / "torch.pt", pickle_protocol=protocol)
    td.save(obj, tmp_path / "td.pt", pickle_protocol=protocol)
    for entry in ("data.pkl", "byteorder", "version", ".format_version"):
        assert record(tmp_path / "td.pt", entry) == record(tmp_path / "torch.pt", entry)


@pytest.mark.parametrize("transfer_type", ["AUTO", *TYPES])
@pytest.mark.parametrize("name", EVERY)
def test_torch_reads_what_we_write(name: str, transfer_type: str, tmp_path: Path) -> None:
    obj, path = EVERY[name](), tmp_path / "ckpt.pt"
    td.save(obj, path, transfer_type=transfer_type, chunk_bytes=65536)
    assert same(torch.load(path, weights_only=False), obj)
    assert same(torch.load(path, weights_only=False, mmap=True), obj)
    if name in PLAIN:
        assert same(torch.load(path, weights_only=True), obj)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("transfer_type", TYPES)
@pytest.mark.parametrize("writer", ["torch", "torchdirect"])
@pytest.mark.parametrize("name", EVERY)
def test_we_read_what_either_writes(name: str, writer: str, transfer_type: str, tmp_path: Path) -> None:
    obj, path = EVERY[name](), tmp_path / "ckpt.pt"
    (torch.save if writer == "torch" else td.save)(obj, path)
    loaded = td.load(path, weights_only=False, transfer_type=transfer_type, chunk_bytes=65536)
    assert same(loaded, obj)
    report = td.last_transfer()
    assert report is not None
    assert report.used is td.TransferType[transfer_type]
    if name in PLAIN:
        assert same(td.load(path, transfer_type=transfer_type), obj)


def test_views_stay_views_and_their_storage_is_stored_once(tmp_path: Path) -> None:
    path = tmp_path / "views.pt"
    base = torch.arange(100_000.0)
    td.save([base[:10], base[2:4]], path)
    with zipfile.ZipFile(path) as archive:
        assert [i.file_size for i in archive.infolist() if "/data/" in i.filename] == [400_000]
    loaded = td.load(path, transfer_type="CPU_CACHED_GPU")
    loaded[1][0] = -1
    assert loaded[0][2] == -1


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    td.save(PLAIN["tied"](), tmp_path / "t.pt")
    loaded = td.load(tmp_path / "t.pt", transfer_type="CPU_ONLY")
    loaded["embed.weight"].zero_()
    assert not loaded["head.weight"].any()


def test_module_metadata_survives(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    td.save(state, tmp_path / "m.pt")
    assert td.load(tmp_path / "m.pt", transfer_type="CPU_ONLY")._metadata == state._metadata  # type: ignore[attr-defined]


def test_parameters_with_hooks_warn_as_in_torch(tmp_path: Path) -> None:
    tensor = torch.ones(3, requires_grad=True)
    tensor.register_hook(lambda grad: grad)  # type: ignore[no-untyped-call]
    with pytest.warns(UserWarning, match="backward hook"):
        td.save(tensor, tmp_path / "h.pt")


def test_one_memory_as_two_dtypes_is_refused(tmp_path: Path) -> None:
    base = torch.arange(4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        td.save([base, base.view(torch.float32)], tmp_path / "x.pt")
    assert list(tmp_path.iterdir()) == []


class LoadsInside:
    """Loads another checkpoint while it is being unpickled."""

    def __init__(self) -> None:
        self.big = torch.arange(40_000.0)
        buffer = io.BytesIO()
        torch.save({"inner": torch.arange(3.0), "none": torch.zeros(0)}, buffer)
        self.inner = buffer.getvalue()

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "big": self.big}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.inner = state["inner"]
        self.loaded = torch.load(io.BytesIO(self.inner))
        self.big = state["big"]


@pytest.mark.parametrize("map_location", [None, "cpu", {"cpu": "cpu"}, lambda storage, _: storage])
def test_a_load_inside_a_load(map_location: Any, tmp_path: Path) -> None:
    path = tmp_path / "nested.pt"
    td.save([LoadsInside(), LoadsInside(), torch.ones(3)], path)
    first, second, last = td.load(path, map_location, weights_only=False, transfer_type="CPU_CACHED_GPU")
    for loaded in (first, second):
        assert torch.equal(loaded.loaded["inner"], torch.arange(3.0))
        assert torch.equal(loaded.big, torch.arange(40_000.0))
    assert torch.equal(last, torch.ones(3))


def test_wrapper_subclasses_accept_every_map_location(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    path = tmp_path / "two.pt"
    value = TwoTensor(torch.arange(3.0), torch.arange(3.0) + 1)  # type: ignore[no-untyped-call]
    torch.save(value, path)
    for location in (None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}):
        loaded = td.load(path, location, weights_only=False, transfer_type="CPU_ONLY")
        assert torch.equal(loaded.a, value.a)
        assert torch.equal(loaded.b, value.b)


def test_another_pickle_module(tmp_path: Path) -> None:
    class Pickler(pickle._Pickler):
        pass

    module = types.SimpleNamespace(
        __name__="mine", Pickler=Pickler, Unpickler=pickle.Unpickler, load=pickle.load, loads=pickle.loads
    )
    obj = PLAIN["trained"]()
    td.save(obj, tmp_path / "a.pt", pickle_module=module)
    torch.save(obj, tmp_path / "b.pt", pickle_module=module)
    assert record(tmp_path / "a.pt", "data.pkl") == record(tmp_path / "b.pt", "data.pkl")
    loaded = td.load(tmp_path / "a.pt", pickle_module=module, weights_only=False, transfer_type="CPU_ONLY")
    assert same(loaded, obj)


def test_more_members_than_16_bits_count(tmp_path: Path) -> None:
    path = tmp_path / "many.pt"
    obj = [t.clone().view(1) for t in torch.arange(66_000.0)]
    td.save(obj, path, durable=False)
    assert torch.equal(torch.cat(td.load(path)), torch.arange(66_000.0))
    with zipfile.ZipFile(path) as archive:
        assert len(archive.namelist()) == 66_006
