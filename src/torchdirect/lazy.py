"""`open`: the tensors of a file by name, read when they are asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from torchdirect import defaults
from torchdirect.defaults import Settings
from torchdirect.plan import Extent
from torchdirect.tensor_file import TensorFile, TensorInfo, contiguous_stride, matching, shaped

Device = str | int | torch.device | None

_PLAIN = torch.contiguous_format
_RUN_BYTES = 64 << 10
"""Bytes of a row's part from which the parts are read one by one; below, whole rows are."""


def open_checkpoint(path: str | os.PathLike[str], *, device: Device = None, **settings: Any) -> CheckpointHandle:
    """Open a checkpoint file to look at it and to read some of its tensors.

    Nothing of a torch file is executed: the names come from its inert index, nested containers as dotted paths.

    Parameters
    ----------
    path
        A file that ``torch.save``, `save` or safetensors wrote.
    device
        Where tensors go by default; the CPU if not given.
    settings
        ``transfer_type``, ``num_threads``, … as for `load`.

    Raises
    ------
    FileNotFoundError, IsADirectoryError, PermissionError
        As ``open`` would.
    CorruptCheckpointError
        If the file is damaged, or of another kind.

    Examples
    --------
    >>> with torchdirect.open("ckpt.pt", device="cuda") as file:
    ...     weight = file["model.layers.0.weight"]
    ...     norms = file.load(prefix="model.norm")
    """
    return CheckpointHandle(TensorFile(path), as_device(device), defaults.current(**settings))


def as_device(device: Device) -> torch.device:
    """Return the device that a caller named; raises for one that nothing can be read to."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    found = torch.device("cpu" if device is None else device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device {device!r} was asked for, and torch.cuda.is_available() is False; use 'cpu'")
    if found.type not in ("cpu", "cuda"):
        raise ValueError(
            f"tensors can be read to the CPU or a CUDA device, not to {device!r}; read them to the CPU first"
        )
    return found


class CheckpointHandle:
    """The tensors of an open file. Safe to use from several threads."""

    def __init__(self, file: TensorFile, device: torch.device, settings: Settings) -> None:
        self._file = file
        self._device = device
        self._settings = settings

    # ---------------------------------------------------------------------------------------- looking

    @property
    def path(self) -> str:
        """The file."""
        return self._file.path

    @property
    def format(self) -> str:
        """``"torch"`` or ``"safetensors"``."""
        return self._file.format

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._file.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._file.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._file.tensors

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape, bytes and place of a tensor.

        Raises
        ------
        KeyError
            If there is none of that name, or only unpickling can rebuild it.
        """
        if name in self._file.opaque:
            raise KeyError(f"{self.path}: {name!r} is quantized, sparse or a subclass, which only td.load can rebuild")
        return next(matching(self._file.tensors, [name], "", self.path))

    def metadata(self) -> dict[str, str]:
        """Return the free text that a safetensors file carries."""
        return dict(self._file.metadata)

    # ---------------------------------------------------------------------------------------- reading

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.get_tensor(name)

    def get_tensor(self, name: str, device: Device = None) -> torch.Tensor:
        """Read one tensor."""
        self.info(name)
        return self.load([name], device=device)[name]

    def load(
        self, keys: Sequence[str] | None = None, *, prefix: str = "", device: Device = None
    ) -> dict[str, torch.Tensor]:
        """Read tensors, neighbours together; no bytes of others but small gaps between them.

        Parameters
        ----------
        keys
            Their names; all if not given.
        prefix
            Only those whose name begins so.
        device
            Where they go; the handle's own device if not given.

        Raises
        ------
        KeyError
            If a name is not in the file.
        LoadError, CorruptCheckpointError
            If reading fails.
        """
        start = time.perf_counter()
        infos = list(matching(self._file.tensors, keys, prefix, self.path))
        where = self._device if device is None else as_device(device)
        tensors, reading = self._file.load(infos, where, self._settings)
        nbytes = sum(info.nbytes for info in infos)
        reading.report(nbytes, nbytes, start)
        return tensors

    def get_slice(self, name: str) -> TensorSlice:
        """Return a tensor of which parts can be read by indexing, as ``safe_open(...).get_slice`` does."""
        return TensorSlice(self, self.info(name))

    def _read_part(self, info: TensorInfo, extents: list[Extent], nbytes: int) -> torch.Tensor:
        start = time.perf_counter()
        data = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if nbytes:
            reading = self._file.read(extents, [data], [info.name], self._settings)
            reading.report(nbytes, nbytes, start)
        return data

    # ---------------------------------------------------------------------------------------- life

    def close(self) -> None:
        """Close the file; tensors that were read stay."""
        self._file.close()

    def __enter__(self) -> CheckpointHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()

    def __repr__(self) -> str:
        return f"<CheckpointHandle {self.path!r} {self.format}, {len(self)} tensors>"


