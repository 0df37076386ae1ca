"""What messages call a tensor: its key in the object, found only when a message needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchdirect.formats.pickle_index import Inert, StorageReference

_MAX_DEPTH = 64
_MAX_STEPS = 5_000_000
"""Values after which a search ends: a hostile pickle can nest references so that paths to them have no end."""


class TooManyNamesError(Exception):
    """An object has so many paths that they cannot be listed."""


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield every value inside plain containers (and inert stand-ins of others) with its dotted path."""
    yield path, value
    if depth >= _MAX_DEPTH:
        return
    children: Any = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    elif isinstance(value, Inert):
        children = [(item[0], item[1]) for item in value.items if isinstance(item, tuple) and len(item) == 2]
        if isinstance(value.state, Mapping):
            children += value.state.items()
        children += [("", argument) for argument in value.args]
    for key, child in children:
        name = str(key) if isinstance(key, (str, int)) else type(key).__name__
        yield from _walk(child, f"{path}.{name}" if path and name else path or name, depth + 1)


def walk(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value inside an indexed object with its dotted path.

    Raises
    ------
    TooManyNamesError
        After five million of them.
    """
    for step, found in enumerate(_walk(root, "", 0)):
        if step >= _MAX_STEPS:
            raise TooManyNamesError(f"the object has more than {_MAX_STEPS} paths")
        yield found


def stored_name(root: Any, key: str) -> str:
    """Return the name of the tensor that uses storage `key` in an indexed object, or the record's name."""
    try:
        for path, value in walk(root):
            if isinstance(value, StorageReference) and value.key == key:
                return f"tensor {path!r}" if path else f"record 'data/{key}'"
    except TooManyNamesError:
        pass
    return f"record 'data/{key}'"


def describer(root: Any, keys: list[str]) -> Callable[[int], str]:
    """Return a function that names the i-th storage."""
    return lambda i: stored_name(root, keys[i])
