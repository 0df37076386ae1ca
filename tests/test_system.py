"""What the machine and the file systems offer, on real mounts where one is needed."""

from __future__ import annotations

import errno
import functools
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdirect import system
from torchdirect.system import (
    FileSystem,
    available_memory,
    cached_fraction,
    cpu_count,
    direct_io,
    file_system,
    file_system_type,
    is_mount_point,
)

SRC = str(Path(system.__file__).parents[1])
MIB = 1 << 20
PAGE = mmap.PAGESIZE


@functools.cache
def _mounts_permitted() -> bool:
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def in_mount_namespace(setup: str, code: str) -> Any:
    """Run shell `setup`, then Python `code` that prints JSON, in a private mount namespace."""
    if os.geteuid() != 0 or not _mounts_permitted():
        pytest.skip("needs root and the right to mount")
    # The modules are loaded from their files, since importing the package imports torch, which takes seconds.
    prelude = (
        "import sys, types, json, os\n"
        "package = types.ModuleType('torchdirect'); package.__path__ = [sys.argv[1] + '/torchdirect']\n"
        "sys.modules['torchdirect'] = package\n"
        "from torchdirect.system import *\n"
    )
    script = f'{setup} || exit 77\nexec "$0" -c "$1" "$2"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, prelude + code, SRC]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- direct I/O


def test_direct_io_of_a_file_can_be_used_as_told(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 8192)
    answer = direct_io(path)
    if not answer.supported:
        pytest.skip(answer.reason)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 2 * PAGE) as memory:
            view = memoryview(memory)[answer.memory_align % PAGE :][: answer.offset_align]
            assert os.preadv(fd, [view], answer.offset_align) == answer.offset_align
            view.release()
    finally:
        os.close(fd)


def test_direct_io_of_directory_is_that_of_a_file_in_it_and_leaves_nothing(tmp_path: Path) -> None:
    before = direct_io(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").write_bytes(b"x" * 4096)
    assert direct_io(tmp_path / "a") == before
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert direct_io(fd) == before
    finally:
        os.close(fd)


def test_direct_io_by_descriptor_leaves_it_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_statx", lambda *_: None)
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        answer = direct_io(fd)
        assert answer.supported is direct_io(tmp_path / "a").supported
        if answer.supported:
            assert (answer.memory_align, answer.offset_align) == (4096, 4096)
        os.pwrite(fd, b"odd", 1)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("filled", "aligns", "supported"), [(0x2000, (4, 512), True), (0x2000, (0, 0), False), (0, (4, 512), None)]
)
def test_statx_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: Any, aligns: Any, supported: Any
) -> None:
    answer = system._Statx(filled, 0, 0, *aligns)
    monkeypatch.setattr(system, "_statx", lambda *_: answer)
    monkeypatch.setattr(system, "_direct_io_by_open", lambda _: "asked open")
    (tmp_path / "a").touch()
    got: Any = direct_io(tmp_path / "a")
    if supported is None:
        assert got == "asked open"
    else:
        assert got.supported is supported
        assert (got.memory_align, got.offset_align) == (aligns if supported else (1, 1))


def test_statx_by_raw_call_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        syscall = system._LIBC.syscall

    known = system._statx(tmp_path, 0x2000)
    assert known is not None and known.mask
    monkeypatch.setattr(system, "_LIBC", Bare)
    assert system._statx(tmp_path, 0x2000) == known


def test_refused_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise OSError(errno.EINVAL, "no")

    (tmp_path / "a").touch()
    monkeypatch.setattr(system, "_statx", lambda *_: None)
    monkeypatch.setattr(os, "open", refuse)
    answer = direct_io(tmp_path / "a")
    assert not answer.supported and "Invalid argument" in answer.reason


@pytest.mark.parametrize(("kind", "supported"), [("nfs", True), ("9p", False), ("unknown", False)])
def test_directory_without_unnamed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, supported: Any
) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(system, "file_system_type", lambda _: kind)
    assert direct_io(tmp_path).supported is supported


