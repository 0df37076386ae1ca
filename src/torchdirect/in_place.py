"""`load_into`: bytes of a file straight into tensors that exist already, without a second copy of the model."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys

from torchdirect import defaults, memory, originals, road
from torchdirect.defaults import Settings
from torchdirect.engines.base import TransferState
from torchdirect.lazy import Device, as_device
from torchdirect.plan import Extent
from torchdirect.tensor_file import TensorFile, TensorInfo, span
from torchdirect.units import MIB

_CONVERSION_BYTES = 16 * MIB
"""Bound of a buffer through which tensors of another dtype or layout pass."""
_CONVERSIONS_AT_ONCE = 4
"""Buffers that are read together."""
_WITHOUT_COPY = {getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name)}


def load_into(
    target: torch.nn.Module | torch.optim.Optimizer | dict[str, Any],
    path: str | os.PathLike[str],
    strict: bool = True,
    *,
    prefix: str = "",
    device: Device = None,
    **settings: Any,
) -> _IncompatibleKeys:
    """Load a checkpoint into the memory of existing tensors.

    Parameters
    ----------
    target
        A module, an optimizer, or a (nested) state dict. Tensors keep their memory, device and dtype; a dtype or layout
        that differs from the file's is converted through a bounded buffer.
    path
        A torch or safetensors file.
    strict
        Whether missing and unexpected names are an error, as in ``Module.load_state_dict``.
    prefix
        What names begin with in the file, such as ``"model."``.
    device
        Modules with tensors on the meta device: where these are made.
    settings
        ``transfer_type``, ``num_threads``, … as for `load`.

    Returns
    -------
    NamedTuple
        ``missing_keys`` and ``unexpected_keys``.

    Raises
    ------
    RuntimeError
        If names or shapes do not match, as ``load_state_dict`` says it. Nothing has been written then.
    CorruptCheckpointError, LoadError
        If the file is damaged, or reading fails; tensors may have been written in part.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     model = Transformer(config)
    >>> torchdirect.load_into(model, "ckpt.safetensors", device="cuda")
    """
    chosen = defaults.current(**settings)
    file = TensorFile(path)
    try:
        if isinstance(target, torch.optim.Optimizer):
            return _into_optimizer(target, file, prefix, strict, chosen)
        if isinstance(target, torch.nn.Module):
            return _into_module(target, file, prefix, strict, None if device is None else as_device(device), chosen)
        if isinstance(target, dict):
            return _into_dict(target, file, prefix, strict, chosen)
    finally:
        file.close()
    raise TypeError(f"target is a {type(target).__name__}; give a module, an optimizer or a dict of tensors")


# ------------------------------------------------------------------------------------------------------ matching


class _Match:
    """Which tensor of the file goes into which of the target, and what does not fit."""

    def __init__(self, file: TensorFile, prefix: str, what: str) -> None:
        self.file = file
        self.what = what
        self.infos = {name[len(prefix) :]: info for name, info in file.tensors.items() if name.startswith(prefix)}
        self.opaque = {name[len(prefix) :] for name in file.opaque if name.startswith(prefix)}
        self.pairs: list[tuple[TensorInfo, torch.Tensor]] = []
        self.problems: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Pair a tensor of the target with the file's of that name."""
        info = self.infos.get(name)
        if info is None:
            if name in self.opaque:
                self.problems.append(f"{name} is quantized, sparse or a subclass in the file, which needs td.load.")
            else:
                self.missing.append(name)
        elif tuple(tensor.shape) != info.shape:
            self.problems.append(
                f"size mismatch for {name}: copying a param with shape {torch.Size(info.shape)} from checkpoint, the "
                f"shape in current model is {tensor.shape}."
            )
        elif tensor.layout is not torch.strided or tensor.is_quantized:
            self.problems.append(f"{name} is not a dense tensor in the target ({tensor.layout}, {tensor.dtype}).")
        elif tensor.device.type not in ("cpu", "cuda"):
            hint = " give device=" if tensor.is_meta else ""
            self.problems.append(f"{name} is on {tensor.device}, which has no memory to load into.{hint}")
        else:
            self.pairs.append((info, tensor))

    def finish(self, taken: Iterator[str], strict: bool) -> _IncompatibleKeys:
        """Raise what does not fit; nothing has been written yet."""
        names = set(taken)
        self.unexpected = [name for name in self.infos if name not in names]
        problems = list(self.problems)
        if strict and self.unexpected:
            listed = ", ".join(f'"{k}"' for k in self.unexpected)
            problems.insert(0, f"Unexpected key(s) in state_dict: {listed}. ")
        if strict and self.missing:
            listed = ", ".join(f'"{k}"' for k in self.missing)
            problems.insert(0, f"Missing key(s) in state_dict: {listed}. ")
        if problems:
            lines = "\n\t".join(problems)
            raise RuntimeError(f"Error(s) in loading state_dict for {self.what} from {self.file.path}:\n\t{lines}")
        return _IncompatibleKeys(self.missing, self.unexpected)


