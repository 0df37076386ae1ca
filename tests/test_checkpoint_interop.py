"""PyTorch's own behaviours around save and load, on our files and on our road."""

from __future__ import annotations

import inspect
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.serialization import config

import torchdirect as td
from checkpoints import PLAIN, same
from torchdirect import selection


@pytest.fixture
def saved(tmp_path: Path) -> tuple[dict[str, torch.Tensor], Path]:
    state = {f"t{n}": torch.randn(n) for n in (1, 5, 1000, 70_001)}
    td.save(state, tmp_path / "ckpt.pt")
    return state, tmp_path / "ckpt.pt"


def report() -> td.TransferReport:
    last = td.last_transfer()
    assert last is not None
    return last


@pytest.mark.parametrize("name", ["save", "load"])
def test_signatures_begin_with_torchs(name: str) -> None:
    theirs = list(inspect.signature(getattr(torch, name)).parameters.values())
    ours = inspect.signature(getattr(td, name)).parameters
    positional = [p for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    for mine, torchs in zip(ours.values(), positional, strict=False):
        assert (mine.name, mine.default, mine.kind) == (torchs.name, torchs.default, torchs.kind)
    for torchs in theirs:
        if torchs.kind is not torchs.VAR_KEYWORD:
            assert ours[torchs.name].default == torchs.default


@pytest.mark.parametrize(
    "location", [None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda s, _: s, lambda s, loc: None]
)
def test_map_location(location: Any, saved: tuple[dict[str, torch.Tensor], Path]) -> None:
    state, path = saved
    assert same(td.load(path, location, transfer_type="CPU_CACHED_GPU"), state)
    assert report().road == "torchdirect"


def test_a_callable_sees_full_storages_and_their_tags(saved: tuple[dict[str, torch.Tensor], Path]) -> None:
    state, path = saved
    seen = []

    def place(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        seen.append((bytes(storage), location))
        return storage

    td.load(path, place, transfer_type="CPU_CACHED_GPU")
    assert seen == [(bytes(t.untyped_storage()), "cpu") for t in state.values()]


def test_meta_and_fake_loads_find_the_offsets(saved: tuple[dict[str, torch.Tensor], Path]) -> None:
    state, path = saved
    data = path.read_bytes()
    from torch._subclasses.fake_tensor import FakeTensorMode

    meta = torch.load(path, map_location="meta")
    with FakeTensorMode():
        fake = torch.load(path)
    for loaded in (meta, fake, td.load(path, map_location="meta")):
        for name, tensor in loaded.items():
            offset = tensor.untyped_storage()._checkpoint_offset
            if offset is None and loaded is not fake:
                assert torch.__version__ < "2.8", "which records offsets on the meta device too"
                continue
            assert offset % 4096 == 0
            assert data[offset : offset + state[name].nbytes] == bytes(state[name].untyped_storage())


def test_calculated_offsets(saved: tuple[dict[str, torch.Tensor], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    state, path = saved
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    with config.patch({"load.calculate_storage_offsets": True}):  # type: ignore[attr-defined]
        assert same(torch.load(path, mmap=True), state)
        assert same(torch.load(path), state)
        assert same(td.load(path, transfer_type="CPU_ONLY"), state)


@pytest.mark.parametrize("alignment", [64, 512, 8192])
def test_storage_alignment_of_the_configuration(alignment: int, tmp_path: Path) -> None:
    obj = PLAIN["large and small"]()
    with config.patch({"save.storage_alignment": alignment}):  # type: ignore[attr-defined]
        td.save(obj, tmp_path / "a.pt", transfer_type="CPU_ONLY", chunk_bytes=65536)
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".storage_alignment")]
        assert int(archive.read(name)) == (4096 if alignment == 64 else alignment)
    assert same(torch.load(tmp_path / "a.pt"), obj)


def test_crc_can_be_left_out(tmp_path: Path) -> None:
    td.save({"a": torch.ones(300)}, tmp_path / "a.pt", checksum=False)
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        td.save({"a": torch.ones(300)}, tmp_path / "b.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    for name in ("a.pt", "b.pt"):
        with zipfile.ZipFile(tmp_path / name) as archive:
            assert {i.CRC for i in archive.infolist()} == {0}
        assert same(torch.load(tmp_path / name), {"a": torch.ones(300)})


def test_what_is_left_to_torch_says_why(saved: tuple[dict[str, torch.Tensor], Path], tmp_path: Path) -> None:
    state, path = saved
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: td.load(io.BytesIO(path.read_bytes())), "file objects"),
        (lambda: td.load(path, mmap=True), "mmap"),
        (lambda: td.load(path), "set-up"),
    ]
    for load, why in calls:
        assert same(load(), state)
        assert report().road == "torch"
        assert why in report().reason
    with torch.serialization.skip_data():
        td.load(path)
    assert "skip_data" in report().reason
    legacy = tmp_path / "legacy.pt"
    td.save(state, legacy, _use_new_zipfile_serialization=False)
    assert same(td.load(legacy, transfer_type="CPU_ONLY"), state)
    assert "legacy" in report().reason
    buffer = io.BytesIO()
    td.save(state, buffer)
    assert same(torch.load(io.BytesIO(buffer.getvalue())), state)
    assert report().path == "<file object>"


def test_torchscript(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))  # type: ignore[no-untyped-call]
    with pytest.warns(UserWarning, match="TorchScript"):
        module = td.load(path, weights_only=False, transfer_type="CPU_ONLY")
    assert isinstance(module, torch.jit.ScriptModule)
    with pytest.warns(UserWarning, match="TorchScript"), pytest.raises(RuntimeError, match="weights_only"):
        td.load(path, transfer_type="CPU_ONLY")