def test_not_regular_and_missing(tmp_path: Path) -> None:
    assert not direct_io("/dev/null").supported
    os.mkfifo(tmp_path / "fifo")
    assert not direct_io(tmp_path / "fifo").supported
    with pytest.raises(FileNotFoundError):
        direct_io(tmp_path / "missing")


def test_ramfs_refuses_direct_io(tmp_path: Path) -> None:
    code = (
        "d = sys.argv[1]; p = os.environ['M']; open(p + '/f', 'w').close()\n"
        "print(json.dumps([direct_io(p).supported, direct_io(p + '/f').supported, direct_io(p + '/f').reason,"
        " file_system(p + '/f').type, file_system(p).in_memory, file_system_type(p), os.listdir(p)]))"
    )
    supported, of_file, reason, kind, in_memory, fast, names = in_mount_namespace(
        f"export M={tmp_path}; mount -t ramfs none {tmp_path}", code
    )
    assert (supported, of_file, kind, in_memory, fast) == (False, False, "ramfs", True, "ramfs")
    assert "ramfs" in reason
    assert names == ["f"]


# ---- page cache


@pytest.fixture
def file_of_8_mib(tmp_path: Path) -> Any:
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(fd, b"x" * (8 * MIB), 0)
    os.fsync(fd)
    yield fd
    os.close(fd)


@pytest.fixture(params=["cachestat", "mincore"])
def counter(request: Any, monkeypatch: pytest.MonkeyPatch, file_of_8_mib: Any) -> Any:
    if request.param == "mincore":
        monkeypatch.setattr(system, "_count_by_cachestat", lambda *_: None)
    elif system._count_by_cachestat(file_of_8_mib, [(0, 1)]) is None:
        pytest.skip("no cachestat(2)")
    return request.param


def test_cached_fraction(file_of_8_mib: Any, counter: Any) -> None:
    fd, size = file_of_8_mib, 8 * MIB
    assert cached_fraction(fd, size) == 1.0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_fraction(fd, size):
        pytest.skip("this file system does not drop its cache on request")
    assert cached_fraction(fd, size) == 0.0, "asking must not fill the cache"
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 2 * MIB, 0)
    assert 0.25 <= cached_fraction(fd, size) < 0.5
    assert cached_fraction(fd, size, windows=4, window_bytes=PAGE) == 0.25


def test_cached_fraction_of_a_huge_sparse_file(file_of_8_mib: Any, counter: Any) -> None:
    os.ftruncate(file_of_8_mib, 1 << 40)
    assert 0.0 < cached_fraction(file_of_8_mib, 1 << 40) < 0.1


def test_cached_fraction_never_raises(tmp_path: Path) -> None:
    read, write = os.pipe()
    try:
        assert cached_fraction(read, 4096) == 0.0
        assert cached_fraction(read, 0) == 0.0
    finally:
        os.close(read)
        os.close(write)
    assert cached_fraction(read, 4096) == 0.0
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert cached_fraction(fd, 4096) == 0.0
    finally:
        os.close(fd)
    with pytest.raises(ValueError, match="positive"):
        cached_fraction(0, 1, windows=0)


def test_no_mincore_where_the_kernel_would_lie(file_of_8_mib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_count_by_cachestat", lambda *_: None)
    monkeypatch.setattr(system, "_may_know_residency", lambda _: False)
    assert cached_fraction(file_of_8_mib, 8 * MIB) == 0.0


@given(st.integers(0, 1 << 44), st.integers(1, 40), st.integers(1, 4 * MIB))
def test_windows(size: Any, windows: Any, window_bytes: Any) -> None:
    ranges = system._windows(size, windows, window_bytes)
    assert len(ranges) <= windows
    assert sum(length for _, length in ranges) <= windows * (window_bytes + PAGE)
    end = 0
    for offset, length in ranges:
        assert offset % PAGE == 0 and length > 0 and offset >= end
        end = offset + length
    assert end <= size
    if size and windows > 1:
        assert ranges[0][0] == 0 and end == size
    if 0 < size <= windows * window_bytes:
        assert ranges == [(0, size)]


# ---- file systems


def test_real_file_system(tmp_path: Path) -> None:
    here = file_system(tmp_path)
    assert here == file_system(tmp_path / "not" / "yet" / "there")
    assert os.path.realpath(tmp_path).startswith(here.mount_point)
    assert file_system("/proc/self/status").type == "proc"
    assert file_system_type("/proc") == "proc"
    assert file_system_type(tmp_path / "missing") == "unknown"
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert file_system_type(fd) == file_system_type(tmp_path) == file_system_type(os.fsencode(tmp_path))
    finally:
        os.close(fd)


def test_symbolic_link_leads_to_the_file_system_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/self")
    (tmp_path / "dangling").symlink_to("/proc/no-such-entry")
    assert file_system(tmp_path / "link").type == "proc"
    assert file_system(tmp_path / "dangling").type == "proc"


def mountinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *lines: Any) -> Any:
    (tmp_path / "mountinfo").write_bytes("\n".join(lines).encode() + b"\n")
    monkeypatch.setattr(system, "_MOUNTINFO", str(tmp_path / "mountinfo"))


