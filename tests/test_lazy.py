"""Opening files lazily: names, places, parts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchdirect as td
from checkpoints import OTHER, PLAIN, same
from torchdirect.engines import file_io


@pytest.fixture(params=["torch", "torch-stock", "safetensors"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, torch.Tensor], Path]:
    state = {f"layer.{i}.weight": torch.randn(50 + i, 40) for i in range(8)} | {"big": torch.randn(600, 500)}
    path = tmp_path / ("a.safetensors" if request.param == "safetensors" else "a.pt")
    (torch.save if request.param == "torch-stock" else td.save)(state, path)
    return state, path


def test_names_places_and_tensors(saved: tuple[dict[str, torch.Tensor], Path]) -> None:
    state, path = saved
    data = path.read_bytes()
    with td.open(path) as file:
        assert sorted(file) == sorted(state)
        assert len(file) == len(state)
        assert "big" in file
        assert "none" not in file
        for name, tensor in state.items():
            info = file.info(name)
            assert (info.dtype, info.shape, info.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
            assert data[info.file_offset : info.file_offset + info.nbytes] == tensor.numpy().tobytes()
            assert same(file[name], tensor)
        assert sorted(file.load(prefix="layer.")) == sorted(state)[1:]
        assert list(file.load(["big", "layer.3.weight"])) == ["big", "layer.3.weight"]
        with pytest.raises(KeyError, match="no tensor 'nope'; it has 9"):
            file["nope"]
        assert repr(file).endswith("9 tensors>")
    with pytest.raises(ValueError, match="closed"):
        file["big"]


def test_only_what_is_needed_is_read(saved: tuple[dict[str, torch.Tensor], Path]) -> None:
    _, path = saved
    with td.open(path) as file:
        file.load(["layer.3.weight"])
        report = td.last_transfer()
        assert report is not None
        assert report.bytes == file.info("layer.3.weight").nbytes


indices = st.one_of(
    st.integers(-5, 5),
    st.slices(6),
    st.just(Ellipsis),
    st.tuples(st.integers(-3, 2) | st.slices(6), st.integers(-4, 3) | st.slices(5)),
    st.tuples(st.just(Ellipsis), st.integers(0, 1)),
    st.tuples(st.slices(6), st.slices(5), st.integers(0, 1) | st.slices(3)),
)


@given(index=indices, wide=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_slices_are_those_of_the_tensor(index: Any, wide: bool, tmp_path: Path) -> None:
    tensor = torch.arange(6 * 5 * 3.0).reshape(6, 5, 3)
    if wide:
        tensor = tensor.repeat(1, 1, 7000)
    path = tmp_path / f"{wide}.pt"
    if not path.exists():
        td.save({"t": tensor}, path, durable=False)
    with td.open(path) as file:
        part = file.get_slice("t")
        assert part.get_shape() == list(tensor.shape)
        assert part.get_dtype() is torch.float32
        try:
            expected = tensor[index]
        except IndexError:
            with pytest.raises(IndexError):
                part[index]
            return
        except ValueError:  # PyTorch has no negative steps
            with pytest.raises(ValueError, match="step"):
                part[index]
            return
        assert part[index].is_contiguous()
        assert torch.equal(part[index], expected)


def test_a_part_of_wide_rows_reads_just_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    td.save({"t": torch.randn(10, 4, 50_000)}, tmp_path / "a.pt")
    read = []
    real = file_io.read_into

    def count(*arguments: Any) -> None:
        read.append(arguments[4])
        real(*arguments)

    monkeypatch.setattr("torchdirect.engines.host.read_into", count)
    with td.open(tmp_path / "a.pt", transfer_type="CPU_CACHED_GPU") as file:
        file.get_slice("t")[:, 1:2]
    assert 2_000_000 <= sum(read) < 2_100_000


@pytest.mark.parametrize("name", ["trained", "views", "tied", "nested", "not contiguous", "parameter", "zero size"])
def test_nested_objects_have_dotted_names(name: str, tmp_path: Path) -> None:
    obj = PLAIN[name]()
    td.save(obj, tmp_path / "a.pt")

    def flat(value: Any, path: str) -> dict[str, torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return {path: value.detach()}
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else []
        )
        return {k: t for key, child in items for k, t in flat(child, f"{path}.{key}" if path else str(key)).items()}

    with td.open(tmp_path / "a.pt") as file:
        loaded = file.load()
        expected = flat(obj, "")
        assert loaded.keys() == expected.keys()
        assert all(same(loaded[k], expected[k]) for k in expected)
        if name == "tied":
            assert loaded["embed.weight"] is loaded["head.weight"]


def test_what_only_unpickling_can_rebuild_is_named(tmp_path: Path) -> None:
    td.save(
        {"q": OTHER["quantized"](), "s": OTHER["sparse coo"](), "f8": OTHER["float8"](), "t": torch.ones(2)},
        tmp_path / "a.pt",
    )
    with td.open(tmp_path / "a.pt") as file:
        assert "t" in file
        assert all(f"f8.{i}" in file for i in range(len(OTHER["float8"]())))
        with pytest.raises(KeyError, match=r"only td\.load can rebuild"):
            file.info("q")
        assert same(file["f8.0"], OTHER["float8"]()[0]) or file["f8.0"].dtype == OTHER["float8"]()[0].dtype


def test_hostile_strides_are_refused(tmp_path: Path) -> None:
    tensor = torch.ones(4)

    class Lie:
        def __reduce__(self) -> Any:
            storage = tensor.storage()  # type: ignore[no-untyped-call]
            return torch._utils._rebuild_tensor_v2, (storage, 0, (1 << 20,), (1,), False, {})

    torch.save({"w": Lie()}, tmp_path / "a.pt")
    with pytest.raises(td.CorruptCheckpointError, match=r"'w' reaches to byte 4194304 of storage '0', which has 16"):
        td.open(tmp_path / "a.pt")


def test_other_files_and_devices(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        td.open(tmp_path / "none.pt")
    with pytest.raises(IsADirectoryError):
        td.open(tmp_path)
    torch.save({}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(td.CorruptCheckpointError, match=r"td\.load"):
        td.open(tmp_path / "legacy.pt")
    td.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="not to 'meta'"):
        td.open(tmp_path / "a.pt", device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="cuda"):
            td.open(tmp_path / "a.pt", device="cuda")


def test_many_threads_share_a_handle(saved: tuple[dict[str, torch.Tensor], Path]) -> None:
    state, path = saved
    wrong: list[str] = []
    with td.open(path) as file:

        def work() -> None:
            for name in state:
                if not same(file[name], state[name]):
                    wrong.append(name)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
