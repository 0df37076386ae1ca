"""Keep what identifies a machine or a person, and what a terminal would obey, out of a report made to be posted."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable
from typing import Any

__all__ = ["scrubber"]

_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)
# Names that say nothing about anybody, and that ordinary sentences contain.
_COMMON = frozenset({"root", "user", "localhost", "vm", "host", "ubuntu", "linux", "gpu", "test", "data", "nvidia"})


def scrubber(path: str) -> Callable[[Any], Any]:
    """Return a function that cleans all texts in a structure of dictionaries, lists and texts.

    Parameters
    ----------
    path : str
        What the user named: the file's real path, and its folder's, are written as the user wrote them. The home
        directory becomes ``~``, and the names of the user and the host, and UUIDs, become marks.
    """
    real = os.path.realpath(path)
    replacements = [
        (real, path),
        (os.path.dirname(real), os.path.dirname(path) or "."),
        (os.path.expanduser("~"), "~"),
        (os.path.realpath(os.path.expanduser("~")), "~"),
    ]
    paths = [(old, new) for old, new in replacements if old.startswith("/") and len(old) > 1 and old != new]
    words = [(name, mark) for name, mark in _names() if len(name) > 2 and name.lower() not in _COMMON]

    def clean_text(text: str) -> str:
        for old, new in paths:
            text = re.sub(rf"(?<![\w/.-]){re.escape(old)}(?![\w-])", new.replace("\\", r"\\"), text)
        for name, mark in words:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", mark, text)
        return _printable(_UUID.sub("<uuid>", text))

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return clean_text(value)
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item) for item in value]
        return value

    return clean


def _printable(text: str) -> str:
    # Bytes of a path that are no UTF-8 come as lone surrogates, which neither a terminal nor JSON takes.
    text = text.encode(errors="backslashreplace").decode()
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def _names() -> list[tuple[str, str]]:
    names = [(socket.gethostname(), "<host>"), (socket.gethostname().partition(".")[0], "<host>")]
    try:
        names.append((getpass.getuser(), "<user>"))
    except (KeyError, OSError):
        # A user without a name, as in containers that run with a bare number.
        pass
    return names
