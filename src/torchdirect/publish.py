"""Making a finished file visible at its path: all of it or nothing.

The data goes into a hidden temporary file beside the target. Publication is then

1. ``fdatasync`` of the temporary file: the data is on storage before any name leads to it;
2. ``rename`` over the target: atomic, readers see the old file or the new one, rename(2);
3. ``fsync`` of the directory: the name itself is on storage, fsync(2).

A process that dies before step 2 leaves the old file whole and a temporary file behind, which the next publication to
the same target removes. It knows by flock(2): a living writer holds a lock on its temporary file.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from torchdirect.errors import SaveError, save_error
from torchdirect.system import file_system_type, is_mount_point

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Replacement", "is_replaceable", "replacing", "stale_temporaries"]

_SUFFIX = ".tmp-torchdirect"
_MAX_LINKS = 40  # path_resolution(7)
_MAX_NAME = 255

# File systems whose locks all possible writers share, since all are under this kernel. On others (NFS with local_lock,
# Lustre with localflock, most of FUSE) a lock may be unknown to other machines.
_LOCAL = frozenset({"ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "tmpfs", "ramfs", "overlay", "jfs", "nilfs2"})

# Extended attributes that speak of the old file's contents, or that the kernel itself drops when contents change.
_CONTENT_XATTRS = frozenset({"security.ima", "security.evm", "security.capability"})
_ACCESS_ACL = "system.posix_acl_access"

_LIBC = ctypes.CDLL(None, use_errno=True)


def replacing(path: str | os.PathLike[str], *, durable: bool) -> Replacement:
    """Begin to write a file that shall take the place of `path` once it is whole.

    Parameters
    ----------
    path : path
        Where the file shall be. A symbolic link stays one: the file that it leads to is replaced, or made. Of several
        hard links only this one leads to the new file.
    durable : bool
        Whether `Replacement.commit` waits until data and name are on storage. Without, a crash of the process still
        leaves the old file or the new one, but a crash of the machine may lose both.

    Returns
    -------
    Replacement
        A context manager. Nothing has happened yet; entering it makes the temporary file.

    Examples
    --------
    >>> with replacing("model.pt", durable=True) as new:  # doctest: +SKIP
    ...     os.pwrite(new.fd, data, 0)
    ...     new.commit()
    """
    return Replacement(path, durable=durable)


def is_replaceable(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is for `replacing`, or must be written in place.

    Parameters
    ----------
    path : path
        Need not exist.

    Returns
    -------
    bool
        False for what a rename would destroy or cannot replace: devices, pipes, sockets, open files named through
        ``/proc`` (as ``/dev/stdout`` and ``/dev/fd/3`` are), and single files that something is mounted on, as
        containers do. True for all else, including paths for which `replacing` will raise.
    """
    try:
        target = _resolve(os.fsdecode(path))
        status = os.stat(target)
    except _ProcessLinkError:
        return False
    except (OSError, ValueError):
        return True
    if stat.S_ISDIR(status.st_mode):
        return True
    return stat.S_ISREG(status.st_mode) and not is_mount_point(target)


def stale_temporaries(target: str | os.PathLike[str]) -> list[str]:
    """List the temporary files for a target whose writers are dead.

    Parameters
    ----------
    target : path
        As for `replacing`.

    Returns
    -------
    list of str
        Absolute paths, sorted. Empty too where the directory cannot be listed. On a file system that other machines may
        share, only files that this machine made since it was started count.
    """
    try:
        resolved = _resolve(os.fsdecode(target))
    except OSError:
        return []
    stale = []
    for temporary in _temporaries(resolved):
        fd = _claim(temporary)
        if fd is not None:
            os.close(fd)
            stale.append(temporary)
    return sorted(stale)


