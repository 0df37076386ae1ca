"""The pickler for plain objects: the bytes of the interpreter's own, or a refusal."""

from __future__ import annotations

import collections
import copyreg
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import OTHER, PLAIN
from torchdirect.formats import plain_pickle, torch_zip
from torchdirect.formats.pickle_index import index_pickle


def check(obj: object) -> None:
    """Compare data and storages with what the interpreter's pickler gives."""
    expected = torch_zip._pickle_any(obj, pickle, 2)
    data, storages = plain_pickle.dumps(obj)
    assert data == expected.data
    assert [s._cdata for s in storages] == [s._cdata for s in expected.storages]


@pytest.mark.parametrize("name", [n for n in PLAIN if n != "parameter"])
def test_plain_objects(name: str) -> None:
    check(PLAIN[name]())


@pytest.mark.parametrize("name", [*(n for n in OTHER if n != "own reduce"), "parameter"])
def test_everything_else_is_refused(name: str) -> None:
    with pytest.raises(plain_pickle.NotPlainError):
        plain_pickle.dumps({**OTHER, **PLAIN}[name]())


@pytest.mark.parametrize("count", [0, 1, 2, 255, 999, 1000, 1001, 1002, 2000, 2001])
def test_batches(count: int) -> None:
    for make in (dict, collections.OrderedDict):
        check(make((i, i) for i in range(count)))
        check(make((f"k{i}", torch.empty(i % 3)) for i in range(count)))
    check([torch.empty(2, 3) for _ in range(count)])
    check(list(range(count)))


def test_what_is_one_object_is_one_reference() -> None:
    tensor, base, inner = torch.ones(3, 4), torch.arange(9.0), [1, 2.5, None, True, 2**40, -1, 70_000]
    obj: dict[str, Any] = {"a": tensor, "b": [tensor, inner], "c": (inner, (tensor,), (), (1, 2, 3, 4))}
    obj.update({f"v{i}": base[i:] for i in range(9)})
    obj.update({str(i): torch.ones(2, requires_grad=i % 2 == 0) for i in range(30)})
    obj["self"] = obj
    obj["again"] = obj["c"]
    obj["storage"], obj["cpu"] = "cpu", "storage"  # strings that the pickle of a tensor holds too
    check(obj)
    check({"0": torch.ones(1), "1": torch.ones(1), "cpu": torch.ones(1), "\ud800é": torch.tensor(1.5)})


def test_attributes_of_ordered_dictionaries() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    check([model.state_dict(), torch.optim.AdamW(model.parameters()).state_dict()])


def test_a_tuple_that_holds_itself_is_refused() -> None:
    inner: list[Any] = []
    obj = (inner,)
    inner.append(obj)
    with pytest.raises(plain_pickle.NotPlainError):
        plain_pickle.dumps(obj)


def test_depth_without_end_is_refused() -> None:
    obj: list[Any] = []
    for _ in range(100_000):
        obj = [obj]
    with pytest.raises(plain_pickle.NotPlainError):
        plain_pickle.dumps(obj)


def test_two_dtypes_of_the_same_memory_are_refused() -> None:
    tensor = torch.ones(4)
    with pytest.raises(plain_pickle.NotPlainError):
        plain_pickle.dumps([tensor, tensor.view(torch.int32)])


def test_a_changed_reduction_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, torch.Tensor, lambda tensor: (int, (1,)))
    with pytest.raises(plain_pickle.NotPlainError):
        plain_pickle.dumps([torch.ones(1)])


tensors = st.builds(
    lambda shape, dtype, transpose: torch.empty(shape, dtype=dtype).movedim(0, -1) if transpose else torch.empty(shape),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]),
    st.booleans(),
)
atoms = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
objects = st.recursive(
    st.one_of(atoms, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.lists(inner, max_size=6).map(tuple),
        st.dictionaries(atoms, inner, max_size=6),
        st.dictionaries(atoms, inner, max_size=6).map(collections.OrderedDict),
    ),
    max_leaves=60,
)


@given(objects)
@settings(max_examples=200, deadline=None)
def test_any_plain_object(obj: Any) -> None:
    check([obj, obj, {"again": obj}])


def test_device_tags_that_are_new_strings_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.serialization.location_tag", lambda storage: "cuda:" + str(storage.nbytes() % 2))
    check([torch.empty(i % 3, dtype=torch.uint8) for i in range(600)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16])
def test_a_given_place_stands_for_that_of_every_storage(dtype: torch.dtype) -> None:
    tensors = [torch.ones(3).to(dtype), torch.ones(4).to(dtype)]
    data = torch_zip.pickle_object(tensors, pickle, 2, location="cuda:7").data
    assert {reference.location for reference in index_pickle(data).references} == {"cuda:7"}
    assert (
        torch_zip.pickle_object(tensors, pickle, 2, location="cpu").data
        == torch_zip.pickle_object(tensors, pickle, 2).data
    )