class TensorSlice:
    """A tensor in a file; indexing it with integers, slices and ``...`` reads what the index selects."""

    def __init__(self, handle: CheckpointHandle, info: TensorInfo) -> None:
        self._handle = handle
        self._info = info

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._info.shape)

    def get_dtype(self) -> torch.dtype:
        """Return the dtype."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        info = self._info
        where = index if isinstance(index, tuple) else (index,)
        if not info.is_contiguous or not info.shape:
            return self._handle[info.name][where].clone(memory_format=_PLAIN)
        # An index of a tensor without memory tells errors and the resulting shape as PyTorch does.
        expected = torch.empty(info.shape, dtype=info.dtype, device="meta")[where]
        bounds = _leading(where, info.shape)
        row = contiguous_stride(info.shape)[0] * info.dtype.itemsize
        rows = bounds[0][1] - bounds[0][0]
        whole = (rows, *info.shape[1:])
        first = info.file_offset + bounds[0][0] * row
        if len(bounds) > 1 and expected.numel():
            columns = bounds[1][1] - bounds[1][0]
            cell = contiguous_stride(info.shape)[1] * info.dtype.itemsize
            if columns < info.shape[1] and columns * cell >= _RUN_BYTES:
                run = columns * cell
                at = first + bounds[1][0] * cell
                extents = [Extent(at + i * row, run, 0, i * run) for i in range(rows)]
                part = self._handle._read_part(info, extents, rows * run)
                shape = (rows, columns, *info.shape[2:])
                return _shape_as(part, info, shape)[_rebased(where, bounds, info.shape)].clone(memory_format=_PLAIN)
        part = self._handle._read_part(info, [Extent(first, rows * row, 0)], rows * row)
        return _shape_as(part, info, whole)[_rebased(where, bounds[:1], info.shape)].clone(memory_format=_PLAIN)


def _shape_as(part: torch.Tensor, info: TensorInfo, shape: tuple[int, ...]) -> torch.Tensor:
    info = TensorInfo(info.name, info.dtype, shape, contiguous_stride(shape), 0, part.numel())
    return shaped(part, info)


def _leading(where: tuple[Any, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the range that an index needs of the first and, where it is plain there, the second dimension."""
    bounds: list[tuple[int, int]] = []
    for item, size in zip(where[:2], shape[:2], strict=False):
        if isinstance(item, int) and not isinstance(item, bool):
            at = item + size if item < 0 else item
            bounds.append((at, at + 1))
        elif isinstance(item, slice) and item.step in (None, 1):
            start, stop, _ = item.indices(size)
            bounds.append((start, max(start, stop)))
        else:
            break
    return bounds or [(0, shape[0])]


def _rebased(where: tuple[Any, ...], bounds: list[tuple[int, int]], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the index for the part that was read."""
    rebased: list[Any] = []
    for i, item in enumerate(where):
        plain = isinstance(item, int) and not isinstance(item, bool)
        if i < len(bounds) and (plain or isinstance(item, slice)) and bounds[i] != (0, shape[i]):
            rebased.append(0 if plain else slice(None))
        else:
            rebased.append(item)
    return tuple(rebased)


__all__ = ["CheckpointHandle", "TensorSlice", "open_checkpoint"]
