"""What nvidia-fs itself counted: evidence that transfers really took the direct path."""

from __future__ import annotations

import re

_STATISTICS = "/proc/driver/nvidia-fs/stats"


def transfers_counted(path: str = _STATISTICS) -> int | None:
    """Return the reads and writes that nvidia-fs has counted; None where it does not run, or does not count.

    It counts only while its I/O statistics are switched on (module parameter ``rw_stats_enabled``).
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    if not re.search(r"^IO stats: Enabled", text, re.MULTILINE):
        return None
    counts = re.findall(r"^(?:Reads|Writes)\s*:\s*n=(\d+)", text, re.MULTILINE)
    return sum(map(int, counts)) if counts else None


class TransferCounter:
    """Reads the statistics when it is made, and again when asked."""

    def __init__(self, path: str = _STATISTICS) -> None:
        self._path = path
        self._before = transfers_counted(path)

    def moved(self) -> bool | None:
        """Whether nvidia-fs has counted transfers since; None where that cannot be known."""
        after = transfers_counted(self._path)
        if self._before is None or after is None:
            return None
        return after > self._before
