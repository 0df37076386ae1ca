"""Sizes in bytes, as constants and as text."""

from __future__ import annotations

MIB = 1 << 20
BLOCK = 4096
"""Bytes. Page size, and the largest block that `O_DIRECT` and GPUDirect Storage ask for in practice."""


def format_bytes(nbytes: float) -> str:
    """Return a byte count as people read it: decimal units, as disks and links are rated in."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"