class Replacement:
    """A file in the making, made by `replacing`. Use it in a ``with`` statement, once.

    Without `commit`, leaving the block removes the temporary file, and the old file is untouched. Either way all
    descriptors are closed.

    Attributes
    ----------
    path : str
        What the user named.
    target : str
        Absolute path of the file that it stands for, with symbolic links followed.
    temporary : str
        Absolute path of the temporary file, in the same directory.
    fd : int
        Buffered descriptor of the temporary file, for reading and writing; -1 outside of the block.
    """

    def __init__(self, path: str | os.PathLike[str], *, durable: bool) -> None:
        self.path = os.fsdecode(path)
        self.target = ""
        self.temporary = ""
        self.fd = -1
        self._durable = durable
        self._direct_fd = -1
        self._old: _Attributes | None = None
        self._mode: int | None = None
        self._entered = False
        self._commit_begun = False
        self._committed = False

    def __enter__(self) -> Self:
        """Make the temporary file, and remove those for the same target whose writers are dead.

        Raises
        ------
        SaveError
            Of the class that suits the fault, if the file cannot be made, or if the existing one may not be written, is
            not a regular file, or could not be replaced later on.
        """
        if self._entered:
            raise RuntimeError(f"{self.path}: a Replacement can be entered once only; call replacing() again")
        self._entered = True
        doing = "finding the file to write"
        try:
            self.target = _resolve(self.path)
            doing = "checking the existing file"
            self._old = _inspect(self.target, self.path)
            doing = "removing temporary files of writers that died"
            _remove_stale(self.target)
            doing = f"making a temporary file in {os.path.dirname(self.target)!r}"
            self._create()
        except OSError as exc:
            self._discard()
            raise save_error(exc, self.path, doing, self._remedy(exc)) from exc
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._discard()

    def open_direct(self) -> int | None:
        """Open the temporary file once more, with ``O_DIRECT``.

        Returns
        -------
        int or None
            A descriptor for reading and writing, the same at every call, which leaving the block closes. None if the
            file system refuses ``O_DIRECT``. One that accepts it here may still refuse the first transfer, open(2).

        Raises
        ------
        SaveError
            If it fails for another reason.
        """
        self._require_open()
        if self._direct_fd < 0:
            # By the open file, not by its name, so without O_NOFOLLOW: libcufile refuses descriptors with that flag.
            try:
                self._direct_fd = self._open_again(os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as exc:
                if exc.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    return None
                raise save_error(exc, self.path, "opening the temporary file for direct I/O") from exc
        return self._direct_fd

    def _open_again(self, flags: int) -> int:
        try:
            return os.open(f"/proc/self/fd/{self.fd}", flags)
        except FileNotFoundError:  # no /proc: then there is no libcufile either, whose rule this is for
            return os.open(self.temporary, flags | os.O_NOFOLLOW)

    def reserve(self, nbytes: int) -> bool:
        """Set storage aside for the whole file, and make it that long, so that a full disk shows before the work.

        Parameters
        ----------
        nbytes : int
            Final length of the file in bytes. The reserved bytes read as zeros until they are written.

        Returns
        -------
        bool
            False where the file system cannot reserve, and nothing happened.

        Raises
        ------
        SaveError
            If there is not that much space (``ENOSPC``, ``EDQUOT``), or files may not be that long (``EFBIG``).
        """
        self._require_open()
        if nbytes < 0:
            raise ValueError(f"{self.path}: cannot reserve a negative number of bytes, {nbytes}")
        if nbytes == 0:
            return True
        # Before the attempt, which may keep what it got until the file is removed.
        status = os.fstatvfs(self.fd)
        free = status.f_bavail * status.f_frsize
        try:
            _fallocate(self.fd, nbytes)
        except OSError as exc:
            if exc.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                return False
            where = os.path.dirname(self.target)
            doing = f"reserving {nbytes} bytes ({free} bytes are free in {where!r})"
            raise save_error(exc, self.path, doing) from exc
        return True

    def commit(self) -> None:
        """Publish the file: from here on, `path` leads to it.

        The file has the permissions, the owner and the extended attributes of the one that it replaces, as far as this
        user may give them, or those of any new file.

        Raises
        ------
        SaveError
            If the data could not be brought to storage, or the file not renamed: the old file is still there. If only
            the last step fails, syncing the directory, the message says that the new file is in place already.
        """
        self._require_open()
        if self._commit_begun:
            # After a failed sync the kernel counts the lost pages as clean, and a second one would succeed.
            raise RuntimeError(f"{self.path}: commit() can be called once only; call replacing() again")
        self._commit_begun = True
        directory = os.path.dirname(self.target)
        directory_fd = old_fd = -1
        doing = "setting the permissions of the new file"
        try:
            try:
                self._set_attributes()
                if self._durable:
                    doing = "bringing the data to storage (fdatasync)"
                    os.fdatasync(self.fd)
                    # Opened before the rename, so that a failure still leaves the old file.
                    doing = f"opening directory {directory!r} to sync it"
                    directory_fd = _open_directory(directory)
                else:
                    # NFS reports faults of earlier writes when a descriptor is closed, close(2): any descriptor.
                    doing = "writing the data"
                    os.close(os.dup(self.fd))
                if self._durable and self._old is not None:
                    # A file dies with its last reference. Held until the names are on storage, the old one does not
                    # make that wait for its blocks to be freed, which takes long for a large file.
                    with contextlib.suppress(OSError):
                        old_fd = os.open(self.target, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
                doing = "renaming the temporary file over it"
                os.rename(self.temporary, self.target)
                self._committed = True
            except OSError as exc:
                doing += "; the previous file, if any, is unchanged"
                raise save_error(exc, self.path, doing, self._remedy(exc)) from exc
            if self._durable:
                try:
                    _sync_directory(directory_fd, self.fd)
                except OSError as exc:
                    doing = f"syncing directory {directory!r}; the new file is in place, but may not survive a crash"
                    raise save_error(exc, self.path, doing) from exc
        finally:
            for fd in (directory_fd, old_fd):
                if fd >= 0:
                    os.close(fd)

    def _require_open(self) -> None:
        if self.fd < 0:
            raise RuntimeError(f"{self.path}: the file is not open; use replacing() in a with statement")

    def _remedy(self, exc: OSError) -> str:
        directory = os.path.dirname(self.target or self.path)
        if exc.errno in (errno.EACCES, errno.EPERM):
            return (
                f"Replacing a file atomically needs write permission for directory {directory!r} and for the file "
                "itself; change the permissions or save to another place"
            )
        if exc.errno == errno.ENOENT and self.temporary:
            return "Save again, and let no one remove the temporary file or its directory meanwhile"
        if exc.errno == errno.ENOENT and directory:
            return f"Create directory {directory!r} first"
        if isinstance(exc, _ProcessLinkError):
            return "It leads to a file that is open already; write to that as to a stream"
        return ""

    def _create(self) -> None:
        """Create the temporary file and lock it."""
        # A new file gets what open(2) with 0o666 gives: the umask (which cannot be read without changing it) or the
        # directory's default ACL. One that replaces another must not be more readable than that, even for a moment.
        mode = 0o666 if self._old is None else 0o600
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(100):
            self.temporary = _temporary_path(self.target)
            try:
                self.fd = os.open(self.temporary, flags, mode)
            except FileExistsError:
                # Not ours to remove.
                self.temporary = ""
                continue
            _made_here.add(self)
            if _lock_new(self.fd):
                break
            # Another process took it for stale, between its creation and its lock, and has removed it.
            self._discard()
        else:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.target)
        if self._old is None:
            # A umask may deny the owner what open_direct needs.
            made = stat.S_IMODE(os.fstat(self.fd).st_mode)
            if made & 0o600 != 0o600:
                self._mode = made
                os.fchmod(self.fd, made | 0o600)

    def _set_attributes(self) -> None:
        if self._old is not None:
            self._old.apply(self.fd)
        elif self._mode is not None:
            os.fchmod(self.fd, self._mode)

    def _discard(self) -> None:
        """Remove the temporary file unless it was published, and close all descriptors. Never raises."""
        # Removed before it is closed: a file without a lock is anyone's.
        if self.temporary and not self._committed:
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)
        self._close()

    def _close(self) -> None:
        _made_here.discard(self)
        descriptors = self._direct_fd, self.fd
        self._direct_fd = self.fd = -1
        for fd in descriptors:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _disinherit(self) -> None:
        """Leave the file to the parent process: a child neither publishes nor removes it, nor keeps its blocks in use.

        Without this a child would hold the blocks, and the lock, of a file that its parent was writing when it forked.
        """
        self.temporary = ""
        self._close()


