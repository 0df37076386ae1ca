"""Scanning ``data.pkl`` without running anything of it: which storages it refers to, in which order.

The scan is an ordinary unpickling in which every global resolves to an inert stub, so a pickle can build containers
and numbers but can neither import nor call anything. The object of a plain pickle is made from what the scan found.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import io
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
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
    """What one scan saw: whether a stub was used as no plain state dict uses it."""

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


# Not frozen, here and in its like: with 100,000 storages the assignments of a frozen one take a tenth of the index.
@dataclass(slots=True, eq=False)
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
        Whether it imports nothing but what containers, numbers, strings, tensors and parameters need, so that
        `rebuild_plain` makes of it exactly what PyTorch's unpicklers make, or refuses it.
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


def _check_opcodes(data: bytes) -> bool:
    """Refuse a pickle that would take memory out of all proportion to its length.

    Returns whether it holds byte strings of Python 2, whose text depends on the unpickler.

    Raises
    ------
    UnsupportedPickleError
        With the place.
    """
    at, end = 0, len(data)
    python2 = False
    harmless = _harmless(min(end >> 16, 0xFFFE))
    while True:
        found = harmless.match(data, at)
        at = found.end() if found else at
        if at >= end:
            raise UnsupportedPickleError(f"no end within {end} bytes")
        opcode = data[at]
        if opcode == 0x2E:  # STOP
            return python2
        python2 = python2 or opcode in b"STU"
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
    python2 = _check_opcodes(data)
    unpickler = _IndexUnpickler(data)
    try:
        root = unpickler.load()
    except UnsupportedPickleError:
        raise
    except Exception as exc:  # a hostile pickle can fail in any way; PyTorch's loader gives the verdict
        raise UnsupportedPickleError(f"{type(exc).__name__}: {exc}") from exc
    names = tuple(f"{module}.{name}" for module, name in unpickler.classes)
    # Protocol 2 is torch.save's default, and the newest whose every opcode the weights-only unpickler knows.
    plain = data[:2] == b"\x80\x02" and not python2 and not unpickler.record.unusual and _PLAIN_NAMES.issuperset(names)
    return PickleIndex(tuple(unpickler.references), root, names, plain)


# A state dict holds little but tensors, and PyTorch's weights-only unpickler, written in Python, takes most of the
# time that 20,000 of them need. Where the pickle imports nothing but the following, the same object is made from what
# the scan found, without unpickling it again; and it can as little be misused: nothing is called but these.

_REBUILD_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
_REBUILD_PARAMETER = ("torch._utils", "_rebuild_parameter")
_ORDERED_DICT = ("collections", "OrderedDict")
_PLAIN_NAMES = {".".join(name) for name in (_REBUILD_TENSOR, _REBUILD_PARAMETER, _ORDERED_DICT)}
_PLAIN_NAMES |= {f"torch.{name}" for name in STORAGE_DTYPES}

_ATOMS = frozenset({str, int, float, bool, type(None)})


class _Rebuilder:
    """Makes the object of a plain pickle from its index; what is one object there is one object here."""

    def __init__(self, provide: Callable[[StorageReference], torch.UntypedStorage]) -> None:
        self._provide = provide
        self._made: dict[int, Any] = {}  # by the id of what stands for it in the index, which keeps that alive
        self._storages: dict[str, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self._prototypes: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def make(self, found: Any) -> Any:
        """Return what a value of the index stands for."""
        kind = type(found)
        if kind in _ATOMS:
            return found
        made = self._made.get(id(found))
        if made is not None:
            return made
        if kind is dict:
            made = self._made[id(found)] = {}
            for key, value in found.items():
                made[self.make(key)] = self.make(value)
        elif kind is list:
            made = self._made[id(found)] = []
            made.extend(map(self.make, found))
        elif kind is tuple:
            made = self._made[id(found)] = tuple(map(self.make, found))
        elif isinstance(found, Inert):
            made = self._make_stub(found, (found.module, found.qualname))
        else:
            raise UnsupportedPickleError(f"a {kind.__name__} is not part of a plain state dict")
        return made

    def _make_stub(self, stub: Inert, name: tuple[str, str]) -> Any:
        if name == _ORDERED_DICT:
            made = self._made[id(stub)] = collections.OrderedDict()
            if stub.args or not (stub.state is None or type(stub.state) is dict):
                raise UnsupportedPickleError("an OrderedDict with arguments, or with a state of its own kind")
            for key, value in stub.items:
                made[self.make(key)] = self.make(value)
            if stub.state:  # a module's state_dict() carries its _metadata as an attribute of the dictionary
                made.__dict__.update(self.make(stub.state))
            return made
        if stub.items or stub.state is not None:
            raise UnsupportedPickleError("a tensor with items or state")
        if name == _REBUILD_TENSOR:
            rebuilt = self._make_tensor(*stub.args)
        elif name == _REBUILD_PARAMETER:
            rebuilt = self._make_parameter(*stub.args)
        else:
            raise UnsupportedPickleError(f"{'.'.join(name)} is not part of a plain state dict")
        self._made[id(stub)] = rebuilt
        return rebuilt

    def _make_tensor(
        self,
        reference: Any,
        storage_offset: Any,
        size: Any,
        stride: Any,
        requires_grad: Any,
        hooks: Any,
    ) -> torch.Tensor:
        """Do what ``torch._utils._rebuild_tensor_v2`` does, without asking for FakeTensorMode at every tensor.

        PyTorch itself checks that offset, size and stride are numbers and stay within the storage.
        """
        if type(reference) is not StorageReference or type(requires_grad) is not bool or not _are_no_hooks(hooks):
            raise UnsupportedPickleError("a tensor with arguments of other types than torch.save writes")
        loaded = self._storages.get(reference.key)
        if loaded is None:
            loaded = self._load(reference)
        storage, prototype = loaded
        tensor = prototype.new_empty(0).set_(storage, storage_offset, size, stride)
        if requires_grad:
            tensor.requires_grad = True
        tensor._backward_hooks = collections.OrderedDict()
        return tensor

    def _make_parameter(self, data: Any, requires_grad: Any, hooks: Any) -> torch.Tensor:
        is_tensor = isinstance(data, Inert) and (data.module, data.qualname) == _REBUILD_TENSOR
        if not is_tensor or type(requires_grad) is not bool or not _are_no_hooks(hooks):
            raise UnsupportedPickleError("a parameter with arguments of other types than torch.save writes")
        made: torch.Tensor = torch._utils._rebuild_parameter(  # type: ignore[no-untyped-call]
            self.make(data), requires_grad, collections.OrderedDict()
        )
        return made

    def _load(self, reference: StorageReference) -> tuple[torch.UntypedStorage, torch.Tensor]:
        """Return the storage, and an empty tensor of its dtype on its device: those are made fastest from another."""
        storage = self._provide(reference)
        of = STORAGE_DTYPES[reference.type_name], storage.device
        prototype = self._prototypes.get(of)
        if prototype is None:
            prototype = self._prototypes[of] = torch.empty(0, dtype=of[0], device=of[1])
        if reference.nbytes:
            self._storages[reference.key] = storage, prototype
        return storage, prototype


def _are_no_hooks(value: Any) -> bool:
    """Whether a value of the index is an empty ordered dictionary, as plain tensors carry it."""
    return (
        isinstance(value, Inert)
        and value.qualname == "OrderedDict"
        and value.module == "collections"
        and not (value.args or value.items or value.state)
    )


def rebuild_plain(index: PickleIndex, provide: Callable[[StorageReference], torch.UntypedStorage]) -> Any:
    """Make the object of a pickle whose index says that it is plain, over storages that are already full.

    Raises
    ------
    Exception
        Of any kind, if it is not plain after all.
    """
    return _Rebuilder(provide).make(index.root)
