"""What this machine and the file system of a given file offer.

Everything here only asks: no function changes a file, fills the page cache or leaves anything behind.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import stat
import struct
from dataclasses import dataclass
from typing import Union

__all__ = [
    "DirectIO",
    "FileSystem",
    "available_memory",
    "cached_fraction",
    "cpu_count",
    "direct_io",
    "file_system",
    "file_system_type",
    "is_mount_point",
]

PathOrFd = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]", int]

_PAGE = mmap.PAGESIZE
_MACHINE = os.uname().machine
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long

# Where the kernel tells about itself; proc(5) and cgroups(7).
_MEMINFO = "/proc/meminfo"
_MOUNTINFO = "/proc/self/mountinfo"
_CGROUP = "/proc/self/cgroup"


# ---------------------------------------------------------------------------------------------------------------------
# Direct I/O
# ---------------------------------------------------------------------------------------------------------------------

# When the kernel takes O_DIRECT but does not say with which alignment: the largest logical block size in use.
_CONSERVATIVE_ALIGN = 4096

# Types whose files take O_DIRECT, for directories where no unnamed file can be made (NFS, FUSE, most cluster file
# systems lack O_TMPFILE). A network file system may still refuse at the first transfer.
_TAKES_DIRECT = frozenset(
    {
        "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "gfs2", "ocfs2", "nfs", "nfs4", "cifs",
        "smb3", "lustre", "beegfs", "gpfs", "ceph", "fuse", "wekafs",
    }
)  # fmt: skip


@dataclass(frozen=True)
class DirectIO:
    """Whether a file takes ``O_DIRECT``, and what its transfers must be aligned to.

    Attributes
    ----------
    supported : bool
        Whether an open with ``O_DIRECT`` is expected to succeed. Some file systems accept the flag and refuse the first
        transfer, and some accept it and go through the page cache all the same.
    memory_align : int
        Bytes that buffer addresses must be a multiple of; 1 when direct I/O is not supported.
    offset_align : int
        Bytes that file offsets and lengths must be a multiple of; 1 when direct I/O is not supported.
    reason : str
        How this is known, or why direct I/O is not supported.
    """

    supported: bool
    memory_align: int
    offset_align: int
    reason: str


def direct_io(path_or_fd: PathOrFd) -> DirectIO:
    """Tell whether a file takes ``O_DIRECT``, and with which alignment.

    Parameters
    ----------
    path_or_fd : path or int
        An existing file. For a directory, the answer is what a new file in it would get.

    Returns
    -------
    DirectIO
        From ``statx(STATX_DIOALIGN)`` (Linux 6.1, statx(2)) where the file system answers it, else from an open with
        ``O_DIRECT``, with a conservative alignment of 4096 bytes. Never supported for what is not a regular file.

    Raises
    ------
    OSError
        If the file does not exist or cannot be looked up.
    """
    mode = os.stat(path_or_fd).st_mode
    if stat.S_ISDIR(mode):
        return _direct_io_in_directory(path_or_fd)
    if not stat.S_ISREG(mode):
        return _no_direct_io("not a regular file")
    return _direct_io_by_statx(path_or_fd) or _direct_io_by_open(path_or_fd)


def _no_direct_io(reason: str) -> DirectIO:
    return DirectIO(False, 1, 1, reason)


def _direct_io_in_directory(directory: PathOrFd) -> DirectIO:
    flags = os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC
    try:
        if isinstance(directory, int):
            fd = os.open(".", flags, 0o600, dir_fd=directory)
        else:
            fd = os.open(directory, flags, 0o600)
    except OSError as exc:
        kind = file_system_type(directory)
        how = f"no unnamed file could be made there ({os.strerror(exc.errno or 0)}); judged by the file system, {kind}"
        if kind in _TAKES_DIRECT:
            return DirectIO(True, _CONSERVATIVE_ALIGN, _CONSERVATIVE_ALIGN, how)
        return _no_direct_io(how)
    try:
        return _direct_io_by_statx(fd) or _direct_io_by_open(fd)
    finally:
        os.close(fd)


def _direct_io_by_statx(path_or_fd: PathOrFd) -> DirectIO | None:
    answer = _statx(path_or_fd, _STATX_DIOALIGN)
    if answer is None or not answer.mask & _STATX_DIOALIGN:
        return None
    # statx(2): zero means that direct I/O is not supported on this file.
    if not answer.dio_mem_align or not answer.dio_offset_align:
        return _no_direct_io(f"statx: the file system ({file_system_type(path_or_fd)}) has no direct I/O for this file")
    return DirectIO(True, answer.dio_mem_align, answer.dio_offset_align, "statx")


def _direct_io_by_open(path_or_fd: PathOrFd) -> DirectIO:
    # A descriptor is opened anew through /proc: setting O_DIRECT on it would change it for its other users.
    path = f"/proc/self/fd/{path_or_fd}" if isinstance(path_or_fd, int) else path_or_fd
    fault: OSError | None = None
    for access in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.close(os.open(path, access | os.O_DIRECT | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as exc:
            fault = exc
            if exc.errno not in (errno.EACCES, errno.EPERM):
                break
        else:
            how = f"an open with O_DIRECT succeeded; alignment not told, {_CONSERVATIVE_ALIGN} assumed"
            return DirectIO(True, _CONSERVATIVE_ALIGN, _CONSERVATIVE_ALIGN, how)
    assert fault is not None
    kind = file_system_type(path_or_fd)
    return _no_direct_io(f"an open with O_DIRECT failed on {kind}: {os.strerror(fault.errno or 0)}")


# ---------------------------------------------------------------------------------------------------------------------
# statx(2)
# ---------------------------------------------------------------------------------------------------------------------

_STATX_DIOALIGN = 0x2000
_STATX_ATTR_MOUNT_ROOT = 0x2000
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_SYMLINK_NOFOLLOW = 0x100
# For a libc without the wrapper (musl before 1.2.4); architectures that came after 4.11 share the generic number.
_SYS_STATX = {"x86_64": 332, "i686": 383, "armv7l": 397, "ppc64le": 383, "ppc64": 383, "s390x": 379}.get(_MACHINE, 291)


@dataclass(frozen=True)
class _Statx:
    mask: int
    attributes: int
    attributes_mask: int
    dio_mem_align: int
    dio_offset_align: int


def _statx(path_or_fd: PathOrFd, mask: int, flags: int = 0) -> _Statx | None:
    """Ask statx(2); None where it fails or does not exist."""
    buffer = ctypes.create_string_buffer(256)
    if isinstance(path_or_fd, int):
        directory, path, flags = path_or_fd, b"", flags | _AT_EMPTY_PATH
    else:
        directory, path = _AT_FDCWD, os.fsencode(path_or_fd)
    arguments = (ctypes.c_int(directory), ctypes.c_char_p(path), ctypes.c_int(flags), ctypes.c_uint(mask), buffer)
    if hasattr(_LIBC, "statx"):
        failed = _LIBC.statx(*arguments) != 0
    else:
        failed = _LIBC.syscall(ctypes.c_long(_SYS_STATX), *arguments) != 0
    if failed:
        return None
    raw = buffer.raw
    # Offsets in struct statx, linux/stat.h.
    filled, attributes = struct.unpack_from("=I4xQ", raw, 0)
    (attributes_mask,) = struct.unpack_from("=Q", raw, 0x38)
    mem_align, offset_align = struct.unpack_from("=II", raw, 0x98)
    return _Statx(filled, attributes, attributes_mask, mem_align, offset_align)


def is_mount_point(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> bool:
    """Tell whether something is mounted exactly at a path.

    Unlike `os.path.ismount` this also knows single files that are bind-mounted, which containers do, and bind mounts
    within one file system. Symbolic links are not followed.

    Parameters
    ----------
    path : path
        File or directory.

    Returns
    -------
    bool
        False also where the kernel does not tell (before Linux 5.8) or the path does not exist.
    """
    answer = _statx(path, 0, _AT_SYMLINK_NOFOLLOW)
    return answer is not None and bool(answer.attributes & answer.attributes_mask & _STATX_ATTR_MOUNT_ROOT)


# ---------------------------------------------------------------------------------------------------------------------
# Page cache
# ---------------------------------------------------------------------------------------------------------------------

# Added to every architecture (but Alpha, which adds 110) under one number in Linux 6.5.
_SYS_CACHESTAT = 451


def cached_fraction(fd: int, size: int, *, windows: int = 16, window_bytes: int = 1 << 20) -> float:
    """Estimate how much of a file is in the page cache, without reading any of it.

    Parameters
    ----------
    fd : int
        Descriptor of the file, open for reading.
    size : int
        Size of the file in bytes.
    windows : int, optional
        How many evenly spread windows to look at. The first begins with the file and the last ends with it;
        a single one lies in the middle.
    window_bytes : int, optional
        Length of a window in bytes. Files of at most ``windows * window_bytes`` are looked at whole, so the cost does
        not grow with the file.

    Returns
    -------
    float
        Fraction from 0 to 1 of the pages looked at that are cached. From cachestat(2), Linux 6.5, else mincore(2). It
        is 0 where the kernel does not tell: also for a file that the user neither owns nor may write, whose cache state
        the kernel hides (CVE-2019-5489).

    Raises
    ------
    ValueError
        If `windows` or `window_bytes` is not positive.
    """
    if windows < 1 or window_bytes < 1:
        raise ValueError(f"windows and window_bytes must be positive, not {windows} and {window_bytes}")
    ranges = _windows(size, windows, window_bytes)
    total = sum(_pages(length) for _, length in ranges)
    if not total:
        return 0.0
    cached = _count_by_cachestat(fd, ranges)
    if cached is None:
        cached = _count_by_mincore(fd, ranges)
    return min(1.0, (cached or 0) / total)


def _pages(length: int) -> int:
    return -(-length // _PAGE)


def _windows(size: int, windows: int, window_bytes: int) -> list[tuple[int, int]]:
    """Page-aligned ``(offset, length)`` windows, in bytes, ascending, that do not overlap."""
    if size <= 0:
        return []
    length = _pages(window_bytes) * _PAGE
    if size <= windows * length:
        return [(0, size)]
    last = (size - length + _PAGE - 1) // _PAGE * _PAGE
    if windows == 1:
        return [(last // 2 // _PAGE * _PAGE, length)]
    offsets = [last * i // (windows - 1) // _PAGE * _PAGE for i in range(windows)]
    return [(offset, min(length, size - offset)) for offset in offsets]


def _count_by_cachestat(fd: int, ranges: list[tuple[int, int]]) -> int | None:
    """Count cached pages; None where cachestat(2) does not answer."""
    request = (ctypes.c_uint64 * 2)()
    answer = (ctypes.c_uint64 * 5)()  # cached, dirty, writeback, evicted, recently evicted
    cached = 0
    for offset, length in ranges:
        request[0], request[1] = offset, length
        if _LIBC.syscall(ctypes.c_long(_SYS_CACHESTAT), ctypes.c_uint(fd), request, answer, ctypes.c_uint(0)) != 0:
            return None
        cached += answer[0]
    return cached


def _count_by_mincore(fd: int, ranges: list[tuple[int, int]]) -> int | None:
    """Count cached pages; None where mincore(2) does not answer or would not tell the truth."""
    if not _may_know_residency(fd):
        return None
    # The 64-bit off_t version: glibc names it mmap64, musl has no other.
    map_file = _LIBC.mmap64 if hasattr(_LIBC, "mmap64") else _LIBC.mmap
    map_file.restype = ctypes.c_void_p
    failed = ctypes.c_void_p(-1).value
    cached = 0
    for offset, length in ranges:
        resident = ctypes.create_string_buffer(_pages(length))
        size = ctypes.c_size_t(length)
        address = map_file(
            None, size, ctypes.c_int(mmap.PROT_READ), ctypes.c_int(mmap.MAP_SHARED), ctypes.c_int(fd),
            ctypes.c_int64(offset),
        )  # fmt: skip
        if address is None or address == failed:
            return None
        try:
            if _LIBC.mincore(ctypes.c_void_p(address), size, resident) != 0:
                return None
        finally:
            _LIBC.munmap(ctypes.c_void_p(address), size)
        cached += sum(byte & 1 for byte in resident.raw)
    return cached


def _may_know_residency(fd: int) -> bool:
    # mm/mincore.c, can_do_mincore(): to anyone else than an owner or a writer every page is reported as resident.
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            return True
        return os.access(f"/proc/self/fd/{fd}", os.W_OK)
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------------------------
# File systems
# ---------------------------------------------------------------------------------------------------------------------

_IN_MEMORY = frozenset(["tmpfs", "ramfs", "hugetlbfs", "devtmpfs"])

_NETWORK = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "fuse", "9p", "virtiofs", "beegfs", "fhgfs", "gpfs", "ceph",
        "glusterfs", "wekafs", "orangefs", "pvfs2", "afs", "coda", "gfs2", "ocfs2", "panfs", "vboxsf", "vmhgfs", "acfs",
    }
)  # fmt: skip

# Superblock magic numbers, statfs(2) and linux/magic.h. The three ext file systems share one, as do all FUSE file
# systems and virtiofs, as do all versions of NFS.
_MAGICS = {
    0x0000EF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x2FC12FC1: "zfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x958458F6: "hugetlbfs",
    0x794C7630: "overlay",
    0x65735546: "fuse",
    0x00006969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb3",
    0x0000517B: "smbfs",
    0x0BD00BD0: "lustre",
    0x19830326: "beegfs",
    0x47504653: "gpfs",
    0x00C36400: "ceph",
    0x01021997: "9p",
    0x20030528: "orangefs",
    0x5346414F: "afs",
    0x6B414653: "afs",
    0x73757245: "coda",
    0x01161970: "gfs2",
    0x7461636F: "ocfs2",
    0xAAD7AAEA: "panfs",
    0x61636673: "acfs",
    0x786F4256: "vboxsf",
    0xBACBACBC: "vmhgfs",
    0xE0F5E1E2: "erofs",
    0x73717368: "squashfs",
    0x00009660: "iso9660",
    0x0000F15F: "ecryptfs",
    0x00004D44: "vfat",
    0x2011BAB0: "exfat",
    0x7366746E: "ntfs3",
    0x5346544E: "ntfs",
    0x3153464A: "jfs",
    0x00003434: "nilfs2",
    0x00009FA0: "proc",
    0x62656572: "sysfs",
}


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system, as ``/proc/self/mountinfo`` describes it.

    Attributes
    ----------
    type : str
        Such as ``"ext4"`` or ``"fuse.s3fs"``; ``"unknown"`` if it cannot be told.
    mount_point : str
        Directory (or file) that it is mounted at.
    source : str
        Device, server path or other name that it was mounted from.
    options : tuple of str
        Options of this mount, then those of the file system. ``"ro"`` is among them, and ``"rw"`` is not, if either of
        the two is read-only.
    """

    type: str
    mount_point: str
    source: str
    options: tuple[str, ...]

    @property
    def in_memory(self) -> bool:
        """Whether its files live in memory, so that direct I/O has nothing to go around."""
        return self.type in _IN_MEMORY

    @property
    def network(self) -> bool:
        """Whether its files live in another machine or another process, which every FUSE type is taken for."""
        return self.type in _NETWORK or self.type.startswith("fuse.")


