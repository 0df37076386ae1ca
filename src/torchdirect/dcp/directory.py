"""A checkpoint directory: its names, when it counts, and what nobody vouches for any more.

A save writes data files under names that no other save uses, each published when it is durable. The checkpoint counts
from the rename of ``.metadata``, which names them; only then are the files that it no longer names removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator

from torch.distributed.checkpoint import filesystem

from torchdirect import publish
from torchdirect.dcp.metadata import METADATA_NAME, parse_metadata, stored_files
from torchdirect.errors import CorruptCheckpointError, SaveError, save_error

_RANK_METADATA = re.compile(r"__(\d+)\.metadata")
_DATA = re.compile(r"__(?:[0-9a-f]{16}_)?(\d+)_\d+(?:-[0-9a-f]{8})?\.distcp")
"""Data files of PyTorch's writer (``__0_0.distcp``) and of ours (``__<token>_0_0.distcp``)."""
_TEMPORARY = re.compile(rf"\.({_DATA.pattern})\..*")


def new_token() -> str:
    """Return the part of the names of data files that is one save's own."""
    return secrets.token_hex(8)


def metadata_name(rank: int | None = None) -> str:
    """Return the name of the metadata of all ranks, or of one that was saved without collectives."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


def metadata_files(folder: str) -> list[str]:
    """Return the paths of all metadata in a directory: of all ranks, and of single ones."""
    names = [name for name in os.listdir(folder) if name == METADATA_NAME or _RANK_METADATA.fullmatch(name)]
    return [os.path.join(folder, name) for name in sorted(names)]


def free_name(folder: str, prefix: str, number: int) -> str:
    """Return a name for a data file that no file in the directory has.

    A planner that caches plans hands out the prefix of an earlier save again.
    """
    name = f"{prefix}{number}{filesystem.DEFAULT_SUFFIX}"
    while os.path.lexists(os.path.join(folder, name)):
        name = f"{prefix}{number}-{secrets.token_hex(4)}{filesystem.DEFAULT_SUFFIX}"
    return name


def data_files(folder: str, rank: int | None = None) -> list[str]:
    """Return the names of the data files in a directory (of one rank), and of temporary files of such."""
    found = []
    for name in os.listdir(folder):
        match = _DATA.fullmatch(name)
        temporary = _TEMPORARY.fullmatch(name)
        of = match[1] if match else temporary[2] if temporary else None
        if of is not None and (rank is None or int(of) == rank):
            found.append(name)
    return found


def make(folder: str, *, durable: bool) -> None:
    """Make a directory and its parents, and put their names on storage.

    Raises
    ------
    SaveError
        If that fails.
    """
    missing = []
    path = os.path.abspath(folder)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
        for made in missing if durable else ():
            _sync(os.path.dirname(made))
    except OSError as exc:
        raise save_error(exc, folder, "making the directory of the checkpoint") from exc


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        # fsync(2): the file system does not sync directories, and has its own way with names.
        if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Keep other saves into the directory from becoming its checkpoint meanwhile, where the file system has locks."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def write_metadata(path: str, data: bytes, *, durable: bool) -> None:
    """Make `data` the metadata at `path`: all of it or nothing.

    Raises
    ------
    SaveError
        If it cannot be written.
    """
    with publish.replacing(path, durable=durable) as new:
        try:
            with open(new.fd, "wb", closefd=False) as file:
                file.write(data)
        except OSError as exc:
            raise save_error(exc, path, "writing the metadata") from exc
        new.commit()


def open_inside(folder: str, name: str) -> int:
    """Open a regular file of a directory for reading.

    Raises
    ------
    FileNotFoundError
        If it is missing.
    CorruptCheckpointError
        If it is outside the directory, as through a symbolic link, or not a regular file.
    """
    path = os.path.join(folder, name)
    root, real = os.path.realpath(folder), os.path.realpath(path)
    if os.path.commonpath([root, real]) != root:
        raise CorruptCheckpointError(
            f"{path}: the metadata leads to {real}, outside the checkpoint's directory. Copy the file there, or take "
            "an intact copy of the checkpoint"
        )
    try:
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise FileNotFoundError(errno.ENOENT, "the metadata names a file that is missing", path) from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptCheckpointError(f"{path}: not a regular file. Take an intact copy of the checkpoint")
    return fd


def entries(folder: str) -> dict[str, list[tuple[str, int, int]]]:
    """Return name, offset and length of every entry that some metadata in a directory names, by the file's path.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    CorruptCheckpointError
        If metadata is damaged or hostile, or leads out of the directory.
    """
    found: dict[str, list[tuple[str, int, int]]] = {}
    for path in metadata_files(folder):
        with open(path, "rb") as file:
            stored = parse_metadata(file.read(), path).storage_data
        for index, info in stored.items():
            found.setdefault(os.path.join(folder, info.relative_path), []).append((index.fqn, info.offset, info.length))
    for path in found:
        os.close(open_inside(folder, os.path.relpath(path, folder)))
    return {path: sorted(set(places), key=lambda place: place[1:]) for path, places in sorted(found.items())}


def vouched_for(folder: str) -> set[str] | None:
    """Return the names of the files that some metadata in the directory names; None if one cannot be read."""
    names: set[str] = set()
    try:
        for path in metadata_files(folder):
            with open(path, "rb") as file:
                names |= stored_files(file.read(), path)
    except (OSError, CorruptCheckpointError):
        return None
    return names


def check_present(folder: str, infos: Iterable[filesystem._StorageInfo]) -> None:
    """Check that every file that metadata is about to name is there, and long enough.

    Raises
    ------
    SaveError
        If not: another save into the same directory has become its checkpoint meanwhile, and removed it.
    """
    ends: dict[str, int] = {}
    for info in infos:
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = os.path.join(folder, name)
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            raise SaveError(
                f"{path}: this file of the save is gone: another save into the same directory has overtaken it, or "
                "the ranks see different directories. Save to a directory that all ranks share, one save at a time",
                errno.ENOENT,
                path,
            ) from None
        except OSError as exc:
            raise save_error(exc, path, "looking at a file of the save") from exc
        if size < end:
            raise SaveError(f"{path}: the file has {size} bytes, and {end} were written. Save again", errno.EIO, path)


def discard(folder: str, names: Iterable[str]) -> None:
    """Remove the files of a save that failed, if no metadata names them: another rank may just be writing that.

    Never raises an error of the operating system: what cannot be removed now, the next save removes.
    """
    with contextlib.suppress(OSError), locked(folder):
        remove(folder, names)


def remove(folder: str, names: Iterable[str]) -> None:
    """Remove data files that no metadata in the directory names, and temporary files whose writers are dead.

    A file that cannot be removed is no error: it does not count any more.
    """
    doomed = list(names)
    keep = vouched_for(folder) if doomed else set()
    if keep is None:
        return
    for name in doomed:
        temporary = _TEMPORARY.fullmatch(name)
        if temporary:
            paths = publish.stale_temporaries(os.path.join(folder, temporary[1]))
        else:
            paths = [] if name in keep else [os.path.join(folder, name)]
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