_made_here: set[Replacement] = set()
"""Those of this process that are open."""


def _disinherit_all() -> None:
    for replacement in list(_made_here):
        replacement._disinherit()


os.register_at_fork(after_in_child=_disinherit_all)


# ---------------------------------------------------------------------------------------------------------------------
# The target
# ---------------------------------------------------------------------------------------------------------------------


class _ProcessLinkError(OSError):
    """The path leads through a link of /proc to an open file, which need not have a name."""


def _resolve(path: str) -> str:
    """Follow symbolic links, also the last one, and also if it dangles. The directory must exist."""
    current = path
    for _ in range(_MAX_LINKS + 1):
        directory, name = os.path.split(current)
        if not current:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if name in ("", ".", ".."):
            os.stat(current)
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        directory = os.path.realpath(directory or ".", strict=True)
        target = os.path.join(directory, name)
        try:
            link = os.readlink(target)
        except FileNotFoundError:
            return target
        except OSError as exc:
            if exc.errno == errno.EINVAL:  # readlink(2): not a symbolic link
                return target
            raise
        if file_system_type(directory) == "proc":
            raise _ProcessLinkError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        current = os.path.join(directory, link)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _inspect(target: str, path: str) -> _Attributes | None:
    """Look at the file to replace; None if there is none. Refuses now what the rename would refuse after the work."""
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    if not stat.S_ISREG(status.st_mode):
        raise SaveError(
            f"{path}: is not a regular file, and must not be replaced by one. Write to it as to a stream.",
            errno.EOPNOTSUPP,
            path,
        )
    if is_mount_point(target):
        raise SaveError(
            f"{path}: something is mounted on this single file, so it cannot be replaced. Mount its directory instead, "
            "or save to another name.",
            errno.EBUSY,
            path,
        )
    if not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        read_only = os.statvfs(target).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number), target)
    parent = os.stat(os.path.dirname(target))
    # rename(2): in a sticky directory only the owner of the file or of the directory may replace a file.
    if parent.st_mode & stat.S_ISVTX and os.geteuid() not in (0, status.st_uid, parent.st_uid):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), target)
    return _Attributes.of(target, status)


