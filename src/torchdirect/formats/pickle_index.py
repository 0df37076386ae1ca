"""Scanning ``data.pkl`` without running anything of it: which storages it refers to, in which order.

The scan is an ordinary unpickling in which every global resolves to an inert stub, so a pickle can build containers
and numbers but can neither import nor call anything.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

STORAGE_DTYPES = {
    "UntypedStorage": torch.uint8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "QUInt8Storage": torch.quint8,
    "QInt8Storage": torch.qint8,
    "QInt32Storage": torch.qint32,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}
"""Every storage class that PyTorch pickles, and its dtype; newer dtypes use ``UntypedStorage``."""

_ITEMSIZES = {name: dtype.itemsize for name, dtype in STORAGE_DTYPES.items()}


class UnsupportedPickleError(Exception):
    """The pickle holds something that the index cannot describe; PyTorch's own loader decides about it."""


_NO_ITEMS: list[Any] = []  # most stubs get none, and a list for each would be half of the scan's objects


@dataclass
class _Record:
    """What one scan saw: every stub that it made, and whether a stub was used as no plain state dict uses it."""

    stubs: list[Inert] = field(default_factory=list)
    unusual: bool = False


class Inert:
    """What every global of the pickle resolves to: takes arguments and state, and does nothing with them."""

    __slots__ = ("args", "items", "state")
    args: tuple[Any, ...]
    items: list[Any]
    state: Any
    module = ""
    qualname = ""
    record = _Record()

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        self = object.__new__(cls)
        self.args = args
        self.items = _NO_ITEMS
        self.state = None
        cls.record.stubs.append(self)
        if kwargs:
            cls.record.unusual = True
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        self.record.unusual = True
        return type(self)(*args)

    def __setstate__(self, state: Any) -> None:
        self.record.unusual |= self.state is not None
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.items is _NO_ITEMS:
            self.items = []
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.record.unusual = True

    add = append
    extend = append


@dataclass(frozen=True, slots=True)
class StorageReference:
    """One persistent id of the pickle.

    Attributes
    ----------
    key
        Name of the record under ``data/``.
    location
        Device tag that the writer stored, such as ``"cuda:0"``.
    nbytes
        Length of the storage in bytes.
    type_name
        Storage class, such as ``"FloatStorage"``.
    """

    key: str
    location: str
    nbytes: int
    type_name: str


@dataclass(frozen=True)
class PickleIndex:
    """What a pickle refers to.

    Attributes
    ----------
    references
        Every persistent id in the order in which an unpickler meets it.
    root
        The object, with `Inert` in place of everything that is not a plain container or number.
    global_names
        ``module.name`` of everything that a real unpickling would import.
    plain
        Whether it holds nothing but containers, numbers, strings, tensors and parameters, so that `rebuild_plain`
        makes of it exactly what PyTorch's unpicklers make.
    """

    references: tuple[StorageReference, ...]
    root: Any
    global_names: tuple[str, ...]
    plain: bool


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        # latin1 decodes every Python 2 string, so that such a pickle cannot stop the scan.
        super().__init__(io.BytesIO(data), encoding="latin1")
        self.references: list[StorageReference] = []
        self.classes: dict[tuple[str, str], type[Inert]] = {}
        self.record = _Record()

    def find_class(self, module: str, name: str) -> type[Inert]:
        found = self.classes.get((module, name))
        if found is None:
            found = type(name, (Inert,), {"__slots__": (), "module": module, "qualname": name, "record": self.record})
            self.classes[(module, name)] = found
        return found

    def persistent_load(self, saved_id: Any) -> StorageReference:
        try:
            kind, storage_type, key, location, numel = saved_id
            type_name = storage_type.qualname
            itemsize = _ITEMSIZES[type_name]
        except (TypeError, ValueError, AttributeError, KeyError) as exc:
            raise UnsupportedPickleError(f"persistent id {saved_id!r:.200}") from exc
        if (
            kind != "storage"
            or not isinstance(key, str)
            or not isinstance(location, str)
            or type(numel) is not int
            or numel < 0
        ):
            raise UnsupportedPickleError(f"persistent id {saved_id!r:.200}")
        reference = StorageReference(key, location, numel * itemsize, type_name)
        self.references.append(reference)
        return reference