def rewrite(source: Path, target: Path, drop: tuple[str, ...] = (), swap: bool = False, compress: bool = False) -> None:
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for info in old.infolist():
            name, data = info.filename, old.read(info)
            if name.split("/", 1)[1] in drop:
                continue
            if swap and name.endswith("byteorder"):
                data = b"big"
            new.writestr(name, data)


def test_files_of_older_and_other_writers(saved: tuple[dict[str, torch.Tensor], Path], tmp_path: Path) -> None:
    state, path = saved
    other = tmp_path / "other.pt"
    rewrite(path, other, drop=(".format_version", ".storage_alignment", "byteorder", ".data/serialization_id"))
    assert same(td.load(other, transfer_type="CPU_ONLY"), state)
    assert report().road == "torchdirect"
    rewrite(path, other, compress=True)
    assert same(td.load(other, transfer_type="CPU_ONLY"), state)
    assert "compressed" in report().reason
    rewrite(path, other, swap=True)
    swapped = td.load(other, transfer_type="CPU_ONLY")
    assert "byte order" in report().reason
    assert same(
        swapped["t5"], state["t5"].view(torch.uint8).reshape(-1, 4).flip(1).contiguous().view(torch.float32)[:, 0]
    )


@pytest.mark.parametrize("name", ["модель.pt", "a b.c.pt", "noext", ".hidden", "x" * 240 + ".pt"])
def test_file_names(name: str, tmp_path: Path) -> None:
    td.save({"a": torch.ones(3)}, tmp_path / name)
    assert same(torch.load(tmp_path / name), {"a": torch.ones(3)})
    assert same(td.load(str(tmp_path / name), transfer_type="CPU_ONLY"), {"a": torch.ones(3)})


def test_weights_only_refuses_what_torch_refuses(tmp_path: Path) -> None:
    path = tmp_path / "evil.pt"
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(ran),)

    torch.save({"a": torch.ones(3), "b": Evil()}, path)
    errors = []
    for load in (torch.load, td.load):
        with pytest.raises(pickle.UnpicklingError) as caught:
            load(path) if load is torch.load else load(path, transfer_type="CPU_ONLY")
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert not ran.exists()


def test_a_file_saved_onto_its_own_mapping(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    td.save(torch.arange(10_000.0), path)
    mapped = torch.load(path, mmap=True)
    td.save(mapped, path)
    assert torch.equal(mapped, torch.arange(10_000.0))
    assert torch.equal(td.load(path), torch.arange(10_000.0))


def test_small_files_take_the_plain_path_and_large_ones_do_not(tmp_path: Path) -> None:
    td.save(torch.ones(10), tmp_path / "s.pt")
    assert report().reason == selection.SMALL.reason
    td.save(torch.ones(selection.SMALL_FILE_BYTES), tmp_path / "l.pt")
    assert report().reason != selection.SMALL.reason
    assert report().bytes == (tmp_path / "l.pt").stat().st_size
    assert "GB/s" in str(report())


def test_settings_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.pt"
    with td.settings(transfer_type="CPU_CACHED_GPU", num_threads=2):
        td.save(torch.ones(10), path)
        assert report().used is td.TransferType.CPU_CACHED_GPU
        td.save(torch.ones(10), path, transfer_type=1)
        assert report().used is td.TransferType.CPU_ONLY
    monkeypatch.setenv("TORCHDIRECT_TRANSFER_TYPE", "4")
    td.load(path)
    assert report().used is td.TransferType.CPU_CACHED_GPU
    monkeypatch.setenv("TORCHDIRECT_CHUNK_BYTES", "lots")
    with pytest.raises(td.SettingsError, match="TORCHDIRECT_CHUNK_BYTES"):
        td.load(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"transfer_type": "FAST"}, "unknown transfer type 'FAST'.*CPU_ASYNC_GPU"),
        ({"transfer_type": 9}, "unknown transfer type 9"),
        ({"transfer_type": True}, "unknown transfer type True"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"chunk_bytes": 1000}, "chunk_bytes=1000.*4096"),
        ({"fallback": "maybe"}, "fallback='maybe'"),
        ({"durable": "often"}, "durable='often'"),
    ],
)
def test_bad_settings(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(td.SettingsError, match=message):
        td.save({}, tmp_path / "x.pt", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    state = torch.ones(1_000_000)
    td.save(state, tmp_path / "p.pt", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == (tmp_path / "p.pt").stat().st_size
    td.load(tmp_path / "p.pt", progress=True)
    assert capsys.readouterr().out == ""
