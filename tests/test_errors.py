"""The exceptions: which ``except`` clauses catch them, what they say, and that they survive copying and pickling."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from typing import Any

import pytest

from torchdirect import errors
from torchdirect.errors import (
    CorruptCheckpointError,
    LoadError,
    SaveError,
    SaveFileNotFoundError,
    SaveIsADirectoryError,
    SaveNotADirectoryError,
    SavePermissionError,
    SettingsError,
    TorchDirectError,
    TransferUnavailableError,
    save_error,
)

SAMPLES = [
    TransferUnavailableError("GDS", "nvidia-fs is not loaded", "Load it"),
    TransferUnavailableError("GDS", "nvidia-fs is not loaded"),
    CorruptCheckpointError("a.pt: no end record"),
    SettingsError("chunk_size: -1 is negative"),
    SaveError("a.pt: writing: bad", errno.EIO, "a.pt"),
    SaveError("just words"),
    save_error(OSError(errno.ENOENT, "x"), "a.pt", "opening"),
    save_error(OSError(errno.EACCES, "x"), "a.pt", "opening"),
    save_error(OSError(errno.EISDIR, "x"), "a.pt", "opening"),
    save_error(OSError(errno.ENOTDIR, "x"), "a.pt", "opening"),
    LoadError("a.pt: layer.weight at 4096: bad", errno.EIO, "a.pt", 4096, "layer.weight"),
    LoadError("just words"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_are_equal_in_every_field(error: Any, duplicate: Any) -> None:
    twin = duplicate(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin.__dict__ == error.__dict__
    assert twin.args == error.args
    for field in ("errno", "strerror", "filename", "filename2"):
        assert getattr(twin, field, None) == getattr(error, field, None)


def test_every_public_name_is_of_the_family() -> None:
    for name in errors.__all__:
        if name != "save_error":
            assert issubclass(getattr(errors, name), TorchDirectError)


@pytest.mark.parametrize(
    ("number", "ours", "builtin"),
    [
        (errno.ENOENT, SaveFileNotFoundError, FileNotFoundError),
        (errno.EACCES, SavePermissionError, PermissionError),
        (errno.EPERM, SavePermissionError, PermissionError),
        (errno.EISDIR, SaveIsADirectoryError, IsADirectoryError),
        (errno.ENOTDIR, SaveNotADirectoryError, NotADirectoryError),
        (errno.ENOSPC, SaveError, OSError),
        (errno.EROFS, SaveError, OSError),
    ],
)
def test_save_error_follows_errno(number: Any, ours: Any, builtin: Any) -> None:
    error = save_error(OSError(number, "whatever", "other"), "dir/a.pt", "opening", "Do this")
    assert type(error) is ours
    for kind in (builtin, SaveError, OSError, RuntimeError, TorchDirectError):
        with pytest.raises(kind):
            raise error
    assert str(error) == f"dir/a.pt: opening: {os.strerror(number)}. Do this."
    assert (error.errno, error.strerror, error.filename) == (number, os.strerror(number), "dir/a.pt")


def test_save_error_general_remedy_and_none() -> None:
    assert "Free space" in str(save_error(OSError(errno.ENOSPC, ""), "a", "writing"))
    assert str(save_error(OSError(errno.EXDEV, ""), "a", "writing")) == f"a: writing: {os.strerror(errno.EXDEV)}."
    assert str(save_error(OSError("odd"), "a", "writing")) == "a: writing: odd."


def test_save_error_does_not_wrap_twice() -> None:
    first = save_error(OSError(errno.EIO, ""), "a", "writing")
    assert save_error(first, "b", "publishing") is first


def test_transfer_unavailable_names_all_three() -> None:
    error = TransferUnavailableError("GDS", "no nvidia-fs", "Load it.")
    assert str(error) == "transfer type GDS is not available: no nvidia-fs. Load it."
    assert (error.transfer_type, error.reason, error.remedy) == ("GDS", "no nvidia-fs", "Load it.")
    assert isinstance(error, RuntimeError)


def test_load_error_fields() -> None:
    error = LoadError("m", errno.EIO, "a.pt", 4096, "w")
    assert (error.filename, error.offset, error.name, error.errno) == ("a.pt", 4096, "w", errno.EIO)
    assert isinstance(error, OSError)
    assert str(error) == "m"


def test_traceback_shows_the_message() -> None:
    import traceback

    error = save_error(OSError(errno.EACCES, "x"), "a.pt", "opening")
    assert "a.pt: opening: Permission denied" in "".join(traceback.format_exception_only(type(error), error))
