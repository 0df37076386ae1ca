"""The index of a pickle: complete, and inert."""

from __future__ import annotations

import builtins
import collections
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import OTHER, PLAIN, same
from torchdirect.formats.pickle_index import UnsupportedPickleError, index_pickle, rebuild_plain
from torchdirect.names import describer


def saved(obj: object) -> tuple[bytes, list[bytes]]:
    """Return data.pkl and the records of its storages."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    with zipfile.ZipFile(buffer) as archive:
        names = [n for n in archive.namelist() if "/data/" in n and n.rsplit("/", 1)[1].isdigit()]
        return archive.read("archive/data.pkl"), [archive.read(n) for n in sorted(names, key=lambda n: int(n[13:]))]


@pytest.mark.parametrize("name", [*PLAIN, *OTHER])
def test_every_storage_is_found(name: str) -> None:
    data, records = saved({**PLAIN, **OTHER}[name]())
    index = index_pickle(data)
    found = {r.key: r.nbytes for r in index.references}
    assert {key: len(records[int(key)]) for key in found if records[int(key)]} == {k: n for k, n in found.items() if n}
    assert len(found) == len(records)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_pickles_are_rebuilt_as_torch_does(name: str) -> None:
    obj = PLAIN[name]()
    data, records = saved(obj)
    index = index_pickle(data)
    if not index.plain:
        pytest.skip("left to torch.load")
    storages = [torch.UntypedStorage(bytearray(r)) if r else torch.UntypedStorage(0) for r in records]  # type: ignore[no-untyped-call]
    assert same(rebuild_plain(index, lambda reference: storages[int(reference.key)]), obj)


def test_what_is_one_object_stays_one() -> None:
    tensor, inner = torch.ones(3), [1, 2.5, None, True]
    obj = {"a": tensor, "b": [tensor, inner], "c": (inner, (tensor,)), "p": torch.nn.Parameter(tensor[:2])}
    obj["self"] = obj
    data, records = saved(obj)
    storages = [torch.UntypedStorage(bytearray(r)) for r in records]  # type: ignore[no-untyped-call]
    made = rebuild_plain(index_pickle(data), lambda reference: storages[int(reference.key)])
    assert made["self"] is made
    assert made["a"] is made["b"][0] is made["c"][1][0]
    assert made["b"][1] is made["c"][0] and made["b"][1] == inner
    assert isinstance(made["p"], torch.nn.Parameter) and made["p"].data_ptr() == made["a"].data_ptr()
    assert made["p"].requires_grad and not made["a"].requires_grad
    assert made["a"]._backward_hooks == collections.OrderedDict()


def test_in_place_changes_of_one_tensor_leave_the_versions_of_others_alone() -> None:
    data, records = saved([torch.ones(2), torch.ones(2)])
    storages = [torch.UntypedStorage(bytearray(r)) for r in records]  # type: ignore[no-untyped-call]
    first, second = rebuild_plain(index_pickle(data), lambda reference: storages[int(reference.key)])
    version = second._version
    first.add_(1)
    assert second._version == version and not second._is_view()


def test_strings_of_python_2_are_left_to_torch() -> None:
    assert index_pickle(b"\x80\x02X\2\0\0\0hi.").plain
    assert not index_pickle(b"\x80\x02U\2hi.").plain


def test_state_dicts_are_plain_and_code_is_not() -> None:
    for name in ("linear", "trained", "views", "large and small"):
        assert index_pickle(saved(PLAIN[name]())[0]).plain, name
    for name in ("module", "own reduce", "subclass", "sparse coo"):
        assert not index_pickle(saved(OTHER[name]())[0]).plain, name


class Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_nothing_of_the_file_runs(protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "ran"
    hostile = [
        Call(os.mkdir, str(marker)),
        Call(builtins.exec, f"open({str(marker)!r}, 'w')"),
        Call(builtins.getattr, Path, "cwd"),
        {Call(os.mkdir, str(marker)): 1},
        collections.OrderedDict(a=Call(os.mkdir, str(marker))),
        Call(torch.load, str(marker)),
    ]
    for obj in hostile:
        data = pickle.dumps(obj, protocol=protocol)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(builtins, "__import__", lambda *_, **__: pytest.fail("the index imports"))
            try:
                index = index_pickle(data)
            except UnsupportedPickleError:
                continue
        assert not index.plain
        with pytest.raises((AttributeError, TypeError, UnsupportedPickleError, pickle.UnpicklingError)):
            rebuild_plain(index, lambda _: pytest.fail("no storage is there"))
    assert not marker.exists()


BROKEN = {
    "persistent id of another shape": b"\x80\x02U\x03abcQ.",
    "no storage class": b"\x80\x02(U\x07storageK\x01U\x010U\x03cpuK\x04tQ.",
    "negative size": pickle.dumps("x"),
    "memo that does not exist": b"\x80\x02h\x63.",
    "huge memo index": b"\x80\x02j\xff\xff\xff\x7f.",
    "nothing on the stack": b"\x80\x020.",
    "empty": b"",
    "text": b"hello",
    "extension code": b"\x80\x02\x82\x01.",
    "long of two gigabytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "frame past the end": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "unhashable key": b"\x80\x02}]K\x01s.",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_pickles(name: str) -> None:
    if name == "negative size":
        data = saved(torch.ones(7))[0].replace(b"K\x07tq", b"J\xff\xff\xff\xfftq")
    else:
        data = BROKEN[name]
    with pytest.raises(UnsupportedPickleError):
        index_pickle(data)


def test_memory_is_in_proportion() -> None:
    """One opcode of five bytes would make the interpreter's own unpickler take 34 GB."""
    for hostile in (b"\x80\x02]r\xff\xff\xff\x7f.", b"]p2000000000\n.", b"\x80\x05\x96" + b"\xff" * 6 + b"\0\0.",
                    b"\x80\x02X\xff\xff\xff\x7fabc.", b"\x80\x02" + b"]r\x10\0\x01\0" * 3 + b"."):  # fmt: skip
        with pytest.raises(UnsupportedPickleError, match="at byte"):
            index_pickle(hostile)
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index_pickle(b"\x80\x02]r\xff\xff\0\0.")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "KiB"


def test_references_without_end_are_not_followed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdirect.names._MAX_STEPS", 10_000)
    data = b"\x80\x02]q\0" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(60)) + b"."
    assert describer(index_pickle(data).root, ["0"])(0) == "record 'data/0'"


def test_deep_nesting_ends(recursion: int = 20_000) -> None:
    data = b"\x80\x02" + b"]" * recursion + b"a" * (recursion - 1) + b"."
    try:
        describer(index_pickle(data).root, ["0"])(0)
    except UnsupportedPickleError:
        pass


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes(data: bytes) -> None:
    for candidate in (data, b"\x80\x02" + data + b"."):
        try:
            index_pickle(candidate)
        except UnsupportedPickleError:
            pass


def test_names_of_tensors() -> None:
    data, _ = saved({"model": {"layer.weight": torch.ones(2)}, "steps": [1, torch.zeros(3)]})
    index = index_pickle(data)
    name = describer(index.root, [r.key for r in index.references])
    assert [name(0), name(1)] == ["tensor 'model.layer.weight'", "tensor 'steps.1'"]
