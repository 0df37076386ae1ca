"""`save`, `load` and `async_save`: PyTorch's functions of these names, with our writer and reader filled in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from torchdirect.dcp.reader import DirectReader
from torchdirect.dcp.writer import DirectWriter
from torchdirect.errors import TorchDirectError


def save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    **options: Any,
) -> Metadata:
    """Save a distributed state dict, as ``torch.distributed.checkpoint.save`` does; every rank calls it.

    Parameters
    ----------
    state_dict, planner, process_group, no_dist, use_collectives
        As there.
    path
        Directory of the checkpoint; a checkpoint in it is replaced when the new one is whole.
    options
        Of `DirectWriter`: ``overwrite``, ``transfer_type``, ``durable``, ….

    Returns
    -------
    Metadata
        As there.

    Raises
    ------
    SaveError, TransferUnavailableError
        If this rank's part failed; an older checkpoint in the directory is whole.
    torch.distributed.checkpoint.api.CheckpointException
        If another rank's part failed; it holds the errors by rank.

    Examples
    --------
    >>> torchdirect.dcp.save({"model": model.state_dict()}, "checkpoints/step-1000")
    """
    writer = DirectWriter(path, **options)
    given = _given(planner=planner, process_group=process_group, no_dist=no_dist)
    if not use_collectives:
        given["use_collectives"] = False  # newer versions of PyTorch only
    try:
        with _own_errors(writer, process_group):
            made: Metadata = state_dict_saver.save(state_dict, storage_writer=writer, **given)
            return made
    except BaseException:
        writer.discard()
        raise


def load(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    planner: LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    **options: Any,
) -> None:
    """Load a distributed checkpoint into the tensors of a state dict, as ``torch.distributed.checkpoint.load`` does.

    Parameters
    ----------
    state_dict, planner, process_group, no_dist
        As there. Every rank calls it, on any number of ranks.
    path
        Directory that `save` or PyTorch's own function wrote.
    options
        Of `DirectReader`: ``transfer_type``, ``verify``, ….

    Raises
    ------
    CorruptCheckpointError, LoadError, TransferUnavailableError
        If this rank's part failed.
    torch.distributed.checkpoint.api.CheckpointException
        If something else, or another rank's part failed; it holds the errors by rank.

    Examples
    --------
    >>> torchdirect.dcp.load(state, "checkpoints/step-1000")
    """
    reader = DirectReader(path, **options)
    given = _given(planner=planner, process_group=process_group, no_dist=no_dist)
    with _own_errors(reader, process_group):
        state_dict_loader.load(state_dict, storage_reader=reader, **given)


def async_save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    async_checkpointer_type: Any = None,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    **options: Any,
) -> Any:
    """Copy a distributed state dict to host memory, and save it in the background; every rank calls it.

    What the tensors hold when this returns (with an `async_stager` of its own: when its staging is done) is what is
    saved, whatever happens to them later.

    Parameters
    ----------
    state_dict, planner, process_group, async_checkpointer_type, async_stager, no_dist, use_collectives
        As for ``torch.distributed.checkpoint.async_save``.
    path, options
        As for `save`.

    Returns
    -------
    concurrent.futures.Future or AsyncSaveResponse
        As there. Errors come from its ``result()``.

    Examples
    --------
    >>> future = torchdirect.dcp.async_save(state, "checkpoints/step-1000")
    >>> future.result()
    """
    writer = DirectWriter(path, **options)
    given = _given(
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        async_checkpointer_type=async_checkpointer_type,
        async_stager=async_stager,
    )
    if not use_collectives:
        given["use_collectives"] = False
    response: Any = state_dict_saver.async_save(state_dict, storage_writer=writer, **given)
    future: Future[Any] = getattr(response, "upload_completion", response)
    future.add_done_callback(lambda done: writer.discard() if done.cancelled() or done.exception() else None)
    return response


def _given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not PyTorch's defaults: some have come with later versions."""
    return {name: value for name, value in arguments.items() if value is not None and value is not False}


@contextlib.contextmanager
def _own_errors(storage: DirectReader | DirectWriter, process_group: Any) -> Iterator[None]:
    """Raise the error of this rank, if it is one that callers expect, in place of the collection of all ranks'."""
    try:
        yield
    except CheckpointException as exc:
        own = getattr(storage, "failure", None)
        if own is None:
            rank = _rank_in(process_group)
            own = exc.failures[rank][0] if rank in exc.failures else None
        if isinstance(own, (TorchDirectError, OSError, KeyboardInterrupt)):
            raise own from exc
        raise


def _rank_in(process_group: Any) -> int:
    """Return this process's rank in a group; 0 without one."""
    distributed = torch.distributed
    return distributed.get_rank(process_group) if distributed.is_available() and distributed.is_initialized() else 0
