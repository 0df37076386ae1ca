"""A complete new file before any I/O."""

from __future__ import annotations

from dataclasses import dataclass

from torchdirect.plan import Extent, Gap


@dataclass(frozen=True)
class FileLayout:
    """A complete new file before any I/O.

    Attributes
    ----------
    file_size
        Bytes.
    extents
        Where each storage's bytes go (none for empty storages).
    gaps
        Everything else.
    """

    file_size: int
    extents: tuple[Extent, ...]
    gaps: tuple[Gap, ...]
