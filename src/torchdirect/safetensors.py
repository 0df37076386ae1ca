"""The functions of ``safetensors.torch``, over the shortest path between storage and GPU memory.

Files are those of the ``safetensors`` library, byte for byte; it also judges every header that is read.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from torchdirect import defaults, memory, road
from torchdirect import digests as digests_module
from torchdirect.defaults import Settings
from torchdirect.formats import safetensors as format_module
from torchdirect.formats.layout import FileLayout
from torchdirect.lazy import CheckpointHandle, Device, open_checkpoint
from torchdirect.tensor_file import TensorFile

__all__ = ["load_file", "load_model", "safe_open", "save_file", "save_model"]


def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    align: bool = False,
    digest: bool = False,
    **settings: Any,
) -> None:
    """Save tensors to a safetensors file, as ``safetensors.torch.save_file`` does; published like every save.

    Parameters
    ----------
    tensors
        Contiguous, dense, and none sharing memory with another.
    filename, metadata
        As there.
    align
        Whether the data begins on a multiple of 4096 bytes, which direct paths like. The library's own files do not.
    digest
        Whether the metadata gets the CRC-32 of each tensor, for `verify` and ``load(..., verify=True)``. The format
        itself has no checksums.
    settings
        ``transfer_type``, ``durable``, … as for `save`.

    Raises
    ------
    ValueError
        If there is something else than dense, contiguous tensors; names the key.
    RuntimeError
        If tensors share memory; names the keys.
    SaveError
        If the file cannot be written; an old file of that name is untouched.
    """
    start = time.perf_counter()
    chosen = defaults.current(**settings)
    check_tensors(tensors)
    if metadata is not None and not all(isinstance(t, str) for pair in metadata.items() for t in pair):
        raise TypeError("safetensors metadata maps text to text; convert other values with str() or json.dumps()")
    layout, data = plan(tensors, metadata, align=align, digest=digest)
    road.write_file(os.fspath(filename), layout, data, False, chosen, start)


def check_tensors(tensors: object) -> None:
    """Refuse what the format cannot hold, as the library does."""
    if not isinstance(tensors, dict):
        raise ValueError(
            f"a safetensors file holds a flat dict of names and tensors, not a {type(tensors).__name__}; "
            "save other objects under another suffix, such as .pt"
        )
    storages: dict[tuple[torch.device, int], list[str]] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            kinds = f"{type(name).__name__} and {type(tensor).__name__}"
            raise ValueError(f"a safetensors file holds names and tensors; {name!r} is a pair of {kinds}")
        if name == "__metadata__":
            raise ValueError("the name '__metadata__' is the format's own; rename that tensor")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise ValueError(
                f"tensor {name!r} is not dense ({tensor.layout}, {tensor.dtype}, {tensor.device}); make it so first "
                "(.to_dense(), .dequantize()), or save it with td.save"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"tensor {name!r} is not contiguous: it may be a view of another. Save the whole one, or its "
                ".contiguous() copy"
            )
        if tensor.numel():
            storages.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(name)
    shared = [names for names in storages.values() if len(names) > 1 and not _disjoint([tensors[n] for n in names])]
    if shared:
        raise RuntimeError(
            f"these tensors share memory, which the format cannot express: {shared}. Save one of each group, clone "
            "them, or use save_model, which leaves duplicates out"
        )


def _disjoint(tensors: list[torch.Tensor]) -> bool:
    """Whether tensors of one storage lie side by side without overlap, which the library accepts."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    return all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def plan(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None, *, align: bool, digest: bool = False
) -> tuple[FileLayout, list[torch.Tensor]]:
    """Lay out checked tensors; return the layout, and their bytes in its order."""
    plain = {name: _movable(tensor.detach()) for name, tensor in tensors.items()}
    if digest:
        values = digests_module.checksums_of([memory.bytes_of(tensor) for tensor in plain.values()])
        digests = {name: f"{value:08x}" for name, value in zip(plain, values, strict=True)}
        metadata = {**(metadata or {}), digests_module.DIGEST_KEY: json.dumps(digests)}
    layout, order = format_module.layout_file(plain, metadata, align=align)
    return layout, [memory.bytes_of(plain[name]) for name in order]


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its real bits, on a device that engines know."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.device.type in ("cpu", "cuda") else tensor.cpu()


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """Load every tensor of a safetensors file, as ``safetensors.torch.load_file`` does.

    Parameters
    ----------
    filename, device
        As there.
    backend
        Taken for the library's sake; the transfer type decides how bytes are read.
    settings
        ``transfer_type``, ``num_threads``, … as for `load`.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    CorruptCheckpointError
        If the library refuses its header.
    LoadError
        If reading fails.
    """
    elsewhere = not isinstance(device, int) and torch.device(device).type not in ("cpu", "cuda")
    with open_checkpoint(filename, device="cpu" if elsewhere else device, **settings) as file:
        _require_safetensors(file)
        tensors = file.load()
    return {name: tensor.to(device) for name, tensor in tensors.items()} if elsewhere else tensors


