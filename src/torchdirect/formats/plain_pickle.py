"""Pickling plain state dicts, byte for byte as the interpreter's own pickler does, in two thirds of the time.

With many small tensors a save is bound by pickling: `pickle.Pickler` asks a Python function for the persistent id of
each of some twenty objects that a tensor consists of. Here a tensor is a handful of byte strings, most of which it
shares with all tensors of its dtype and shape.

The rules are those of ``Modules/_pickle.c`` with protocol 2. One makes the rest simple: the pickler numbers what it
memoizes as it goes, so the n-th PUT has the index n, and the output is a list of chunks with a PUT after each.
"""

from __future__ import annotations

import collections
import copyreg
import itertools
import pickle
import struct
from collections.abc import Iterable
from typing import Any

import torch

from torchdirect.formats.pickle_index import STORAGE_DTYPES

PLAIN_STORAGES = {
    dtype: getattr(torch, name)
    for name, dtype in STORAGE_DTYPES.items()
    if name != "UntypedStorage" and "Q" not in name
}
"""The dtypes of plain tensors, and the storage class that the pickle names for each."""

PROTOCOL = 2
"""The default of ``torch.save``, and the only one here."""

_ATOMS = frozenset({int, float, bool, type(None)})
_BATCH = 1000  # items after which the pickler closes a batch and opens another

# Named tensors have left PyTorch; where they still exist, its own reduction refuses them.
_has_names = getattr(torch.Tensor, "has_names", lambda tensor: False)


