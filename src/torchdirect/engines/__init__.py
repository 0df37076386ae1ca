"""How bytes move: one engine for each family of transfer types."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchdirect.engines.base import Engine, EngineOptions, OpenFile
from torchdirect.engines.host import HostEngine
from torchdirect.transfer import TransferType

if TYPE_CHECKING:
    from torchdirect.engines.cufile import CuFileEngine

__all__ = ["make_engine", "try_to_open"]


def make_engine(options: EngineOptions, tick: Callable[[], None] | None = None) -> Engine:
    """Return the engine for a transfer type.

    Parameters
    ----------
    options
        How it runs.
    tick
        Called now and then while it runs, in the calling thread.
    """
    return _cufile_engine(options, tick) if options.transfer_type.uses_cufile else HostEngine(options, tick)


def try_to_open(options: EngineOptions, file: OpenFile) -> None:
    """Open a file as a cuFile type would, before any byte moves.

    Raises
    ------
    TransferUnavailableError
        If that type cannot carry the file, with reason and remedy.
    """
    with _cufile_engine(options, None).open(file):
        pass


def _cufile_engine(options: EngineOptions, tick: Callable[[], None] | None) -> CuFileEngine:
    # Imported late: most processes never name a cuFile type.
    if options.transfer_type is TransferType.GDS and options.backend == "kvikio":
        from torchdirect.engines.kvikio import KvikIOEngine

        return KvikIOEngine(options, tick)
    from torchdirect.engines.cufile import CuFileEngine

    return CuFileEngine(options, tick)