@dataclass(frozen=True)
class _Attributes:
    """What a file keeps when its contents are replaced."""

    mode: int
    uid: int
    gid: int
    xattrs: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> _Attributes:
        # As a write would, the kernel clears set-user-ID and set-group-ID, so they are not kept.
        mode = stat.S_IMODE(status.st_mode) & ~(stat.S_ISUID | stat.S_ISGID)
        xattrs = []
        with contextlib.suppress(OSError):
            for name in os.listxattr(path):
                if name not in _CONTENT_XATTRS:
                    with contextlib.suppress(OSError):
                        xattrs.append((name, os.getxattr(path, name)))
        return cls(mode, status.st_uid, status.st_gid, tuple(xattrs))

    def apply(self, fd: int) -> None:
        """Give them to another file, as far as this user may."""
        mode = self.mode
        status = os.fstat(fd)
        if (status.st_uid, status.st_gid) != (self.uid, self.gid):
            try:
                os.fchown(fd, self.uid, self.gid)
            except OSError:
                try:
                    os.fchown(fd, -1, self.gid)
                except OSError:
                    # Another group must not read what only the old group could: it gets what everybody has.
                    mode = mode & ~0o070 | (mode & 0o007) << 3
        if _ACCESS_ACL not in dict(self.xattrs):
            # The directory's default ACL may have given one, which the mode set below would make effective.
            with contextlib.suppress(OSError):
                os.removexattr(fd, _ACCESS_ACL)
        for name, value in self.xattrs:
            with contextlib.suppress(OSError):
                os.setxattr(fd, name, value)
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            # Some file systems have no modes to set; the file then stays as private as it is.
            with contextlib.suppress(OSError):
                os.fchmod(fd, mode)


