"""Objects and comparisons that the checkpoint tests share."""

from __future__ import annotations

import collections
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Point:
    """Pickled by its own `__reduce__`."""

    def __init__(self, x: int, tensor: torch.Tensor) -> None:
        self.x = x
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return Point, (self.x, self.tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x and torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]


class ReadsValues:
    """Its `__setstate__` reads tensor values, so storages must be full by then."""

    def __init__(self) -> None:
        self.tensor = torch.arange(5000.0)
        self.total = float(self.tensor.sum())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        assert float(self.tensor.sum()) == self.total


class TorchFunctionTensor(torch.Tensor):
    """A tensor subclass with Python state."""


def subclassed() -> torch.Tensor:
    tensor = torch.arange(6.0).as_subclass(TorchFunctionTensor)
    tensor.note = "kept"  # type: ignore[attr-defined]
    return tensor


def tagged() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.tag = 5  # type: ignore[attr-defined]
    return tensor


def shared() -> list[torch.Tensor]:
    base = torch.arange(100_000.0)
    return [base[:10], base[2:4]]


def tied() -> dict[str, torch.Tensor]:
    weight = torch.randn(30, 40)
    return {"embed.weight": weight, "head.weight": weight}


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(17, 33), torch.nn.BatchNorm1d(33))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 17)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "lr": 1e-3, "name": "x"}


def nested_lists() -> Any:
    return [{"a": (torch.ones(3), None, True, 2**70, 1.5)}, collections.OrderedDict(b=torch.zeros(2, 0))]


FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]

PLAIN: dict[str, Callable[[], Any]] = {
    "empty dict": dict,
    "one tensor": lambda: torch.randn(7, 3),
    "large and small": lambda: {f"t{n}": torch.randn(n) for n in (1, 0, 300_000, 5, 70_001, 1023)},
    "linear": lambda: torch.nn.Linear(5, 3).state_dict(),
    "trained": trained,
    "views": shared,
    "tied": tied,
    "nested": nested_lists,
    "integers": lambda: [torch.arange(9, dtype=d) for d in (torch.int8, torch.uint8, torch.int16, torch.int64)],
    "bool, half, complex": lambda: [
        torch.tensor([True, False]),
        torch.randn(3).half(),
        torch.randn(3).bfloat16(),
        torch.randn(3, dtype=torch.complex64),
    ],
    "not contiguous": lambda: torch.randn(20, 30).t()[3:9, ::2],
    "zero size": lambda: [torch.zeros(0), torch.zeros(3, 0), torch.zeros(0)],
    "parameter": lambda: {"p": torch.nn.Parameter(torch.randn(5)), "f": torch.nn.Parameter(torch.ones(2), False)},
    "requires grad": lambda: torch.randn(4, requires_grad=True),
    "integers as keys": lambda: {0: torch.ones(1), -1: {2: torch.zeros(2)}},
}

OTHER: dict[str, Callable[[], Any]] = {
    "float8": lambda: [torch.randn(11).to(d) if "e8m0" not in str(d) else torch.ones(11).to(d) for d in FLOAT8],
    "uint16": lambda: torch.arange(9).to(torch.uint16),
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(9), 0.1, 3, torch.qint8),
    "sparse coo": lambda: torch.eye(5).to_sparse(),
    "sparse csr": lambda: torch.eye(5).to_sparse_csr(),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "subclass": subclassed,
    "storage": lambda: torch.arange(5.0).untyped_storage(),
    "own reduce": lambda: Point(3, torch.arange(4.0)),
    "reads values": ReadsValues,
    "module": lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()),
    "size and dtype": lambda: [torch.Size([1, 2]), torch.float16, torch.device("cpu"), torch.strided],
    "attribute on a tensor": tagged,
}

if hasattr(torch, "float4_e2m1fn_x2"):
    OTHER["float4"] = lambda: torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)


def same(a: Any, b: Any) -> bool:
    """Whether two objects are equal, tensors to the bit with dtype, shape, stride, device and class."""
    if isinstance(a, torch.Tensor):
        if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
            return False
        if a.requires_grad != b.requires_grad or a.device != b.device:
            return False
        if a.device.type == "meta":
            return True
        if a.layout is not torch.strided or a.is_quantized:
            return torch.equal(a.to_dense() if not a.is_quantized else a.int_repr(),
                               b.to_dense() if not b.is_quantized else b.int_repr())  # fmt: skip
        if a.stride() != b.stride() or a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():
            return False
        if getattr(a, "__dict__", None) != getattr(b, "__dict__", None):
            return False
        return torch.equal(bits(a), bits(b))
    if isinstance(a, (torch.UntypedStorage, torch.TypedStorage)):  # torch.load gives a typed one back
        return storage_bytes(a) == storage_bytes(b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.nn.Module):
        return type(a) is type(b) and same(a.state_dict(), b.state_dict())
    if isinstance(a, ReadsValues):
        return isinstance(b, ReadsValues) and same(a.tensor, b.tensor)
    return bool(a == b)


def storage_bytes(storage: torch.UntypedStorage | torch.TypedStorage) -> bytes:
    return bytes(storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8) if plain.numel() else plain.new_empty(0, dtype=torch.uint8)


def record(path: Path, name: str) -> bytes:
    """Return a record of a checkpoint file by its name inside the archive."""
    with zipfile.ZipFile(path) as archive:
        (full,) = [n for n in archive.namelist() if n.split("/", 1)[1] == name]
        return archive.read(full)