def _into_dict(
    target: dict[str, Any], file: TensorFile, prefix: str, strict: bool, settings: Settings
) -> _IncompatibleKeys:
    match = _Match(file, prefix, "a dict")
    tensors = dict(_tensors_in(target, ""))
    for name, tensor in tensors.items():
        match.add(name, tensor)
    result = match.finish(iter(tensors), strict)
    _fill(file, match.pairs, settings)
    return result


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _tensors_in(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for i, child in enumerate(value):
            yield from _tensors_in(child, f"{path}.{i}" if path else str(i))


def _into_module(
    module: torch.nn.Module,
    file: TensorFile,
    prefix: str,
    strict: bool,
    device: torch.device | None,
    settings: Settings,
) -> _IncompatibleKeys:
    own = _own_tensors(module)
    if device is not None:
        # Names and shapes are checked against the meta tensors, so that a mismatch leaves them as they are.
        trial = _Match(file, prefix, type(module).__name__)
        _match_module(trial, {n: _without_memory(t) if t.is_meta else t for n, t in own.items()}, own, strict)
        _materialise(module, device)
        own = _own_tensors(module)
    match = _Match(file, prefix, type(module).__name__)
    result = _match_module(match, own, own, strict)
    _fill(file, match.pairs, settings)
    return result


def _own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: value for n, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a stand-in of the same shape that has one element."""
    return torch.empty((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)


def _match_module(
    match: _Match, tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], strict: bool
) -> _IncompatibleKeys:
    for name, tensor in tensors.items():
        match.add(name, tensor)
    tied = _tied_names(own)
    match.missing = [name for name in match.missing if not tied[name] & match.infos.keys()]
    return match.finish(iter(own), strict)


def _tied_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, set[str]]:
    """Return for each name the other names of the same tensor."""
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), set()).add(name)
    return {name: groups[id(tensor)] - {name} for name, tensor in tensors.items()}


def _materialise(module: torch.nn.Module, device: torch.device) -> None:
    """Give every meta tensor of a module memory on `device`, keeping ties; its content is not initialised."""
    made: dict[int, torch.Tensor] = {}
    unfilled: list[str] = []
    for path, child in module.named_modules():
        for kind in (child._parameters, child._buffers):
            for name, tensor in kind.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    real = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, torch.nn.Parameter):
                        real = torch.nn.Parameter(real, tensor.requires_grad)
                    made[id(tensor)] = real
                kind[name] = made[id(tensor)]
                if kind is child._buffers and name in child._non_persistent_buffers_set:
                    unfilled.append(f"{path}.{name}" if path else name)
    if unfilled:
        warnings.warn(
            f"these buffers were on the meta device and are in no checkpoint (persistent=False), so their content is "
            f"not initialised; compute them again: {', '.join(unfilled)}",
            stacklevel=4,
        )


# ------------------------------------------------------------------------------------------------------ optimizers


def _into_optimizer(
    optimizer: torch.optim.Optimizer, file: TensorFile, prefix: str, strict: bool, settings: Settings
) -> _IncompatibleKeys:
    """Fill an optimizer's state from a file that holds ``optimizer.state_dict()`` (under `prefix`)."""
    if file.format != "torch":
        raise RuntimeError(f"{file.path}: an optimizer's state holds more than tensors; save it as a torch file")
    saved: Any = originals.load(file.path, map_location="meta", weights_only=True)  # names and numbers; no payload
    for key in filter(None, prefix.split(".")):
        saved = saved[key]
    groups = saved["param_groups"]
    own = optimizer.param_groups
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in own]:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(optimizer).__name__} from {file.path}:\n\tthe param_groups have "
            f"{[len(g['params']) for g in groups]} parameters in the file and {[len(g['params']) for g in own]} here."
        )
    ids = [i for group in groups for i in group["params"]]
    parameters = [p for group in own for p in group["params"]]
    match = _Match(file, prefix, type(optimizer).__name__)
    fresh: list[tuple[torch.Tensor, str, Any]] = []
    names: list[str] = []
    for i, parameter in zip(ids, parameters, strict=True):
        held = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(i, {}).items():
            if isinstance(value, torch.Tensor):
                name = f"state.{i}.{key}"
                tensor = held.get(key)
                if not isinstance(tensor, torch.Tensor):
                    # A scalar step stays on the host, as PyTorch's optimizers keep it unless they run in CUDA graphs.
                    place = parameter.device if value.dim() else torch.device("cpu")
                    tensor = torch.empty(value.shape, dtype=value.dtype, device=place)
                    fresh.append((parameter, key, tensor))
                names.append(name)
                match.add(name, tensor)
            else:
                fresh.append((parameter, key, value))
    result = match.finish(iter(names), strict)
    _fill(file, match.pairs, settings)
    for parameter, key, value in fresh:
        optimizer.state[parameter][key] = value
    for mine, theirs in zip(own, groups, strict=True):
        mine.update({key: value for key, value in theirs.items() if key != "params"})
    return result


