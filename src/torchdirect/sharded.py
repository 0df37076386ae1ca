"""Checkpoints in many files with an index, as Hugging Face lays them out."""

from __future__ import annotations

import contextlib
import contextvars
import errno
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from torchdirect import defaults, progress, publish, replicas, road, safetensors
from torchdirect.engines.base import TransferState
from torchdirect.errors import CorruptCheckpointError
from torchdirect.lazy import Device, as_device
from torchdirect.tensor_file import TensorFile
from torchdirect.units import format_bytes

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
_LOOKED_FOR = ("model.safetensors", SAFETENSORS_INDEX, "pytorch_model.bin", TORCH_INDEX)
"""In the order in which Hugging Face's transformers looks."""
_SHARDS_AT_ONCE = 2
"""So that the end of one file and the beginning of the next overlap."""


def find_index(path: str) -> str:
    """Return the index (or the only file) of a directory, or `path` itself.

    Raises
    ------
    FileNotFoundError
        If the directory has neither.
    """
    if not os.path.isdir(path):
        return path
    for name in _LOOKED_FOR:
        if os.path.exists(os.path.join(path, name)):
            return os.path.join(path, name)
    raise FileNotFoundError(errno.ENOENT, f"the directory has none of {', '.join(_LOOKED_FOR)}", path)