def _require_safetensors(file: CheckpointHandle) -> None:
    if file.format != "safetensors":
        raise ValueError(f"{file.path} is a {file.format} file and no safetensors file; load it with td.load")


def safe_open(
    filename: str | os.PathLike[str], framework: str = "pt", device: Device = "cpu", **settings: Any
) -> CheckpointHandle:
    """Open a safetensors file lazily, as ``safetensors.safe_open`` does: ``keys``, ``get_tensor``, ``get_slice``."""
    if framework not in ("pt", "torch", "pytorch"):
        raise ValueError(f"framework={framework!r}: torchdirect opens files for PyTorch ('pt') only")
    file = open_checkpoint(filename, device=device, **settings)
    try:
        _require_safetensors(file)
    except BaseException:
        file.close()
        raise
    return file


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    **settings: Any,
) -> None:
    """Save a module's state dict as ``safetensors.torch.save_model`` does: of tied tensors one is kept.

    Parameters
    ----------
    model, filename, metadata, force_contiguous
        As there. Which names were left out is noted in the metadata.
    settings
        As for `save_file`.
    """
    from safetensors import torch as theirs

    state = model.state_dict()
    noted = dict(metadata or {})
    for kept, left_out in theirs._remove_duplicate_names(state).items():
        for name in left_out:
            noted.setdefault(name, kept)
            del state[name]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        save_file(dict(state), filename, noted or None, **settings)
    except ValueError as exc:
        raise ValueError(f"{exc} Or use save_model(..., force_contiguous=True)") from exc


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int | torch.device = "cpu",
    *,
    backend: str = "mmap",
    **settings: Any,
) -> tuple[list[str], list[str]]:
    """Load a file into a module as ``safetensors.torch.load_model`` does; return missing and unexpected names.

    Parameters and errors as there and as for `load_file`. `load_into` does the same without a second copy.
    """
    from safetensors import torch as theirs

    state = load_file(filename, device=device, **settings)
    own = model.state_dict()
    left_out = theirs._remove_duplicate_names(own, preferred_names=list(state))
    tied = {name for group in left_out.values() for name in group}
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = sorted(set(missing) - tied)
    if strict and (missing or unexpected):
        groups = (("Missing", missing), ("Unexpected", sorted(unexpected)))
        lines = [f"    {kind} key(s) in state_dict: {', '.join(map(repr, names))}" for kind, names in groups if names]
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n" + "\n".join(lines))
    return missing, list(unexpected)


def load_mapped(path: str, map_location: Any, settings: Settings) -> dict[str, torch.Tensor]:
    """Load a file as `torchdirect.load` does, with a ``map_location`` of any kind."""
    place: Any = map_location.get("cpu", "cpu") if isinstance(map_location, dict) else map_location
    file = TensorFile(path)
    handle = CheckpointHandle(file, torch.device("cpu" if place is None or callable(place) else place), settings)
    with handle:
        tensors = handle.load()
    if callable(map_location):
        for name, tensor in tensors.items():
            placed = map_location(tensor.untyped_storage(), "cpu")
            if placed is not None:
                typed = torch.empty(0, dtype=tensor.dtype, device=placed.device)
                tensors[name] = typed.set_(placed, 0, tensor.shape, tensor.stride())
    return tensors
