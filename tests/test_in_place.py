"""Loading into existing tensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchdirect as td
from torchdirect import in_place


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 16))
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.fixture(params=["pt", "safetensors"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Model, Path]:
    model, path = Model(), tmp_path / f"a.{request.param}"
    td.safetensors.save_model(model, path) if request.param == "safetensors" else td.save(model.state_dict(), path)
    return model, path


def test_modules_keep_their_memory(saved: tuple[Model, Path]) -> None:
    model, path = saved
    fresh = Model()
    places = {name: t.data_ptr() for name, t in fresh.state_dict().items()}
    assert td.load_into(fresh, path) == ([], [])
    assert equal(fresh, model)
    assert {name: t.data_ptr() for name, t in fresh.state_dict().items()} == places
    report = td.last_transfer()
    assert report is not None
    assert report.operation == "load"


def test_state_dicts_and_nested_dicts(tmp_path: Path) -> None:
    obj: Any = {"model": Model().state_dict(), "extra": [torch.randn(3), {"x": torch.arange(5)}]}
    td.save(obj, tmp_path / "a.pt")
    target: Any = {"model": Model().state_dict(), "extra": [torch.zeros(3), {"x": torch.zeros(5, dtype=torch.int64)}]}
    td.load_into(target, tmp_path / "a.pt")
    assert torch.equal(target["extra"][0], obj["extra"][0])
    assert torch.equal(target["extra"][1]["x"], torch.arange(5))
    model = Model()
    td.load_into(model, tmp_path / "a.pt", prefix="model.")
    assert all(map(torch.equal, model.state_dict().values(), obj["model"].values()))


def test_mismatches_are_told_as_in_load_state_dict_before_a_byte_is_written(saved: tuple[Model, Path]) -> None:
    model, path = saved
    other = Model()
    other.layers[0] = torch.nn.Linear(16, 200)
    other.more = torch.nn.Linear(2, 2)
    del other.layers[2]
    with pytest.raises(RuntimeError) as theirs:
        other.load_state_dict(model.state_dict())  # which writes what fits, before it raises
    before = {name: t.fill_(3).clone() for name, t in other.state_dict().items()}
    with pytest.raises(RuntimeError) as ours:
        td.load_into(other, path)
    mismatch = "size mismatch for layers.0.weight: copying a param with shape torch.Size([300, 16]) from checkpoint"
    for part in ("Missing key(s) in state_dict: ", '"more.weight"', "Unexpected key(s) in state_dict: ", mismatch):
        assert part in str(theirs.value)
        assert part in str(ours.value)
    assert path.name in str(ours.value)
    assert all(torch.equal(t, before[name]) for name, t in other.state_dict().items())
    partial = torch.nn.ModuleDict({"embed": torch.nn.Embedding(50, 16), "new": torch.nn.Linear(1, 1)})
    missing, unexpected = td.load_into(partial, path, strict=False)
    assert missing == ["new.weight", "new.bias"]
    assert "layers.0.weight" in unexpected
    assert torch.equal(partial["embed"].weight, model.embed.weight)  # type: ignore[arg-type]


def test_meta_modules_are_made_on_their_device(saved: tuple[Model, Path]) -> None:
    model, path = saved
    with torch.device("meta"):
        fresh = Model()
    with pytest.raises(RuntimeError, match=r"on meta.*give device="):
        td.load_into(fresh, path)
    td.load_into(fresh, path, device="cpu")
    assert equal(fresh, model)
    assert fresh.head.weight is fresh.embed.weight
    assert isinstance(fresh.embed.weight, torch.nn.Parameter)
    with torch.device("meta"):
        wrong = torch.nn.ModuleDict({"embed": torch.nn.Embedding(51, 16)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        td.load_into(wrong, path, strict=False, device="cpu")
    assert wrong["embed"].weight.is_meta


def test_buffers_that_no_checkpoint_holds_are_named(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
        module.register_buffer("table", torch.ones(3), persistent=False)
    td.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "a.pt")
    with pytest.warns(UserWarning, match=r"not initialised; compute them again: table"):
        td.load_into(module, tmp_path / "a.pt", device="cpu")


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(list(reversed(range(tensor.dim()))))


@given(
    shape=st.lists(st.integers(0, 30), min_size=0, max_size=3),
    stored=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64]),
    wanted=st.sampled_from([torch.float32, torch.bfloat16, torch.int32]),
    turned=st.booleans(),
    file_turned=st.booleans(),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_other_dtypes_and_layouts_pass_through_a_bounded_buffer(
    shape: list[int], stored: torch.dtype, wanted: torch.dtype, turned: bool, file_turned: bool, tmp_path: Path
) -> None:
    values = torch.randint(-100, 100, shape).to(stored)
    source = flipped(flipped(values).contiguous())
    td.save({"t": source if file_turned else values}, tmp_path / "a.pt", durable=False)
    target = torch.zeros(list(reversed(shape)) if turned else shape, dtype=wanted)
    target = flipped(target) if turned else target
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_place, "_CONVERSION_BYTES", 4096)
        td.load_into({"t": target}, tmp_path / "a.pt")
    assert torch.equal(target, values.to(wanted))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("stepped", [True, False])
def test_optimizers(stepped: bool, kind: Any, tmp_path: Path) -> None:
    def trained(steps: int) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(steps)
        model = torch.nn.Linear(5, 4)
        optimizer = kind(
            model.parameters(), lr=0.1 * (steps + 1), **({"momentum": 0.9} if kind is torch.optim.SGD else {})
        )
        for _ in range(steps):
            model(torch.randn(3, 5)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(3)
    td.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    fresh_model, fresh = trained(1 if stepped else 0)
    td.load_into(fresh, tmp_path / "a.pt", prefix="optimizer.", strict=False)
    td.load_into(fresh_model, tmp_path / "a.pt", prefix="model.")
    expected, got = optimizer.state_dict(), fresh.state_dict()
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys()
    for i, entries in expected["state"].items():
        for key, value in entries.items():
            mine = got["state"][i][key]
            assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value
    for m, o in ((model, optimizer), (fresh_model, fresh)):
        o.zero_grad()
        m(torch.ones(2, 5)).sum().backward()
        o.step()
    assert torch.equal(model.weight, fresh_model.weight)  # type: ignore[arg-type]
    other = kind(torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1)).parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match=r"\[2\] parameters in the file and \[4\] here"):
        td.load_into(other, tmp_path / "a.pt", prefix="optimizer.")


def test_targets_that_are_none(tmp_path: Path) -> None:
    td.save({"t": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(TypeError, match="target is a list"):
        td.load_into([torch.ones(2)], tmp_path / "a.pt")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        td.load_into({}, tmp_path / "none.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        td.load_into({"t": torch.zeros(2, requires_grad=True)}, tmp_path / "a.pt")