# ------------------------------------------------------------------------------------------------------ moving


def _fill(file: TensorFile, pairs: list[tuple[TensorInfo, torch.Tensor]], settings: Settings) -> None:
    """Move the bytes: straight where dtype and layout agree, else through a bounded buffer."""
    start = time.perf_counter()
    pairs = [(info, tensor.detach()) for info, tensor in pairs if info.nbytes]
    if not pairs:
        return
    places = [data.device for _, data in pairs]
    with road.Reading(file.path, file.fd, file.size, places, settings, TransferState()) as reading:
        straight = [(info, data) for info, data in pairs if _is_straight(info, data)]
        extents = [Extent(info.file_offset, info.nbytes, i) for i, (info, _) in enumerate(straight)]
        targets = [memory.bytes_of(data) for _, data in straight]
        reading.fill(extents, targets, lambda i: f"tensor {straight[i][0].name!r}")
        read_converted(reading, [(info, data) for info, data in pairs if not _is_straight(info, data)])
    nbytes = sum(info.nbytes for info, _ in pairs)
    reading.report(nbytes, nbytes, start)


def _is_straight(info: TensorInfo, data: torch.Tensor) -> bool:
    """Whether the bytes of the file are those of the tensor."""
    same = data.dtype == info.dtype and data.is_contiguous() and info.is_contiguous
    return same and not (data.is_conj() or data.is_neg())


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor on its way through a buffer: where it is in the file, how it lies there, and its target."""

    info: TensorInfo
    file_offset: int
    stride: tuple[int, ...]
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        return span(self.target.shape, self.stride) * self.info.dtype.itemsize


def read_converted(reading: road.Reading, pairs: Sequence[tuple[TensorInfo, torch.Tensor]]) -> None:
    """Read tensors into targets of another dtype or layout: through buffers of at most 64 MiB on the targets' devices.

    Parameters
    ----------
    reading
        Of the file.
    pairs
        What to read, and the tensor that it is copied into. Shapes are equal.
    """
    batch: list[_Piece] = []
    held = 0
    for info, target in pairs:
        itemsize = info.dtype.itemsize
        for part, stride, offset in _pieces(target, info.stride, 0, _CONVERSION_BYTES // itemsize):
            piece = _Piece(info, info.file_offset + offset * itemsize, stride, part)
            if batch and held + piece.nbytes > _CONVERSIONS_AT_ONCE * _CONVERSION_BYTES:
                _read_pieces(reading, batch)
                batch, held = [], 0
            batch.append(piece)
            held += piece.nbytes
    if batch:
        _read_pieces(reading, batch)


def _read_pieces(reading: road.Reading, pieces: Sequence[_Piece]) -> None:
    buffers = [torch.empty(p.nbytes, dtype=torch.uint8, device=_buffer_device(p.target)) for p in pieces]
    extents = [Extent(piece.file_offset, piece.nbytes, i) for i, piece in enumerate(pieces)]
    reading.fill(extents, buffers, lambda i: f"tensor {pieces[i].info.name!r}")
    with torch.no_grad():
        for piece, buffer in zip(pieces, buffers, strict=True):
            dtype, target = piece.info.dtype, piece.target
            if target.dtype == dtype and dtype in _WITHOUT_COPY:
                # Their bytes move as integers; PyTorch copies them only where the layout is the same.
                dtype, target = torch.uint8, target.view(torch.uint8)
            target.copy_(buffer.view(dtype).as_strided(target.shape, piece.stride))


def _buffer_device(target: torch.Tensor) -> torch.device:
    """Return where a tensor's bytes can be read to: its own device, or the host for one that no engine knows."""
    return target.device if target.device.type in ("cpu", "cuda") else torch.device("cpu")


def _pieces(
    target: torch.Tensor, stride: tuple[int, ...], offset: int, most: int
) -> Iterator[tuple[torch.Tensor, tuple[int, ...], int]]:
    """Yield parts of a tensor whose elements in the file span at most `most`, with stride and place there."""
    if span(target.shape, stride) <= most or not target.dim():
        yield target, stride, offset
        return
    longest = max(range(target.dim()), key=lambda d: (target.shape[d] - 1) * stride[d])
    step = max(1, most // max(1, stride[longest]))
    if step >= target.shape[longest]:
        step = max(1, target.shape[longest] // 2)
    if target.shape[longest] == 1:
        yield target, stride, offset
        return
    for first in range(0, target.shape[longest], step):
        part = target.narrow(longest, first, min(step, target.shape[longest] - first))
        yield from _pieces(part, stride, offset + first * stride[longest], most)
