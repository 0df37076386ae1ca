"""CRC-32 as the zip container uses it, at hardware speed, and combined from parts."""

from __future__ import annotations

from collections.abc import Iterable

from isal import isal_zlib


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """Return the CRC-32 of `data` (ISO-HDLC, as in zip), continued from `value`. Releases the interpreter lock."""
    return isal_zlib.crc32(data, value)


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of a run of bytes from its consecutive parts.

    Parameters
    ----------
    parts
        For each part in order, its CRC-32 and its length in bytes.
    """
    total = 0
    for crc, nbytes in parts:
        total = isal_zlib.crc32_combine(total, crc, nbytes)
    return total