def read_shards(index: str) -> dict[str, list[str]]:
    """Return the names of the tensors in each shard, by the shard's path.

    Raises
    ------
    CorruptCheckpointError
        If the index is no index, or names a file outside its directory.
    """
    folder = os.path.dirname(index)
    if not index.endswith(".json"):
        return {index: []}
    try:
        with open(index, encoding="utf-8") as file:
            weights = json.load(file)["weight_map"]
        pairs = [(str(name), str(shard)) for name, shard in weights.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CorruptCheckpointError(f"{index}: not an index with a weight_map ({type(exc).__name__}: {exc})") from exc
    shards: dict[str, list[str]] = {}
    for name, shard in pairs:
        if os.path.isabs(shard) or ".." in shard.split("/"):
            raise CorruptCheckpointError(f"{index}: tensor {name!r} is said to be in {shard!r}, outside the directory")
        shards.setdefault(os.path.join(folder, shard), []).append(name)
    return shards


def load_sharded(path: str | os.PathLike[str], device: Device = None, **settings: Any) -> dict[str, torch.Tensor]:
    """Load a checkpoint of many files as one state dict.

    Parameters
    ----------
    path
        A directory with ``model.safetensors.index.json`` or ``pytorch_model.bin.index.json`` (or a single file of those
        names), or such an index.
    device
        Where the tensors go; the CPU if not given.
    settings
        ``transfer_type``, ``num_threads``, ``progress``, … as for `load`.

    Raises
    ------
    FileNotFoundError
        If the index or a shard is missing; names it.
    CorruptCheckpointError
        If a shard is damaged, or lacks a tensor that the index says it has.
    """
    start = time.perf_counter()
    chosen, where = defaults.current(**settings), as_device(device)
    index = find_index(os.fspath(path))
    shards = read_shards(index)
    for shard in shards:
        if not os.path.exists(shard):
            raise FileNotFoundError(errno.ENOENT, f"{index} names a shard that is missing", shard)
    state = TransferState()
    result: dict[str, torch.Tensor] = {}
    readings: list[road.Reading] = []
    files: list[TensorFile] = []
    try:
        # All of them first, so that a damaged one is found before the first byte is moved.
        for shard, names in shards.items():
            files.append(TensorFile(shard))
            lacking = [name for name in names if name not in files[-1].tensors]
            if lacking:
                raise CorruptCheckpointError(
                    f"{shard}: the index {os.path.basename(index)} says that it holds {lacking[0]!r} "
                    f"({len(lacking)} such), and it does not: it belongs to another checkpoint"
                )

        # Memory belongs to the stream on which it was allocated: that of the caller.
        stream = torch.cuda.current_stream(where) if where.type == "cuda" else None

        def load(file: TensorFile, names: Sequence[str]) -> dict[str, torch.Tensor]:
            infos = [file.tensors[name] for name in names or file.tensors]
            with torch.cuda.stream(stream):
                tensors, reading = file.load(infos, where, chosen, state)
            readings.append(reading)
            return tensors

        # Ranks that load together exchange their shares file by file, in the same order on every rank.
        at_once = _SHARDS_AT_ONCE if replicas.current() is None else 1
        with (
            progress.shown(chosen.progress, f"loading {index}", state) as tick,
            ThreadPoolExecutor(at_once, thread_name_prefix="torchdirect-shard") as pool,
        ):
            futures = [
                pool.submit(contextvars.copy_context().run, load, file, names)
                for file, names in zip(files, shards.values(), strict=True)
            ]
            try:
                for future in futures:
                    while tick is not None and not wait([future], timeout=0.1).done:
                        tick()
                    result.update(future.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        for file in files:
            file.close()
    if readings:
        readings[0].report(sum(file.size for file in files), state.total, start, index)
    names = [name for group in shards.values() for name in group]
    return {name: result[name] for name in names} if names else result


def split_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the names of each shard: in order, each filled up to `limit` bytes."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, nbytes in sizes.items():
        if shards[-1] and used + nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += nbytes
    return shards


def save_sharded(
    state: dict[str, torch.Tensor],
    directory: str | os.PathLike[str],
    max_shard_bytes: int | str = "5GB",
    *,
    metadata: dict[str, str] | None = None,
    **settings: Any,
) -> list[str]:
    """Save a state dict as safetensors shards with an index, as Hugging Face lays them out; return the files.

    The checkpoint is published as a whole: new shards have names that the old checkpoint does not use, the index that
    names them replaces the old one at once, and only then are the old shards removed.

    Parameters
    ----------
    state
        Tensors as for `safetensors.save_file`.
    directory
        Made if it does not exist.
    max_shard_bytes
        Bytes of tensors in a shard, such as ``5_000_000_000`` or ``"5GB"``; a larger tensor has a shard of its own.
    metadata
        Text for each shard.
    settings
        As for `save`.
    """
    limit = parse_size(max_shard_bytes)
    safetensors.check_tensors(state)
    noted = {"format": "pt", **(metadata or {})}

    def write(names: Sequence[str], path: str) -> None:
        safetensors.save_file({name: state[name] for name in names}, path, noted, **settings)

    sizes = {name: tensor.nbytes for name, tensor in state.items()}
    return write_shards(os.fspath(directory), sizes, limit, write, durable=defaults.current(**settings).durable)


def write_shards(
    folder: str, sizes: Mapping[str, int], limit: int, write: Callable[[Sequence[str], str], None], *, durable: bool
) -> list[str]:
    """Write shards by `write`, which is given names and a path, and publish them as a whole; return the files."""
    os.makedirs(folder, exist_ok=True)
    shards = split_shards(sizes, limit)
    if len(shards) == 1:
        single = os.path.join(folder, "model.safetensors")
        write(shards[0], single)
        _remove_old(folder, {single})
        return [single]
    index = os.path.join(folder, SAFETENSORS_INDEX)
    names = _free_names(folder, len(shards))
    paths = [os.path.join(folder, name) for name in names]
    try:
        for group, path in zip(shards, paths, strict=True):
            write(group, path)
        text = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {key: name for group, name in zip(shards, names, strict=True) for key in group},
        }
        with publish.replacing(index, durable=durable) as new:
            with open(new.fd, "wb", closefd=False) as file:
                file.write((json.dumps(text, indent=2, sort_keys=True) + "\n").encode())
            new.commit()
    except BaseException:
        # The index may be in place, and only making that durable have failed.
        if not _counts(index, paths):
            for path in paths:
                if os.path.exists(path):
                    os.unlink(path)
        raise
    _remove_old(folder, {*paths, index})
    return [index, *paths]


def _counts(index: str, shards: Sequence[str]) -> bool:
    """Whether the index in the folder names these shards."""
    try:
        return bool(read_shards(index).keys() & set(shards))
    except FileNotFoundError:
        return False


def _free_names(folder: str, count: int) -> list[str]:
    """Return names for shards that no checkpoint in the folder uses: the index alone makes them count."""
    token = ""
    while True:
        names = [f"model-{i + 1:05d}-of-{count:05d}{token}.safetensors" for i in range(count)]
        if not any(os.path.lexists(os.path.join(folder, name)) for name in names):
            return names
        token = f"-{secrets.token_hex(4)}"


_SHARD = re.compile(r"model(-\d{5}-of-\d{5}(-[0-9a-f]{8})?)?\.safetensors")
_SHARD_IN_TEMPORARY = re.compile(rf"\.({_SHARD.pattern})\..*")


def _remove_old(folder: str, keep: set[str]) -> None:
    """Remove what no index names any more: shards that were replaced, and what saves that were killed have left.

    The new checkpoint counts already, so a file that cannot be removed is no error.
    """
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        doomed = []
        if (_SHARD.fullmatch(name) or name == SAFETENSORS_INDEX) and path not in keep:
            doomed = [path]
        elif match := _SHARD_IN_TEMPORARY.fullmatch(name):
            doomed = publish.stale_temporaries(os.path.join(folder, match[1]))
        for stale in doomed:
            with contextlib.suppress(OSError):
                os.unlink(stale)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_size(size: int | str) -> int:
    """Return bytes; raises ValueError for what is no positive size."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size) if isinstance(size, str) else None
    if match and match[2].upper() in _UNITS and float(match[1]) > 0:
        return int(float(match[1]) * _UNITS[match[2].upper()])
    raise ValueError(f"{size!r} is no size; use bytes, or text such as {format_bytes(5e9)!r}")
