"""The doctor's report: what was found, and what follows for each transfer type. Pure data, and its JSON."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from torchdirect.transfer import TransferType

__all__ = ["SCHEMA", "Finding", "Level", "Quality", "Report", "TransferVerdict"]

#: Number of the JSON's shape; it grows whenever a key goes or changes its meaning, not when one is added.
SCHEMA = 1


class Level(str, enum.Enum):
    """How a finding counts: all is well, worth knowing, or in the way of the direct path."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class Quality(str, enum.Enum):
    """What a transfer type is worth: `DIRECT` and `COMPATIBILITY` for cuFile's types, `AVAILABLE` for the host's."""

    DIRECT = "direct"
    COMPATIBILITY = "compatibility"
    AVAILABLE = "available"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what, how it counts, what was found, and the one thing to do about it."""

    check: str
    level: Level
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class TransferVerdict:
    """What one transfer type is worth for the path and a GPU (None: without one)."""

    transfer_type: TransferType
    gpu: int | None
    quality: Quality
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """Everything the doctor has to say about a path.

    Attributes
    ----------
    path : str
        As the caller named it, but for the names of the user and the home directory.
    version : str
        Version of torchdirect.
    facts : dict
        What was found out, in JSON's types, with nothing that identifies the machine or its user.
    findings : tuple of Finding
        One per thing looked at.
    transfers : tuple of TransferVerdict
        Seven per GPU, in the order of their codes; seven in all on a machine without one.
    """

    path: str
    version: str
    facts: dict[str, Any]
    findings: tuple[Finding, ...]
    transfers: tuple[TransferVerdict, ...]

    @property
    def direct(self) -> bool:
        """Whether a direct path exists for at least one GPU."""
        return any(verdict.quality is Quality.DIRECT for verdict in self.transfers)

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What stands in the way of the direct path."""
        return tuple(finding for finding in self.findings if finding.level is Level.PROBLEM)

    def to_json(self) -> dict[str, Any]:
        """Return the report in JSON's types."""
        return {
            "schema": SCHEMA,
            "torchdirect": self.version,
            "path": self.path,
            "direct": self.direct,
            "transfers": [
                {
                    "type": verdict.transfer_type.name,
                    "code": int(verdict.transfer_type),
                    "gpu": verdict.gpu,
                    "quality": verdict.quality.value,
                    "reason": verdict.reason,
                    "remedy": verdict.remedy,
                }
                for verdict in self.transfers
            ],
            "findings": [
                {
                    "check": finding.check,
                    "level": finding.level.value,
                    "text": finding.text,
                    "remedy": finding.remedy,
                }
                for finding in self.findings
            ],
            "facts": self.facts,
        }
