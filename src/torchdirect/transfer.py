"""Which path the bytes take, and what really happened: `TransferType`, `TransferReport`."""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass

from torchdirect.errors import SettingsError
from torchdirect.units import format_bytes


class TransferType(enum.IntEnum):
    """Path between storage and tensor memory; the codes are those of gdsio's ``-x`` option.

    `AUTO` is not a path: it asks for the best one that this machine, file system and file allow.
    """

    AUTO = -1
    GDS = 0
    CPU_ONLY = 1
    CPU_GPU = 2
    CPU_ASYNC_GPU = 3
    CPU_CACHED_GPU = 4
    GPU_ASYNC = 5
    GPU_BATCH = 6

    @property
    def path(self) -> str:
        """The path in gdsio's notation, such as ``Storage->CPU->GPU``."""
        return _PATHS[self]

    @property
    def uses_cufile(self) -> bool:
        """Whether the bytes go through libcufile."""
        return self in (TransferType.GDS, TransferType.GPU_ASYNC, TransferType.GPU_BATCH)

    @property
    def uses_direct_io(self) -> bool:
        """Whether the host opens the file with ``O_DIRECT``."""
        return self in (TransferType.CPU_ONLY, TransferType.CPU_GPU, TransferType.CPU_ASYNC_GPU)

    @classmethod
    def parse(cls, value: TransferType | str | int) -> TransferType:
        """Return the type that `value` names.

        Parameters
        ----------
        value
            A member, its name in any case (``"gds"``), or its gdsio code as an int or a string (``3``, ``"3"``).

        Raises
        ------
        SettingsError
            If `value` names no transfer type.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            name = value.strip().upper()
            if name in cls.__members__:
                return cls[name]
            if name.isdigit():
                value = int(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= max(cls):
            return cls(value)
        known = ", ".join(f"{t.name} ({t.value})" if t is not cls.AUTO else t.name for t in cls)
        raise SettingsError(f"unknown transfer type {value!r}; use one of {known}")


_PATHS = {
    TransferType.AUTO: "decided per call",
    TransferType.GDS: "Storage->GPU",
    TransferType.CPU_ONLY: "Storage->CPU",
    TransferType.CPU_GPU: "Storage->CPU->GPU",
    TransferType.CPU_ASYNC_GPU: "Storage->CPU->GPU_ASYNC",
    TransferType.CPU_CACHED_GPU: "Storage->PAGE_CACHE->CPU->GPU",
    TransferType.GPU_ASYNC: "Storage->GPU_ASYNC",
    TransferType.GPU_BATCH: "Storage->GPU_BATCH",
}


@dataclass(frozen=True)
class TransferReport:
    """What one save or load really did.

    Attributes
    ----------
    operation
        ``"save"`` or ``"load"``.
    path
        The file, as the caller named it (``"<file object>"`` for file objects).
    requested
        The transfer type that was asked for.
    used
        The transfer type that the payload took, or None where PyTorch's own code moved the bytes (or none were moved).
    reason
        Why `used` was taken.
    bytes
        File bytes that were moved.
    payload_bytes
        Bytes of tensor storages among them.
    seconds
        Wall-clock time of the whole call, pickling and publication included.
    num_threads, chunk_bytes
        What the engine ran with; 0 where PyTorch's own code ran.
    retries
        Transfers that were short, or interrupted, and were taken up again.
    fallbacks
        Each departure from the path that was chosen first, in words.
    direct
        For cuFile types: True if the data really moved by DMA between storage and GPU, False in cuFile's own
        compatibility mode, None where it does not apply.
    """

    operation: str
    path: str
    requested: TransferType
    used: TransferType | None
    reason: str
    bytes: int
    payload_bytes: int
    seconds: float
    num_threads: int = 0
    chunk_bytes: int = 0
    retries: int = 0
    fallbacks: tuple[str, ...] = ()
    direct: bool | None = None

    @property
    def gb_per_s(self) -> float:
        """Rate in GB/s (1e9 bytes per second) over the whole call."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def road(self) -> str:
        """``"torchdirect"``, or ``"torch"`` where the call passed unchanged to PyTorch's own code."""
        return "torch" if self.used is None else "torchdirect"

    def __str__(self) -> str:
        if self.used is None:
            used = "torch's own road"
        else:
            used = f"{self.used.name} ({self.used.path})"
            if self.direct is not None:
                used += ", direct" if self.direct else ", cuFile compatibility mode"
        lines = [
            f"{self.operation} {self.path}: {format_bytes(self.bytes)} in {self.seconds:.3f} s, "
            f"{self.gb_per_s:.2f} GB/s",
            f"  path: {used}; requested {self.requested.name}; {self.reason}",
        ]
        if self.num_threads:
            lines.append(
                f"  {self.num_threads} threads, chunks of {format_bytes(self.chunk_bytes)}, {self.retries} retries"
            )
        lines.extend(f"  fallback: {text}" for text in self.fallbacks)
        return "\n".join(lines)


_last = threading.local()


def last_transfer() -> TransferReport | None:
    """Return the report of this thread's most recent `save` or `load`, or None before the first."""
    report: TransferReport | None = getattr(_last, "report", None)
    return report


def set_last_transfer(report: TransferReport) -> None:
    """Make `report` what `last_transfer` returns in this thread."""
    _last.report = report