# The C unpickler keeps its memo in an array as long as the largest index, so one opcode of five bytes can make it take
# 34 GB. And some opcodes take memory for a length that they only claim. Honest memo indices count up from zero. The
# opcodes are those of pickletools.opcodes; runs of them that are harmless are skipped by one expression, since there
# are many: of fixed length, short strings, and puts at indices that the length of the pickle allows.
@functools.lru_cache(maxsize=16)
def _harmless(limit: int) -> re.Pattern[bytes]:
    """Return the expression for a run of harmless opcodes, with memo indices below ``limit << 16``."""
    high, low = limit >> 8, limit & 0xFF
    index = rb"..(?:[\0-%b]%b" % (re.escape(bytes([low])), re.escape(bytes([high])))
    index += rb"|.[\0-%b])" % re.escape(bytes([high - 1])) if high else b")"
    short = b"|".join(rb"X%b\0\0\0.{%d}" % (re.escape(bytes([n])), n) for n in range(40))
    return re.compile(
        rb"(?:[()012NQR\]}abdelostu\x81\x85-\x89\x8f-\x94\x97\x98]|[Khq\x80\x82].|[M\x83]..|[Jj\x84].{4}"
        rb"|r" + index + rb"|[G\x95].{8}|" + short + rb")*",
        re.DOTALL,
    )


