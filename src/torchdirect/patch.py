"""`patch_torch`: a program's own ``torch.save`` and ``torch.load`` take torchdirect's road."""

from __future__ import annotations

import functools
import threading
from types import TracebackType
from typing import Any

import torch

from torchdirect import checkpoint, originals

_lock = threading.Lock()
_depth = 0
_replaced: tuple[Any, Any] | None = None


@functools.wraps(originals.save)
def _save(*arguments: Any, **keywords: Any) -> None:
    checkpoint.save(*arguments, **keywords)


@functools.wraps(originals.load)
def _load(*arguments: Any, **keywords: Any) -> Any:
    return checkpoint.load(*arguments, **keywords)


class Patch:
    """``torch.save`` and ``torch.load`` replaced; `undo`, or the end of a ``with`` block, puts them back."""

    def __init__(self) -> None:
        global _depth, _replaced
        self._active = True
        with _lock:
            _depth += 1
            if _depth == 1:
                _replaced = (torch.save, torch.load)
                torch.save, torch.load = _save, _load

    def undo(self) -> None:
        """Put PyTorch's functions back, unless another patch still holds; doing so twice is allowed."""
        global _depth, _replaced
        with _lock:
            if not self._active:
                return
            self._active = False
            _depth -= 1
            if _depth == 0 and _replaced is not None:
                # What somebody else has put there meanwhile is theirs.
                if torch.save is _save:
                    torch.save = _replaced[0]
                if torch.load is _load:
                    torch.load = _replaced[1]
                _replaced = None

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def patch_torch() -> Patch:
    """Let ``torch.save`` and ``torch.load`` of this process be `save` and `load`.

    What torchdirect leaves to PyTorch (file objects, legacy files, other devices, …) passes through unchanged. Code
    that took a reference to PyTorch's functions before, as ``from torch import save`` does, keeps them. Several patches
    may overlap, in any order and from several threads; the last one that ends puts PyTorch's functions back.

    Returns
    -------
    Patch
        Usable in a ``with`` block; or keep it and call ``undo()``; or forget it, for the life of the process.

    Examples
    --------
    >>> with torchdirect.patch_torch():
    ...     trainer.fit(model)
    """
    return Patch()
