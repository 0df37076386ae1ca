"""How bytes move: one engine for each family of transfer types."""

from __future__ import annotations

from collections.abc import Callable

from torchdirect.engines.base import Engine, EngineOptions, GpuFile
from torchdirect.engines.host import HostEngine
from torchdirect.transfer import TransferType

__all__ = ["make_engine", "open_gpu_file"]


def make_engine(options: EngineOptions, tick: Callable[[], None] | None = None) -> Engine:
    """Return the engine for a transfer type.

    Parameters
    ----------
    options
        How it runs.
    tick
        Called now and then while it runs, in the calling thread.
    """
    if options.transfer_type.uses_cufile:
        # Imported late: most processes never name a cuFile type.
        from torchdirect.engines.cufile import CuFileEngine

        return CuFileEngine(options, tick)
    return HostEngine(options, tick)


def open_gpu_file(transfer_type: TransferType, backend: str, fd: int, path: str) -> GpuFile:
    """Open a file for a cuFile type, before any byte moves; the caller closes it before `fd`.

    Parameters
    ----------
    transfer_type
        One of `GDS`, `GPU_ASYNC`, `GPU_BATCH`.
    backend
        ``"cufile"``, or ``"kvikio"`` to run `GDS` through KvikIO.
    fd, path
        The file; opened with ``O_DIRECT`` if the file system allows.

    Raises
    ------
    TransferUnavailableError
        If that type cannot carry the file, with reason and remedy.
    """
    from torchdirect.engines import cufile, kvikio

    if transfer_type is TransferType.GDS and backend == "kvikio":
        return kvikio.open_file(transfer_type, fd, path)
    return cufile.open_file(transfer_type, fd, path)