@dataclass(frozen=True)
class _Mount:
    device: tuple[int, int]
    root: str
    mount_point: str
    type: str
    source: str
    mount_options: tuple[str, ...]
    super_options: tuple[str, ...]


def file_system(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> FileSystem:
    """Describe the file system that a path is on.

    Parameters
    ----------
    path : path
        Need not exist: then the nearest existing parent counts. Symbolic links are followed.

    Returns
    -------
    FileSystem
        Found by device number first, since a mount point can be hidden under a later mount, then by the longest mount
        point that leads to the path. btrfs and overlayfs files have device numbers that no mount carries; for them
        the mount point alone decides.
    """
    place = os.path.realpath(os.fsdecode(path))
    status: os.stat_result | None = None
    while status is None:
        try:
            status = os.stat(place)
        except OSError:
            parent = os.path.dirname(place)
            if parent == place:
                break
            place = parent
    leading = [mount for mount in _mounts() if _leads_to(mount.mount_point, place)]
    if not leading:
        return FileSystem(file_system_type(place), "/", "", ())
    # The last of equals: it was mounted over the others.
    best = max(enumerate(leading), key=lambda item: (len(item[1].mount_point), item[0]))[1]
    # On some kernels the files of an overlay show the device number of the layer below it.
    if status is not None and best.type != "overlay":
        device = os.major(status.st_dev), os.minor(status.st_dev)
        same = [(len(mount.mount_point), i, mount) for i, mount in enumerate(leading) if mount.device == device]
        if same:
            best = max(same, key=lambda item: item[:2])[2]
    options = best.mount_options + tuple(o for o in best.super_options if o not in best.mount_options)
    if "ro" in options:
        options = tuple(o for o in options if o != "rw")
    return FileSystem(best.type, best.mount_point, best.source, options)


def _leads_to(mount_point: str, path: str) -> bool:
    return path == mount_point or path.startswith(mount_point.rstrip("/") + "/")


def _mounts(types: tuple[str, ...] = ()) -> list[_Mount]:
    """Mounts, all or of some types, in the order of mounting; empty without /proc."""
    mounts = []
    # Not splitlines(), which also splits at what a mount point may contain, such as a form feed.
    for line in _read_text(_MOUNTINFO).split("\n"):
        # proc_pid_mountinfo(5): id parent major:minor root point options optional... - type source super-options
        left, separator, right = line.partition(" - ")
        if types and not right.startswith(types):
            continue
        head, tail = left.split(" "), right.split(" ")
        if not separator or len(head) < 6 or len(tail) < 2:
            continue
        major, _, minor = head[2].partition(":")
        if not (major.isdecimal() and minor.isdecimal()):
            continue
        mounts.append(
            _Mount(
                device=(int(major), int(minor)),
                root=_unescape(head[3]),
                mount_point=_unescape(head[4]),
                type=tail[0],
                source=_unescape(tail[1]),
                mount_options=tuple(head[5].split(",")),
                super_options=tuple(filter(None, " ".join(tail[2:]).split(","))),
            )
        )
    return mounts


def _unescape(field: str) -> str:
    # The kernel writes space, tab, newline and backslash as three octal digits.
    if "\\" not in field:
        return field
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return os.fsdecode(file.read())
    except OSError:
        return ""


def file_system_type(path_or_fd: PathOrFd) -> str:
    """Name the type of the file system that an existing file is on, in microseconds.

    Parameters
    ----------
    path_or_fd : path or int
        An existing file or directory.

    Returns
    -------
    str
        By the magic number of statfs(2), which cannot tell apart the three ext file systems (``"ext4"``), the
        versions of NFS (``"nfs"``), and all that comes through FUSE or virtiofs (``"fuse"``). `file_system` can.
        ``"unknown"`` if the number is not known or the file does not exist.
    """
    buffer = ctypes.create_string_buffer(256)
    if isinstance(path_or_fd, int):
        failed = _LIBC.fstatfs(ctypes.c_int(path_or_fd), buffer) != 0
    else:
        failed = _LIBC.statfs(ctypes.c_char_p(os.fsencode(path_or_fd)), buffer) != 0
    if failed:
        return "unknown"
    # f_type comes first: an int on s390x, a long elsewhere, whose upper half a 32-bit magic may fill with its sign.
    code = "=I" if _MACHINE == "s390x" else "@L"
    return _MAGICS.get(struct.unpack_from(code, buffer.raw)[0] & 0xFFFFFFFF, "unknown")


# ---------------------------------------------------------------------------------------------------------------------
# Memory and processors
# ---------------------------------------------------------------------------------------------------------------------


def available_memory() -> int:
    """Tell how much memory can still be used without swapping.

    Returns
    -------
    int
        Bytes: ``MemAvailable`` of proc_meminfo(5), or less where a cgroup (v1 or v2) of this process or one above it
        has less left under its limit. Inactive page cache of a cgroup counts as free: the kernel gives it up first.
    """
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _read_text(_MEMINFO), re.MULTILINE)
    available = int(match.group(1)) * 1024 if match else os.sysconf("SC_AVPHYS_PAGES") * _PAGE
    for directory, version in _cgroups("memory"):
        if version == 2:
            limit, usage, inactive = "memory.max", "memory.current", "inactive_file"
        else:
            limit, usage, inactive = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        most, used = _read_int(directory, limit), _read_int(directory, usage)
        if most is None or used is None or most - used >= available:
            continue
        match = re.search(rf"^{inactive} (\d+)", _read_text(os.path.join(directory, "memory.stat")), re.MULTILINE)
        used -= min(used, int(match.group(1)) if match else 0)
        available = min(available, max(0, most - used))
    return available