_COUNTED = {
    **dict.fromkeys(b"UC\x8c\x8a", 1),
    **dict.fromkeys(b"TBX\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
"""Opcodes with an argument of counted length, and the bytes of the count."""
_LINES = {**dict.fromkeys(b"FILPgpSV", 1), **dict.fromkeys(b"ci", 2)}
"""Opcodes with arguments that end with a line, and how many lines."""


def _check_opcodes(data: bytes) -> None:
    """Refuse a pickle that would take memory out of all proportion to its length.

    Raises
    ------
    UnsupportedPickleError
        With the place.
    """
    at, end = 0, len(data)
    harmless = _harmless(min(end >> 16, 0xFFFE))
    while True:
        found = harmless.match(data, at)
        at = found.end() if found else at
        if at >= end:
            raise UnsupportedPickleError(f"no end within {end} bytes")
        opcode = data[at]
        if opcode == 0x2E:  # STOP
            return
        if (width := _COUNTED.get(opcode)) is not None:
            count = int.from_bytes(data[at + 1 : at + 1 + width], "little")
            following = at + 1 + width + count
        elif (lines := _LINES.get(opcode)) is not None:
            following = at + 1
            for _ in range(lines):
                following = data.find(b"\n", following) + 1 or end + 1
            if opcode == 0x70:  # PUT, with its index as text
                digits = data[at + 1 : following - 1]
                if len(digits) > 18 or not digits.isdigit() or int(digits) > max(at, 0xFFFF):
                    raise UnsupportedPickleError(f"memo index at byte {at} is beyond all that came before")
        elif opcode == 0x72:  # LONG_BINPUT
            following = at + 5
            if int.from_bytes(data[at + 1 : following], "little") > at:
                raise UnsupportedPickleError(f"memo index at byte {at} is beyond all that came before")
        else:
            raise UnsupportedPickleError(f"opcode {opcode:#x} at byte {at}")
        if following > end:
            raise UnsupportedPickleError(f"opcode {opcode:#x} at byte {at} claims more bytes than there are")
        at = following


def index_pickle(data: bytes) -> PickleIndex:
    """Scan a ``data.pkl``.

    Raises
    ------
    UnsupportedPickleError
        If it is not a pickle, or refers to storages in a way that PyTorch's writer never does.
    """
    if getattr(copyreg, "_inverted_registry", None):
        # An extension code resolves through a cache of real objects and would not pass find_class.
        raise UnsupportedPickleError("extension codes are registered in this process")
    _check_opcodes(data)
    unpickler = _IndexUnpickler(data)
    try:
        root = unpickler.load()
    except UnsupportedPickleError:
        raise
    except Exception as exc:  # a hostile pickle can fail in any way; PyTorch's loader gives the verdict
        raise UnsupportedPickleError(f"{type(exc).__name__}: {exc}") from exc
    names = tuple(f"{module}.{name}" for module, name in unpickler.classes)
    plain = not unpickler.record.unusual and _is_plain(data, names, unpickler.record.stubs)
    return PickleIndex(tuple(unpickler.references), root, names, plain)


# A state dict holds little but tensors, and PyTorch's weights-only unpickler, written in Python, takes most of the
# time that 20,000 of them need. Where the scan has shown that a pickle consists of the following and nothing else, the
# interpreter's own unpickler makes the same object of it, and can as little be misused: it can call nothing but these.

_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
_ORDERED_DICT = "collections.OrderedDict"
_PLAIN_CALLABLES = {_REBUILD_TENSOR, _REBUILD_PARAMETER, _ORDERED_DICT}
_STORAGE_NAMES = {f"torch.{name}" for name in STORAGE_DTYPES}


def _is_plain(data: bytes, names: Sequence[str], stubs: Sequence[Inert]) -> bool:
    # Protocol 2 is torch.save's default, and the newest whose every opcode the weights-only unpickler knows.
    if data[:2] != b"\x80\x02" or not _PLAIN_CALLABLES.union(_STORAGE_NAMES).issuperset(names):
        return False
    return all(_is_plain_stub(stub) for stub in stubs)


def _is_plain_stub(stub: Inert) -> bool:
    name, args = f"{stub.module}.{stub.qualname}", stub.args
    if name == _ORDERED_DICT:
        # A module's state_dict() carries its _metadata as an attribute of the dictionary.
        return not args and (
            stub.state is None or (type(stub.state) is dict and all(type(k) is str for k in stub.state))
        )
    if stub.state is not None or stub.items:
        return False
    if name == _REBUILD_TENSOR:
        return (
            len(args) == 6
            and type(args[0]) is StorageReference
            and type(args[1]) is int
            and _are_integers(args[2])
            and _are_integers(args[3])
            and type(args[4]) is bool
            and _is_stub_of(args[5], _ORDERED_DICT)
        )
    if name == _REBUILD_PARAMETER:
        return (
            len(args) == 3
            and _is_stub_of(args[0], _REBUILD_TENSOR)
            and type(args[1]) is bool
            and _is_stub_of(args[2], _ORDERED_DICT)
        )
    return False


def _are_integers(values: Any) -> bool:
    return type(values) is tuple and all(type(value) is int for value in values)


def _is_stub_of(value: Any, name: str) -> bool:
    return isinstance(value, Inert) and f"{value.module}.{value.qualname}" == name


def _rebuild_tensor(
    storage: tuple[torch.UntypedStorage, torch.dtype],
    storage_offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    backward_hooks: Any,
) -> torch.Tensor:
    """Do what ``torch._utils._rebuild_tensor_v2`` does, without asking for FakeTensorMode at every tensor."""
    untyped, dtype = storage
    tensor = torch.empty((0,), dtype=dtype, device=untyped.device).set_(untyped, storage_offset, size, stride)
    tensor.requires_grad = requires_grad
    tensor._backward_hooks = backward_hooks
    return tensor


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, provide: Callable[[StorageReference], torch.UntypedStorage]) -> None:
        super().__init__(io.BytesIO(data))
        self._provide = provide
        self._loaded: dict[str, tuple[torch.UntypedStorage, torch.dtype]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name == _REBUILD_TENSOR:
            return _rebuild_tensor
        if full_name in _STORAGE_NAMES:
            return name
        if full_name not in _PLAIN_CALLABLES:
            raise pickle.UnpicklingError(f"{full_name} is not part of a plain state dict")
        return super().find_class(module, name)

    def persistent_load(self, saved_id: Any) -> tuple[torch.UntypedStorage, torch.dtype]:
        _, type_name, key, location, numel = saved_id
        loaded = self._loaded.get(key)
        if loaded is None:
            dtype = STORAGE_DTYPES[type_name]
            storage = self._provide(StorageReference(key, location, numel * dtype.itemsize, type_name))
            loaded = storage, dtype
            if storage.nbytes():
                self._loaded[key] = loaded
        return loaded


def rebuild_plain(data: bytes, provide: Callable[[StorageReference], torch.UntypedStorage]) -> Any:
    """Unpickle a pickle whose index says that it is plain, over storages that are already full.

    Raises
    ------
    Exception
        Of any kind, if it is not plain after all.
    """
    return _PlainUnpickler(data, provide).load()