class NotPlainError(Exception):
    """The object holds something that only the interpreter's pickler can pickle."""


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether a `torch.Tensor` (not of a subclass) is pickled as a storage with an offset, a size and a stride."""
    return not (
        tensor.device.type not in ("cpu", "cuda")
        or tensor.layout is not torch.strided
        or tensor.dtype not in PLAIN_STORAGES
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or _has_names(tensor)
        or tensor._backward_hooks
        or tensor.__dict__
        or tensor._is_zerotensor()
    )


def dumps(obj: object, location: str | None = None) -> tuple[bytes, tuple[torch.UntypedStorage, ...]]:
    """Pickle an object of plain containers, numbers, strings and plain tensors as ``torch.save`` does.

    Parameters
    ----------
    location
        The device tag of every storage, if not that of the device where it is.

    Returns
    -------
    tuple
        The content of ``data.pkl``, and the storages by their record's number.

    Raises
    ------
    NotPlainError
        If there is anything else in it, or tensors that see the same memory as different dtypes.
    """
    if copyreg._extension_registry or not {torch.Tensor, collections.OrderedDict}.isdisjoint(copyreg.dispatch_table):  # type: ignore[attr-defined]
        raise NotPlainError("the program has changed how such objects are pickled")
    writer = _Writer(location)
    try:
        writer.save(obj)
    except RecursionError:
        raise NotPlainError("nested too deeply") from None
    return writer.finish(), tuple(writer.storages)


def _opcodes(value: object) -> bytes:
    """Return the opcodes of a number, or of None."""
    return pickle.dumps(value, PROTOCOL)[2:-1]


def _memoized_opcodes(value: object) -> bytes:
    """Return the opcodes of a string or a global, up to the PUT."""
    return pickle.dumps(value, PROTOCOL)[2:-3]


class _Writer:
    def __init__(self, location: str | None) -> None:
        self._location = location
        self.storages: list[torch.UntypedStorage] = []
        self._chunks: list[bytes] = []  # the n-th ends before the n-th PUT
        self._open = b""  # what follows the last PUT
        self._memo: dict[int, int] = {}  # index by id
        self._alive: list[object] = []  # so that no id in the memo is given out again
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._alike: dict[tuple[Any, ...], tuple[bytes, list[bytes]]] = {}

    def finish(self) -> bytes:
        count = len(self._chunks)
        short = [b"q%c" % index for index in range(min(count, 256))]
        long = map(struct.Struct("<cI").pack, itertools.repeat(b"r"), range(256, count))
        parts = zip(self._chunks, itertools.chain(short, long), strict=True)
        return b"".join((b"\x80\x02", *itertools.chain.from_iterable(parts), self._open, b"."))

    def _put(self, obj: object) -> None:
        self._memo[id(obj)] = len(self._chunks)
        self._put_temporary()

    def _put_temporary(self) -> None:
        """Memoize an object that only the pickler ever sees: nothing can refer to it again."""
        self._chunks.append(self._open)
        self._open = b""

    def save(self, obj: Any) -> None:
        kind = type(obj)
        if kind in _ATOMS:
            self._open += _opcodes(obj)
        elif (index := self._memo.get(id(obj))) is not None:
            self._open += b"h%c" % index if index < 256 else b"j" + index.to_bytes(4, "little")
        elif kind is torch.Tensor:
            self._save_tensor(obj)
        elif kind is str:
            self._save_named(obj)
        elif kind is dict:
            self._save_dict(obj)
        elif kind is collections.OrderedDict:
            self._save_ordered_dict(obj)
        elif kind is list:
            self._save_list(obj)
        elif kind is tuple:
            self._save_tuple(obj)
        else:
            raise NotPlainError(f"an object of class {kind.__name__}")

    def _save_named(self, obj: Any) -> None:
        """Save a string, or a class or function by its name."""
        if (index := self._memo.get(id(obj))) is not None:
            self._open += b"h%c" % index if index < 256 else b"j" + index.to_bytes(4, "little")
        else:
            self._open += _memoized_opcodes(obj)
            self._put(obj)

    def _save_dict(self, obj: dict[Any, Any]) -> None:
        self._open += b"}"
        self._put(obj)
        items = iter(obj.items())
        if len(obj) == 1:
            self._save_items(items)
            self._open += b"s"
        elif obj:
            for _ in range(len(obj) // _BATCH + 1):  # a full last batch is followed by an empty one
                self._open += b"("
                self._save_items(itertools.islice(items, _BATCH))
                self._open += b"u"

    def _save_ordered_dict(self, obj: collections.OrderedDict[Any, Any]) -> None:
        self._save_named(collections.OrderedDict)
        self._open += b")R"
        self._put(obj)
        items = iter(obj.items())
        for left in range(len(obj), 0, -_BATCH):
            self._open += b"(" if left > 1 else b""
            self._save_items(itertools.islice(items, _BATCH))
            self._open += b"u" if left > 1 else b"s"
        if state := vars(obj):
            self.save(state)
            self._open += b"b"

    def _save_items(self, items: Iterable[tuple[Any, Any]]) -> None:
        for key, value in items:
            self.save(key)
            self.save(value)

    def _save_list(self, obj: list[Any]) -> None:
        self._open += b"]"
        self._put(obj)
        if len(obj) == 1:
            self.save(obj[0])
            self._open += b"a"
            return
        for start in range(0, len(obj), _BATCH):
            self._open += b"("
            for value in obj[start : start + _BATCH]:
                self.save(value)
            self._open += b"e"

    def _save_tuple(self, obj: tuple[Any, ...]) -> None:
        if not obj:
            self._open += b")"
            return
        self._open += b"(" if len(obj) > 3 else b""
        for value in obj:
            self.save(value)
        if id(obj) in self._memo:
            raise NotPlainError("a tuple that holds itself")
        self._open += b"t" if len(obj) > 3 else b"\x85\x86\x87"[len(obj) - 1 : len(obj)]
        self._put(obj)

    def _save_tensor(self, tensor: torch.Tensor) -> None:
        """Save what ``Tensor.__reduce_ex__`` returns, the storage as its persistent id."""
        if not is_plain_tensor(tensor):
            raise NotPlainError("a tensor with more to it than a storage, an offset, a size and a stride")
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        nbytes = storage.nbytes()
        address = storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) is not dtype:
            raise NotPlainError("several tensors see the same memory as different dtypes")
        identity = storage._cdata
        key = self._keys.get(identity)
        if key is None:
            key = self._keys[identity] = str(len(self.storages))
            self.storages.append(storage)
        location = self._location or torch.serialization.location_tag(storage)
        key_is_new, location_is_new = id(key) not in self._memo, id(location) not in self._memo
        size, stride = tensor.size(), tensor.stride()
        kind = dtype, nbytes, tensor.storage_offset(), size, stride, tensor.requires_grad, location, location_is_new
        first = len(self._chunks)
        if key_is_new and (alike := self._alike.get(kind)) is not None:
            before_key, after_key = alike
            self._chunks.append(b"%b%bX%b%b" % (self._open, before_key, len(key).to_bytes(4, "little"), key.encode()))
            self._chunks += after_key
            self._open = b""
            self._memo[id(key)] = first
            if location_is_new:
                self._memo[id(location)] = first + 1
            self._memo[id(tensor)] = len(self._chunks) - 1
        else:
            self._save_reduced(tensor, PLAIN_STORAGES[dtype], key, location, nbytes // dtype.itemsize)
            known = self._before_key(PLAIN_STORAGES[dtype])
            if key_is_new and self._chunks[first].endswith(known + _memoized_opcodes(key)):
                self._alike[kind] = known, self._chunks[first + 1 :]
        if location_is_new:
            self._alive.append(location)

    def _before_key(self, storage_class: type) -> bytes:
        """Return what every tensor of a dtype but the first begins with, up to the key of its storage."""
        before, self._open = self._open, b""
        self._save_named(torch._utils._rebuild_tensor_v2)
        self._open += b"(("
        self._save_named("storage")
        self._save_named(storage_class)
        result, self._open = self._open, before
        return result

    def _save_reduced(self, tensor: torch.Tensor, storage_class: type, key: str, location: str, numel: int) -> None:
        self._save_named(torch._utils._rebuild_tensor_v2)
        self._open += b"(("
        for name in ("storage", storage_class, key, location):
            self._save_named(name)
        self._open += _opcodes(numel) + b"t"
        self._put_temporary()
        self._open += b"Q" + _opcodes(tensor.storage_offset())
        for numbers in (tensor.size(), tensor.stride()):
            self._save_temporary(numbers)
        self._open += _opcodes(tensor.requires_grad)
        self._save_named(collections.OrderedDict)
        self._open += b")R"
        self._put_temporary()
        self._open += b"t"
        self._put_temporary()
        self._open += b"R"
        self._put(tensor)

    def _save_temporary(self, numbers: tuple[int, ...]) -> None:
        if not numbers:
            self._open += b")"
            return
        self._open += b"(" if len(numbers) > 3 else b""
        self._open += b"".join(map(_opcodes, numbers))
        self._open += b"t" if len(numbers) > 3 else b"\x85\x86\x87"[len(numbers) - 1 : len(numbers)]
        self._put_temporary()