# ---------------------------------------------------------------------------------------------------------------------
# Temporary files
# ---------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _boot_token() -> str:
    """Eight hexadecimal digits that name this kernel from its start to its end."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
    except OSError:
        boot = os.uname().nodename.encode()
    return hashlib.sha256(boot).hexdigest()[:8]


def _prefix(target: str) -> str:
    name = os.fsencode(os.path.basename(target))
    room = _MAX_NAME - len(f"..{'0' * 24}{_SUFFIX}")
    if len(name) > room:
        # The digest keeps long names with the same beginning apart.
        digest = hashlib.sha256(name).hexdigest()[:16]
        short = name[: room - len(digest) - 1]
        with contextlib.suppress(UnicodeDecodeError):
            # Some file systems refuse names that are not valid UTF-8: no half character at the cut.
            name.decode()
            short = short.decode(errors="ignore").encode()
        name = short + b"-" + digest.encode()
    return f".{os.fsdecode(name)}."


def _temporary_path(target: str) -> str:
    name = f"{_prefix(target)}{_boot_token()}{secrets.token_hex(8)}{_SUFFIX}"
    return os.path.join(os.path.dirname(target), name)


def _temporaries(target: str) -> list[str]:
    """Paths of all temporary files for a target, of the living and of the dead."""
    directory, prefix = os.path.dirname(target), _prefix(target)
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [
        os.path.join(directory, name)
        for name in names
        if name.startswith(prefix) and re.fullmatch(rf"[0-9a-f]{{24}}{re.escape(_SUFFIX)}", name[len(prefix) :])
    ]


def _lock_new(fd: int) -> bool:
    """Lock a file just created. False if another process has removed it, or is about to."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # No locks here: then no one can take the file for stale either.
        return True
    return os.fstat(fd).st_nlink > 0


def _claim(temporary: str) -> int | None:
    """Lock a temporary file whose writer is dead; None if it lives, or that cannot be told."""
    token = temporary[: -len(_SUFFIX)][-24:]
    if file_system_type(os.path.dirname(temporary)) not in _LOCAL and token[:8] != _boot_token():
        return None
    try:
        # For writing: NFS makes a lock on a byte range of it, which needs that.
        fd = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It may have been published, or removed, since the directory was listed.
        ours, named = os.fstat(fd), os.lstat(temporary)
        if stat.S_ISREG(ours.st_mode) and (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _remove_stale(target: str) -> None:
    for temporary in _temporaries(target):
        fd = _claim(temporary)
        if fd is not None:
            try:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            finally:
                os.close(fd)


# ---------------------------------------------------------------------------------------------------------------------
# Storage
# ---------------------------------------------------------------------------------------------------------------------


def _fallocate(fd: int, nbytes: int) -> None:
    # Not os.posix_fallocate: where the file system cannot, glibc writes to every block instead, posix_fallocate(3).
    call = _LIBC.fallocate64 if hasattr(_LIBC, "fallocate64") else _LIBC.fallocate
    while call(ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def _open_directory(directory: str) -> int:
    """Open a directory for syncing; -1 if it may be written and searched but not read."""
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return -1


def _sync_directory(directory_fd: int, file_fd: int) -> None:
    if directory_fd < 0:
        # Second best: the journals of ext4 and XFS commit the rename along with the file that it changed.
        os.fsync(file_fd)
        return
    try:
        os.fsync(directory_fd)
    except OSError as exc:
        # fsync(2): the file system does not sync directories, and has its own way with names.
        if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
