"""States that the tests of distributed checkpoints save, and comparisons of what comes back."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint

from checkpoints import bits

stock: Any = torch.distributed.checkpoint
"""PyTorch's own functions; its types do not export them."""

# What PyTorch says at every call without a process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def small(value: float) -> dict[str, Any]:
    """Return a state whose every tensor is filled with one value: a mixture of two saves shows."""
    value = float(value)
    return {"a": torch.full((70_000,), value), "b": torch.full((5,), value), "n": {"c": torch.full((300, 1000), value)}}


def varied(seed: int) -> dict[str, Any]:
    """Return a state with every kind of entry that PyTorch's own writer and reader carry."""
    made = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=made, dtype=dtype)

    base = random(100_000)
    state = {
        "large": random(1500, 700),
        "small": random(10),
        "scalar": random(),
        "empty": torch.zeros(3, 0),
        "nested": {"list": [random(4), {"deep": random(2, 3)}], "number": seed, "none": None},
        "text": f"seed {seed}",
        "tuple": (1, "two"),
        "io": io.BytesIO(f"bytes of {seed}".encode()),
        "view": base[100:5000],
        "overlapping view": base[200:6000],
        "transposed": random(30, 40).t(),
        "strided": base[::7],
        "expanded": random(1, 5).expand(4, 5),
        "parameter": torch.nn.Parameter(random(6, 6)),
        "half": random(33).half(),
        "bfloat16": random(33).bfloat16(),
        "bool": random(9) > 0,
        "integers": torch.arange(seed, seed + 9),
        "complex": random(3, dtype=torch.complex64),
        "conjugate": random(3, dtype=torch.complex64).conj(),
        "channels last": random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "fp8": random(50).to(torch.float8_e4m3fn),
        "scales": torch.tensor([0.5, 1, 2]).to(torch.float8_e8m0fnu) if hasattr(torch, "float8_e8m0fnu") else None,
    }
    if hasattr(torch, "float4_e2m1fn_x2"):
        state["fp4"] = torch.arange(seed, seed + 8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
        state["empty fp4"] = torch.zeros(0, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    return state


def blank(value: Any) -> Any:
    """Return a state of the same structure with other values."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    if isinstance(value, torch.Tensor):
        made = torch.empty_like(value.detach())
        made.untyped_storage().fill_(1)  # type: ignore[attr-defined]
        return made
    return None


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal, tensors to the bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
    if isinstance(a, io.BytesIO):
        return bool(a.getvalue() == b.getvalue())
    return bool(a == b)
