"""Defaults of every call: built in, from ``TORCHDIRECT_…`` environment variables, and from `settings`.

Precedence, highest first: the call's own argument, the innermost `settings` block, the environment, built in.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from torchdirect.errors import SettingsError
from torchdirect.transfer import TransferType
from torchdirect.units import BLOCK, MIB

Progress = bool | Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Values that a save or load runs with.

    Attributes
    ----------
    transfer_type
        Path of the bytes.
    fallback
        ``"error"``: a named transfer type that is not available raises; ``"warn"``: it warns once and takes the best
        path that works.
    num_threads
        I/O threads; None lets the library choose.
    chunk_bytes
        Bytes per transfer, a multiple of 4096; None lets the library choose.
    staging_bytes
        Upper bound of all staging buffers of this process together.
    durable
        Whether a save returns only after the data and its name are on stable storage.
    checksum
        Whether a save computes the CRC-32 fields of the zip container (False writes zeros, as
        ``torch.serialization.set_crc32_options(False)`` does).
    verify
        Whether a load checks the checksums of what it has read.
    pin_memory
        Whether loaded host tensors lie in pinned memory (needs CUDA).
    progress
        True for a progress display on standard error, or a callable that receives bytes done and bytes in all.
    gds_compat
        ``"allow"`` or ``"forbid"`` cuFile's compatibility mode where a cuFile type was named.
    gds_backend
        ``"cufile"``, or ``"kvikio"`` to run the GDS type through KvikIO.
    staging
        Where a background save keeps the bytes of GPU tensors until they are written: ``"host"`` (pinned memory),
        ``"device"`` (memory of the same GPU), or ``"auto"``: host memory where it can be pinned, otherwise what there
        is.
    snapshot_bytes
        Upper bound of the host memory that background saves of this process hold together; None: half of what is
        available.
    pending
        What a background save does while an earlier one to the same path, or one that holds the memory it needs, has
        not ended: ``"wait"``, or ``"refuse"`` with `SavePendingError`.
    """

    transfer_type: TransferType = TransferType.AUTO
    fallback: str = "error"
    num_threads: int | None = None
    chunk_bytes: int | None = None
    staging_bytes: int = 256 * MIB
    durable: bool = True
    checksum: bool = True
    verify: bool = False
    pin_memory: bool = False
    progress: Progress = False
    gds_compat: str = "allow"
    gds_backend: str = "cufile"
    staging: str = "auto"
    snapshot_bytes: int | None = None
    pending: str = "wait"


def _choice(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if isinstance(value, str) and value.lower() in allowed:
            return value.lower()
        raise SettingsError("use " + " or ".join(repr(a) for a in allowed))

    return parse


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("1", "true", "yes", "on"):
        return True
    if isinstance(value, str) and value.strip().lower() in ("0", "false", "no", "off"):
        return False
    raise SettingsError("use True or False (in the environment: 1 or 0)")


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def _integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+)\s*([kmg]?)(?:i?b)?\s*", value.lower())):
        return int(match[1]) * _UNITS[match[2]]
    raise SettingsError("use a whole number (sizes may carry a unit, such as '8MiB')")


def _optional(parse: Callable[[Any], int]) -> Callable[[Any], int | None]:
    def parse_optional(value: Any) -> int | None:
        if value is None or (isinstance(value, str) and value.strip().lower() in ("", "auto")):
            return None
        return parse(value)

    return parse_optional


def _threads(value: Any) -> int:
    threads = _integer(value)
    if not 1 <= threads <= 1024:
        raise SettingsError("use 1 to 1024 threads")
    return threads


def _chunk(value: Any) -> int:
    chunk = _integer(value)
    if chunk < BLOCK or chunk % BLOCK or chunk > 1 << 30:
        raise SettingsError(f"use a multiple of {BLOCK} bytes, 1 GiB at most")
    return chunk


def _staging(value: Any) -> int:
    staging = _integer(value)
    if staging < MIB:
        raise SettingsError("use at least 1 MiB")
    return staging


def _progress(value: Any) -> Progress:
    return value if callable(value) else _flag(value)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "transfer_type": TransferType.parse,
    "fallback": _choice("error", "warn"),
    "num_threads": _optional(_threads),
    "chunk_bytes": _optional(_chunk),
    "staging_bytes": _staging,
    "durable": _flag,
    "checksum": _flag,
    "verify": _flag,
    "pin_memory": _flag,
    "progress": _progress,
    "gds_compat": _choice("allow", "forbid"),
    "gds_backend": _choice("cufile", "kvikio"),
    "staging": _choice("auto", "host", "device"),
    "snapshot_bytes": _optional(_staging),
    "pending": _choice("wait", "refuse"),
}
_VARIABLES = {name: f"TORCHDIRECT_{name.upper()}" for name in _PARSERS}


def _parse(name: str, value: Any, shown_as: str) -> Any:
    try:
        return _PARSERS[name](value)
    except SettingsError as exc:
        raise SettingsError(f"{shown_as}={value!r}: {exc}") from None


_scoped: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("torchdirect_settings", default=None)


def current(**arguments: Any) -> Settings:
    """Return the settings in force here, with the call's own arguments (None: not given) on top.

    Raises
    ------
    SettingsError
        If an argument or an environment variable has a value that is not allowed; the message names which.
    """
    values: dict[str, Any] = {}
    scoped = _scoped.get() or {}
    for name, variable in _VARIABLES.items():
        argument = arguments.get(name)
        if argument is not None:
            values[name] = _parse(name, argument, name)
        elif name in scoped:
            values[name] = scoped[name]
        elif (text := os.environ.get(variable)) is not None:
            values[name] = _parse(name, text, f"environment variable {variable}")
    return Settings(**values)


@contextlib.contextmanager
def settings(**defaults: Any) -> Iterator[Settings]:
    """Set defaults for the saves and loads inside a ``with`` block (this thread or task only).

    Takes every attribute of `Settings` as a keyword.

    Examples
    --------
    >>> with torchdirect.settings(transfer_type="CPU_ASYNC_GPU", durable=False):
    ...     torchdirect.save(state, "ckpt.pt")

    Raises
    ------
    SettingsError
        If a name is unknown or a value is not allowed.
    """
    for name in defaults:
        if name not in _PARSERS:
            raise SettingsError(f"unknown setting {name!r}; the settings are {', '.join(_PARSERS)}")
    parsed = {name: _parse(name, value, name) for name, value in defaults.items()}
    token = _scoped.set({**(_scoped.get() or {}), **parsed})
    try:
        yield current()
    finally:
        _scoped.reset(token)
