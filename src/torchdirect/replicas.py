"""Loads of the same file by every rank: each rank reads a share of the bytes, and the ranks exchange them.

Where every rank needs the whole model, as under ``DistributedDataParallel``, each of N ranks would read all of the
file: N times the traffic of the disk and of the host's memory. The links between GPUs are faster than both.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchdirect.errors import LoadError, SettingsError
from torchdirect.plan import Extent, align_down
from torchdirect.units import BLOCK, MIB

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SMALLEST_SHARE = MIB // 4
"""Bytes of a rank's share from which exchanging it beats reading the whole extent on each rank."""

_BACKENDS = {"cpu": ("gloo", "mpi"), "cuda": ("nccl",)}
"""Backends that gather bytes of a kind of device without a detour."""


def share_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes of an extent that each rank reads for all, whole blocks; 0 if each reads all of it.

    What is left behind the last share, less than a block per rank, is read by every rank.
    """
    share = align_down(nbytes // ranks, BLOCK)
    return share if ranks > 1 and share >= _SMALLEST_SHARE else 0


def own_extents(extent: Extent, rank: int, ranks: int) -> list[Extent]:
    """Return what one rank reads of an extent.

    Parameters
    ----------
    rank, ranks
        Which one of how many.
    """
    share = share_bytes(extent.nbytes, ranks)
    if not share:
        return [extent]
    first, shared = extent.file_offset + rank * share, extent.file_offset + ranks * share
    parts = (extent.part(first, first + share), extent.part(shared, extent.end))
    return [part for part in parts if part is not None]


@dataclass(frozen=True)
class Replicas:
    """The ranks that load together.

    Attributes
    ----------
    group
        Their process group.
    rank, ranks
        This one, of how many.
    """

    group: ProcessGroup
    rank: int
    ranks: int

    def _exchanges(self, device: torch.device) -> bool:
        """Whether the group's backend gathers memory of this device; if not, each rank reads all of it."""
        config = str(torch.distributed.get_backend_config(self.group))
        backends = dict(pair.split(":") for pair in config.split(","))
        return backends.get(device.type) in _BACKENDS.get(device.type, ())

    def fill(
        self,
        path: str,
        extents: Sequence[Extent],
        tensors: Sequence[torch.Tensor],
        read: Callable[[Sequence[Extent]], None],
    ) -> None:
        """Fill tensors with this rank's share of the extents, and with the shares of the others.

        Parameters
        ----------
        path
            The file, for messages.
        extents, tensors
            As for `road.Reading.fill`; the same on every rank, but for the index of a device.
        read
            Reads extents into `tensors`.

        Raises
        ------
        LoadError
            On every rank, if one could not read its share, or if the ranks do not load the same bytes. The rank at
            fault raises its own error.
        """
        shared = [
            e for e in extents if self._exchanges(tensors[e.storage].device) and share_bytes(e.nbytes, self.ranks)
        ]
        chosen = set(shared)
        own = [part for e in extents for part in (own_extents(e, self.rank, self.ranks) if e in chosen else [e])]
        error: Exception | None = None
        try:
            read(own)
        except Exception as exc:  # the others wait for this rank, so they are told first
            error = exc
        kinds = [tensor.device.type for tensor in tensors]
        plan = hashlib.sha256(repr((list(map(tuple, extents)), kinds)).encode()).hexdigest()
        outcomes: list[tuple[str, str] | None] = [None] * self.ranks
        outcome = (plan, "" if error is None else f"{type(error).__name__}: {error}")
        torch.distributed.all_gather_object(outcomes, outcome, group=self.group)
        if error is not None:
            raise error
        self._check(path, plan, [found for found in outcomes if found is not None])
        distributed: Any = torch.distributed
        # PyTorch 2.13 has a new name for it.
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        works = []
        for extent in shared:
            share = share_bytes(extent.nbytes, self.ranks)
            first = extent.storage_offset
            region = tensors[extent.storage][first : first + share * self.ranks]
            mine = region[share * self.rank : share * (self.rank + 1)]
            works.append(gather(region, mine, group=self.group, async_op=True))
        for work in works:
            work.wait()

    def _check(self, path: str, plan: str, outcomes: Sequence[tuple[str, str]]) -> None:
        for rank, (_, failed) in enumerate(outcomes):
            if failed:
                raise LoadError(f"{path}: rank {rank} of the group could not read its share: {failed}", filename=path)
        for rank, (other, _) in enumerate(outcomes):
            if other != plan:
                raise LoadError(
                    f"{path}: rank {rank} of the group loads other bytes than rank {self.rank}: another file, other "
                    "tensors or another kind of device. Inside td.replicated every rank makes the same loads; leave "
                    "it out where ranks load different things",
                    filename=path,
                )


_current: contextvars.ContextVar[Replicas | None] = contextvars.ContextVar("torchdirect_replicas", default=None)


def current() -> Replicas | None:
    """Return the ranks that load together here, if any."""
    return _current.get()


@contextlib.contextmanager
def replicated(group: ProcessGroup | None = None) -> Iterator[None]:
    """Let the ranks of a process group load together: each reads a share, and gets the rest from the others.

    Every rank of the group must make the same loads inside the block, in the same order: of the same files, or of files
    with equal content, for the same kind of device. Each gets the whole result, as without the block. It holds for
    `load`, `load_sharded`, `load_into`, lazy handles and `safetensors`. Tensors of less than 256 KiB per rank, small
    files and what is left to PyTorch are read by every rank.

    Parameters
    ----------
    group
        The ranks, by default all of them. GPU memory is exchanged by NCCL, host memory by Gloo; for other backends each
        rank reads everything.

    Raises
    ------
    SettingsError
        If ``torch.distributed`` is not initialised, or this rank is not in the group.

    Examples
    --------
    >>> with torchdirect.replicated():
    ...     state = torchdirect.load("model.safetensors", map_location="cuda")
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise SettingsError("td.replicated needs a process group: call torch.distributed.init_process_group first")
    chosen = torch.distributed.group.WORLD if group is None else group
    rank = torch.distributed.get_rank(chosen)
    if chosen is None or rank < 0:
        raise SettingsError("td.replicated was given a process group that this rank is not in")
    token = _current.set(Replicas(chosen, rank, torch.distributed.get_world_size(chosen)))
    try:
        yield
    finally:
        _current.reset(token)