def device_of(path: Any) -> Any:
    number = os.stat(path).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def test_mountinfo_escapes_and_optional_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a b\\c"
    place.mkdir()
    escaped = str(place).replace("\\", "\\134").replace(" ", "\\040")
    line = f"1 0 {device_of(place)} / {escaped} ro,relatime shared:1 master:2 - nfs4 host:/x\\040y rw,vers=4.2"
    mountinfo(monkeypatch, tmp_path, "0 0 0:1 / / rw - rootfs rootfs rw", line, "torn line")
    assert file_system(place / "f") == FileSystem("nfs4", str(place), "host:/x y", ("ro", "relatime", "vers=4.2"))
    assert file_system("/").type == "rootfs"


def test_device_number_decides_over_a_hidden_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    lines = [
        "1 0 0:9999 / / rw - rootfs rootfs rw",
        f"2 1 0:9998 / {tmp_path}/x rw - xfs hidden rw",
        f"3 1 {device_of(tmp_path)} / {tmp_path} rw - ext4 on-top rw",
    ]
    mountinfo(monkeypatch, tmp_path, *lines)
    assert file_system(tmp_path / "x").source == "on-top"


def test_longest_prefix_decides_without_a_device_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "database").mkdir()
    lines = [
        "1 0 0:9999 / / rw - rootfs rootfs rw",
        f"2 1 0:9998 /@ {tmp_path}/data rw - btrfs first rw,subvol=/@",
        f"3 1 0:9997 / {tmp_path}/data rw - btrfs second rw",
    ]
    mountinfo(monkeypatch, tmp_path, *lines)
    assert file_system(tmp_path / "data").source == "second", "the later of two on one mount point"
    assert file_system(tmp_path / "database").type == "rootfs", "a prefix of characters is not one of directories"


def test_overlay_with_the_device_number_of_its_lower_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"1 0 {device_of(tmp_path)} / / rw - ext4 disk rw", f"2 1 0:9998 / {tmp_path} rw - overlay overlay rw"]
    mountinfo(monkeypatch, tmp_path, *lines)
    assert file_system(tmp_path).type == "overlay"


def test_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_MOUNTINFO", str(tmp_path / "missing"))
    assert file_system(tmp_path) == FileSystem(file_system_type(tmp_path), "/", "", ())


@pytest.mark.parametrize(
    ("kind", "in_memory", "network"),
    [
        ("ext4", False, False),
        ("tmpfs", True, False),
        ("hugetlbfs", True, False),
        ("nfs4", False, True),
        ("fuse.s3fs", False, True),
        ("fuseblk", False, False),
        ("virtiofs", False, True),
        ("lustre", False, True),
    ],
)
def test_kinds(kind: Any, in_memory: Any, network: Any) -> None:
    told = FileSystem(kind, "/", "", ())
    assert (told.in_memory, told.network) == (in_memory, network)