def cpu_count() -> int:
    """Tell how many processors this process may use at once.

    Returns
    -------
    int
        At least 1: the size of the scheduling affinity, or the processor quota (rounded up) of a cgroup, v1 or v2, of
        this process or one above it, whichever is less.
    """
    count = len(os.sched_getaffinity(0))
    for directory, version in _cgroups("cpu"):
        quota: int | None
        period: int | None
        if version == 2:
            fields = _read_text(os.path.join(directory, "cpu.max")).split()
            told = len(fields) == 2 and fields[0] != "max"
            quota, period = (int(fields[0]), int(fields[1])) if told else (None, None)
        else:
            quota, period = _read_int(directory, "cpu.cfs_quota_us"), _read_int(directory, "cpu.cfs_period_us")
        # Version 1 writes -1 for no quota.
        if quota is not None and period is not None and quota > 0 and period > 0:
            count = min(count, -(-quota // period))
    return max(1, count)


def _read_int(directory: str, name: str) -> int | None:
    text = _read_text(os.path.join(directory, name)).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _cgroups(controller: str) -> list[tuple[str, int]]:
    """Directories, each with its cgroup version, of this process' cgroups and those above them that it can see."""
    paths: dict[int, str] = {}
    for line in _read_text(_CGROUP).splitlines():
        # cgroups(7): hierarchy:controllers:path, with no controllers for version 2
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" and hierarchy == "0":
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    directories = []
    for mount in _mounts(("cgroup ", "cgroup2 ")) if paths else []:
        version = {"cgroup2": 2, "cgroup": 1}.get(mount.type, 0)
        if version not in paths or (version == 1 and controller not in mount.super_options):
            continue
        below = paths[version]
        if mount.root != "/":
            # A container may see only its own part of the hierarchy, mounted at the top.
            below = below[len(mount.root) :] if _leads_to(mount.root, below) else ""
        parts = [part for part in below.split("/") if part]
        if ".." in parts:
            parts = []
        for depth in range(len(parts), -1, -1):
            directories.append((os.path.join(mount.mount_point, *parts[:depth]), version))
    return directories
