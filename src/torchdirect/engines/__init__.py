"""How bytes move: one engine for each family of transfer types."""

from __future__ import annotations

from collections.abc import Callable

from torchdirect.engines.base import Engine, EngineOptions
from torchdirect.engines.host import HostEngine

__all__ = ["make_engine"]


def make_engine(options: EngineOptions, tick: Callable[[], None] | None = None) -> Engine:
    """Return the engine for a transfer type.

    Parameters
    ----------
    options
        How it runs.
    tick
        Called now and then while it runs, in the calling thread.
    """
    return HostEngine(options, tick)