def test_real_overlay_and_bind_mounts(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "merged", "base"):
        (tmp_path / name).mkdir()
    (tmp_path / "source").write_text("x")
    (tmp_path / "file").write_text("y")
    setup = (
        f"cd {tmp_path} && mount -t tmpfs none base && mkdir base/lower base/upper base/work &&"
        " echo x > base/lower/f &&"
        " mount -t overlay none -o lowerdir=base/lower,upperdir=base/upper,workdir=base/work merged &&"
        " mount --bind source file && mount --bind lower upper"
    )
    code = (
        "print(json.dumps([file_system('merged/f').type, file_system_type('merged/f'), direct_io('merged').supported in"
        " (True, False), is_mount_point('file'), is_mount_point('source'), is_mount_point('upper'),"
        " file_system('upper').mount_point]))"
    )
    got = in_mount_namespace(setup, code)
    assert got == ["overlay", "overlay", True, True, False, True, os.path.realpath(tmp_path / "upper")]


def test_mount_point(tmp_path: Path) -> None:
    assert is_mount_point("/proc")
    assert not is_mount_point(tmp_path)
    assert not is_mount_point(tmp_path / "missing")


# ---- memory and processors


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of files: call it with cgroup lines, mounts and files."""

    def build(cgroup: Any, mounts: Any, files: Any, available_kib: Any = 1000) -> Any:
        (tmp_path / "meminfo").write_text(f"MemTotal: 9999 kB\nMemAvailable:   {available_kib} kB\n")
        (tmp_path / "cgroup").write_text(cgroup)
        mountinfo(monkeypatch, tmp_path, *(line.format(root=tmp_path) for line in mounts))
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(system, "_MEMINFO", str(tmp_path / "meminfo"))
        monkeypatch.setattr(system, "_CGROUP", str(tmp_path / "cgroup"))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    return build


V2 = ["1 0 0:1 / {root}/cg rw - cgroup2 cgroup2 rw"]
V1 = [
    "1 0 0:1 /docker/abc {root}/memory rw - cgroup cgroup rw,memory",
    "2 0 0:2 /docker/abc {root}/cpu rw - cgroup cgroup rw,cpu,cpuacct",
]


def test_no_limits(machine: Any) -> None:
    machine("0::/a\n", V2, {"cg/a/memory.max": "max\n", "cg/a/memory.current": "5\n", "cg/a/cpu.max": "max 100000\n"})
    assert (available_memory(), cpu_count()) == (1000 * 1024, 8)


def test_version_2_limits_of_a_parent(machine: Any) -> None:
    files = {
        "cg/a/memory.max": "500000\n",
        "cg/a/memory.current": "400000\n",
        "cg/a/memory.stat": "anon 5\ninactive_file 50000\n",
        "cg/a/cpu.max": "150000 100000\n",
        "cg/a/b/memory.max": "max\n",
        "cg/a/b/memory.current": "1\n",
        "cg/a/b/cpu.max": "400000 100000\n",
    }
    machine("0::/a/b\n", V2, files)
    assert (available_memory(), cpu_count()) == (150000, 2)


def test_version_1_limits_in_a_container(machine: Any) -> None:
    files = {
        "memory/memory.limit_in_bytes": "500000\n",
        "memory/memory.usage_in_bytes": "600000\n",
        "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 200000\n",
        "cpu/cpu.cfs_quota_us": "50000\n",
        "cpu/cpu.cfs_period_us": "100000\n",
    }
    machine("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n", V1, files)
    assert (available_memory(), cpu_count()) == (100000, 1)


def test_version_1_without_quota(machine: Any) -> None:
    files = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    machine("3:cpu,cpuacct:/elsewhere\n", V1, files)
    assert cpu_count() == 8


def test_overdrawn_is_zero_and_path_above_the_namespace_is_survived(machine: Any) -> None:
    machine("0::/../other\n", V2, {"cg/memory.max": "10\n", "cg/memory.current": "20\n"})
    assert available_memory() == 0


def test_real_machine() -> None:
    assert 0 < available_memory() < 1 << 60
    assert 1 <= cpu_count() <= len(os.sched_getaffinity(0))


def test_nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MEMINFO", "_CGROUP", "_MOUNTINFO"):
        monkeypatch.setattr(system, name, str(tmp_path / "missing"))
    assert available_memory() > 0
    assert cpu_count() >= 1
