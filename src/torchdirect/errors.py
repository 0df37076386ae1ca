"""Every exception that torchdirect raises on purpose.

Two rules shape the classes. Whoever wrote ``except`` for what ``torch.save`` or ``torch.load`` raises must catch ours
too, so each class also derives from the built-in type that PyTorch or the operating system would have raised. And each
message stands alone: the file, what was being done, why it failed, and what to do about it.
"""

from __future__ import annotations

import errno
import os
from typing import Any

__all__ = [
    "CorruptCheckpointError",
    "LoadError",
    "SaveError",
    "SaveFileNotFoundError",
    "SaveIsADirectoryError",
    "SaveNotADirectoryError",
    "SavePendingError",
    "SavePermissionError",
    "SettingsError",
    "TorchDirectError",
    "TransferUnavailableError",
    "save_error",
]


class TorchDirectError(Exception):
    """Base of all exceptions of torchdirect."""


class TransferUnavailableError(TorchDirectError, RuntimeError):
    """A transfer type that was asked for by name cannot be used here.

    Parameters
    ----------
    transfer_type : str
        Name of the transfer type, such as ``"GDS"``.
    reason : str
        Why it cannot be used.
    remedy : str, optional
        What would make it usable, or what to use instead.

    Attributes
    ----------
    transfer_type, reason, remedy : str
        As given.
    """

    def __init__(self, transfer_type: str, reason: str, remedy: str = "") -> None:
        super().__init__(_sentences(f"transfer type {transfer_type} is not available: {reason}", remedy))
        self.transfer_type = transfer_type
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.transfer_type, self.reason, self.remedy), self.__dict__


class CorruptCheckpointError(TorchDirectError, RuntimeError):
    """The file is not, or no longer, what it claims to be."""


class SettingsError(TorchDirectError, ValueError):
    """A setting has a value that it cannot have."""


class _MessageOSError(TorchDirectError, OSError):
    """An ``OSError`` whose text is a whole message instead of ``[Errno N] strerror: 'filename'``."""

    # Overriding __init__ (and not __new__) makes OSError take its own fields from the super().__init__ call below.
    def __init__(self, message: str, errno: int | None = None, filename: str | None = None) -> None:
        super().__init__(errno, os.strerror(errno) if errno is not None else message, filename)
        self.message = message

    def __str__(self) -> str:
        return self.message

    # OSError's own __reduce__ would rebuild from (errno, strerror, filename).
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.errno, self.filename), self.__dict__


class SaveError(_MessageOSError, RuntimeError):
    """A checkpoint could not be written.

    ``torch.save`` raises `RuntimeError` for a path that it cannot write, while the fault itself is an `OSError`: code
    that catches either kind catches this.

    Parameters
    ----------
    message : str
        The whole text of the error.
    errno : int, optional
        Error number of the operating system.
    filename : str, optional
        The path that the user named.

    Attributes
    ----------
    message, errno, filename
        As given; ``strerror`` is the operating system's text for `errno`.
    """


class SaveFileNotFoundError(SaveError, FileNotFoundError):
    """The directory to save in does not exist."""


class SavePendingError(SaveError):
    """A background save was refused, since an earlier one has not ended (``pending="refuse"``)."""


class SavePermissionError(SaveError, PermissionError):
    """The user may not write the file or its directory."""


class SaveIsADirectoryError(SaveError, IsADirectoryError):
    """The path to save to is a directory."""


class SaveNotADirectoryError(SaveError, NotADirectoryError):
    """A part of the path that must be a directory is not one."""


class LoadError(_MessageOSError):
    """A read failed.

    Parameters
    ----------
    message : str
        The whole text of the error.
    errno : int, optional
        Error number of the operating system.
    filename : str, optional
        The file being read.
    offset : int, optional
        Where in the file the read failed, in bytes.
    name : str, optional
        The tensor or record that the bytes belong to.

    Attributes
    ----------
    message, errno, filename, offset, name
        As given.
    """

    def __init__(
        self,
        message: str,
        errno: int | None = None,
        filename: str | None = None,
        offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(message, errno, filename)
        self.offset = offset
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.errno, self.filename, self.offset, self.name), self.__dict__


_SAVE_CLASSES: dict[int, type[SaveError]] = {
    errno.ENOENT: SaveFileNotFoundError,
    errno.EACCES: SavePermissionError,
    errno.EPERM: SavePermissionError,
    errno.EISDIR: SaveIsADirectoryError,
    errno.ENOTDIR: SaveNotADirectoryError,
}

_SAVE_REMEDIES: dict[int, str] = {
    errno.ENOENT: "Create the directory first",
    errno.EACCES: "Save to a place that this user may write, or change the permissions",
    errno.EPERM: "Save to a place that this user may write, or change the permissions",
    errno.EISDIR: "Name a file in that directory instead",
    errno.ENOTDIR: "Name a path whose parents are all directories",
    errno.EROFS: "Save to a file system that is mounted for writing",
    errno.ENOSPC: "Free space, or save to another file system",
    errno.EDQUOT: "Free space within the quota, or have it raised",
    errno.EFBIG: "Save to a file system without that limit, or raise 'ulimit -f'",
    errno.ENAMETOOLONG: "Use a shorter file name",
    errno.ELOOP: "Repair the symbolic links, which lead back to themselves",
    errno.EIO: "The storage itself failed: see the kernel log",
    errno.EMFILE: "Close files, or raise 'ulimit -n'",
}


def save_error(exc: OSError, path: str, doing: str, remedy: str = "") -> SaveError:
    """Turn a fault of the operating system into the `SaveError` that suits it.

    Parameters
    ----------
    exc : OSError
        The fault. A `SaveError` is handed back as it is, since it already carries its message.
    path : str
        The path that the user named.
    doing : str
        What was being done, such as ``"writing the data to storage"``.
    remedy : str, optional
        What the user can do. A general one for the error number stands in when it is empty.

    Returns
    -------
    SaveError
        With the message ``<path>: <doing>: <strerror>. <remedy>``, ``errno`` of `exc`, and ``filename`` set to `path`.
        The class follows ``errno`` by the rule of PEP 3151.
    """
    if isinstance(exc, SaveError):
        return exc
    number = exc.errno
    reason = os.strerror(number) if number is not None else str(exc)
    if not remedy and number is not None:
        remedy = _SAVE_REMEDIES.get(number, "")
    kind = SaveError if number is None else _SAVE_CLASSES.get(number, SaveError)
    return kind(_sentences(f"{path}: {doing}: {reason}", remedy), number, path)


def _sentences(*parts: str) -> str:
    return " ".join(part.rstrip(".") + "." for part in parts if part)
