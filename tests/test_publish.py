"""Publication: the old file or the new one, whole, whatever happens on the way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from torchdirect import publish
from torchdirect.errors import (
    SaveError,
    SaveFileNotFoundError,
    SaveIsADirectoryError,
    SaveNotADirectoryError,
    SavePermissionError,
)
from torchdirect.publish import is_replaceable, replacing, stale_temporaries

SRC = str(Path(publish.__file__).parents[1])
NOBODY = 65534
MIB = 1 << 20

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def put(path: Any, data: Any = b"new", durable: Any = True) -> Any:
    with replacing(path, durable=durable) as new:
        os.write(new.fd, data)
        new.commit()
    return new


def mode_of(path: Any) -> Any:
    return stat.S_IMODE(os.stat(path).st_mode)


def names(directory: Any) -> Any:
    return sorted(os.listdir(directory))


def open_descriptors() -> Any:
    return set(os.listdir("/proc/self/fd"))


def in_child(work: Any) -> Any:
    """Run `work` in a forked process and return its wait status. Its return value goes nowhere."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def as_nobody(work: Any) -> Any:
    def demoted() -> Any:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        work()

    assert in_child(demoted) == 0


@pytest.fixture
def open_dir() -> Any:
    """A directory that every user can reach, unlike pytest's."""
    directory = Path(tempfile.mkdtemp(prefix="publish-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@functools.cache
def _mounts_permitted() -> bool:
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def in_mount_namespace(setup: Any, code: Any) -> Any:
    """Run shell `setup`, then Python `code` that prints JSON, in a private mount namespace."""
    if os.geteuid() != 0 or not _mounts_permitted():
        pytest.skip("needs root and the right to mount")
    # The modules are loaded from their files, since importing the package imports torch, which takes seconds.
    prelude = (
        "import sys, types, json, os, errno\n"
        "package = types.ModuleType('torchdirect'); package.__path__ = [sys.argv[1] + '/torchdirect']\n"
        "sys.modules['torchdirect'] = package\n"
        "from torchdirect.publish import *\nfrom torchdirect.errors import *\n"
    )
    script = f'{setup} || exit 77\nexec "$0" -c "$1" "$2"'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, prelude + code, SRC]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---- the plain road


@pytest.mark.parametrize("durable", [True, False])
def test_new_and_existing(tmp_path: Path, durable: Any) -> None:
    before = open_descriptors()
    path = tmp_path / "a.pt"
    for data in (b"one", b"two"):
        new = put(path, data, durable)
        assert path.read_bytes() == data
        assert names(tmp_path) == ["a.pt"]
        assert (new.path, new.target, new.fd) == (str(path), os.path.realpath(path), -1)
        assert not os.path.exists(new.temporary)
    assert open_descriptors() == before


def test_nothing_visible_until_commit(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with replacing(path, durable=True) as new:
        os.write(new.fd, b"new")
        assert path.read_bytes() == b"old"
        directory, name = os.path.split(new.temporary)
        assert directory == os.path.realpath(tmp_path)
        assert name.startswith(".a.pt.") and name.endswith(".tmp-torchdirect")
        assert not os.get_inheritable(new.fd)
        new.commit()
        assert path.read_bytes() == b"new"


@pytest.mark.parametrize("fault", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_without_commit_nothing_changes(tmp_path: Path, fault: Any) -> None:
    before = open_descriptors()
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with contextlib.suppress(*([fault] if fault else [])), replacing(path, durable=True) as new:
        new.open_direct()
        os.write(new.fd, b"new")
        if fault:
            raise fault
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.pt"]
    assert open_descriptors() == before


def test_misuse_is_told(tmp_path: Path) -> None:
    new = replacing(tmp_path / "a", durable=False)
    for call in (new.commit, new.open_direct, lambda: new.reserve(1)):
        with pytest.raises(RuntimeError, match="with statement"):
            call()
    with new:
        with pytest.raises(ValueError, match="negative"):
            new.reserve(-1)
        new.reserve(0)
        new.commit()
        with pytest.raises(RuntimeError, match="once only"):
            new.commit()
    with pytest.raises(RuntimeError, match="once only"), new:
        pass


def test_relative_path_survives_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    with replacing("a.pt", durable=False) as new:
        monkeypatch.chdir(tmp_path / "other")
        new.commit()
    assert (tmp_path / "a.pt").exists()
    assert names(tmp_path / "other") == []


@pytest.mark.parametrize(
    "name", ["with space.pt", "модель-模型.pt", "a" * 255, "é" * 127, ".hidden", "-dash", "new\nline", "[a]*?.pt"]
)
def test_names(tmp_path: Path, name: Any) -> None:
    with replacing(tmp_path / name, durable=False) as new:
        assert len(os.fsencode(os.path.basename(new.temporary))) <= 255
        os.path.basename(new.temporary).encode("utf-8")
        assert stale_temporaries(tmp_path / name) == []
        new.commit()
    assert names(tmp_path) == [name]


def test_name_that_is_not_unicode(tmp_path: Path) -> None:
    put(os.fsdecode(os.fsencode(tmp_path) + b"/\xff" + b"\xfe" * 250))
    assert len(names(tmp_path)) == 1


def test_long_names_with_one_beginning_do_not_share_temporaries(tmp_path: Path) -> None:
    assert publish._prefix(f"{tmp_path}/{'a' * 250}1") != publish._prefix(f"{tmp_path}/{'a' * 250}2")


# ---- second descriptor and space


def test_open_direct_is_the_same_file(tmp_path: Path) -> None:
    with replacing(tmp_path / "a", durable=True) as new:
        fd = new.open_direct()
        if fd is None:
            pytest.skip("no direct I/O here")
        assert new.open_direct() == fd != new.fd
        assert fd is not None
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        assert flags & os.O_DIRECT
        assert not flags & os.O_NOFOLLOW, "libcufile refuses it (5019)"
        assert os.path.samestat(os.fstat(fd), os.fstat(new.fd))
        new.commit()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EMFILE])
def test_open_direct_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: Any) -> None:
    with replacing(tmp_path / "a", durable=True) as new:

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "open", refuse)
        if number == errno.EMFILE:
            with pytest.raises(SaveError, match="Too many open files"):
                new.open_direct()
        else:
            assert new.open_direct() is None


def test_reserve(tmp_path: Path) -> None:
    with replacing(tmp_path / "a", durable=True) as new:
        new.reserve(MIB)
        status = os.fstat(new.fd)
        if status.st_size == 0:
            pytest.skip("this file system cannot reserve")
        assert status.st_size == MIB
        assert status.st_blocks * 512 >= MIB


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENOSPC, errno.EFBIG])
def test_reserve_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: Any) -> None:
    def fail(_fd: Any, _nbytes: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(publish, "_fallocate", fail)
    with replacing(tmp_path / "a", durable=True) as new:
        if number in (errno.ENOSPC, errno.EFBIG):
            with pytest.raises(SaveError, match="reserving 12345 bytes") as caught:
                new.reserve(12345)
            assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "a"))
        else:
            new.reserve(12345)


def test_fallocate_is_tried_again_after_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    class Libc:
        calls = 0

        def fallocate64(self, *_: Any) -> Any:
            Libc.calls += 1
            ctypes.set_errno(errno.EINTR)
            return -1 if Libc.calls < 3 else 0

    monkeypatch.setattr(publish, "_LIBC", Libc())
    publish._fallocate(0, 1)
    assert Libc.calls == 3


def test_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    code = """
before = os.statvfs('.').f_bavail
open('a.pt', 'wb').write(b'old')
try:
    with replacing('a.pt', durable=True) as new:
        new.reserve(64 << 20)
except SaveError as exc:
    error = exc
print(json.dumps([error.errno == errno.ENOSPC, str(error), os.listdir('.'), open('a.pt').read()]))
"""
    full, message, left, data = in_mount_namespace(f"mount -t tmpfs -o size=8m none {tmp_path} && cd {tmp_path}", code)
    assert full
    assert message.startswith("a.pt: reserving 67108864 bytes (")
    assert "bytes are free in" in message and "No space left on device" in message
    assert (left, data) == (["a.pt"], "old")


def test_ramfs_and_overlay(tmp_path: Path) -> None:
    code = """
with replacing('a.pt', durable=True) as new:
    direct = new.open_direct()
    new.reserve(4096)
    os.pwrite(new.fd, b'x', 0)
    new.commit()
print(json.dumps([direct is None, os.listdir('.'), stale_temporaries('a.pt')]))
"""
    assert in_mount_namespace(f"mount -t ramfs none {tmp_path} && cd {tmp_path}", code) == [True, ["a.pt"], []]
    setup = (
        f"cd {tmp_path} && mount -t tmpfs none . && cd {tmp_path} && mkdir l u w m && echo old > l/a.pt && "
        "mount -t overlay none -o lowerdir=l,upperdir=u,workdir=w m && cd m"
    )
    assert in_mount_namespace(setup, code)[1:] == [["a.pt"], []]


def test_read_only_mount_and_mounted_file(tmp_path: Path) -> None:
    (tmp_path / "ro").mkdir()
    (tmp_path / "ro" / "old.pt").write_text("old")
    (tmp_path / "mounted.pt").write_text("old")
    (tmp_path / "other").write_text("other")
    code = """
def fault(path):
    try:
        with replacing(path, durable=True):
            pass
    except SaveError as exc:
        return exc.errno, str(exc)
print(json.dumps([fault('ro/new.pt'), fault('ro/old.pt'), fault('mounted.pt'),
    is_replaceable('mounted.pt'), is_replaceable('ro/old.pt'), os.listdir('ro')]))
"""
    setup = f"cd {tmp_path} && mount --bind ro ro && mount -o remount,ro,bind ro && mount --bind other mounted.pt"
    new, old, mounted, mounted_replaceable, replaceable, left = in_mount_namespace(setup, code)
    for number, message in (new, old):
        assert number == errno.EROFS
        assert "Read-only file system" in message and message.startswith("ro/")
    assert mounted[0] == errno.EBUSY and "mounted.pt" in mounted[1]
    assert (mounted_replaceable, replaceable, left) == (False, True, ["old.pt"])


# ---- order, and faults at every step


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The steps that reach storage, in order."""
    made = []

    def record(name: Any, label: Any) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(label(*args))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    record("fdatasync", lambda fd: "data")
    record("rename", lambda src, dst: "rename")
    record("fsync", lambda fd: "directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
    record("fchmod", lambda fd, mode: "mode")
    return made


def test_order(tmp_path: Path, calls: Any) -> None:
    put(tmp_path / "a")
    assert calls == ["data", "rename", "directory"]
    calls.clear()
    (tmp_path / "a").chmod(0o640)
    put(tmp_path / "a")
    assert calls == ["mode", "data", "rename", "directory"]
    calls.clear()
    put(tmp_path / "b", durable=False)
    assert calls == ["rename"]


def failing(number: Any) -> Any:
    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("step", ["fdatasync", "rename"])
def test_fault_before_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Any, number: Any) -> None:
    before = open_descriptors()
    path = tmp_path / "a"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, step, failing(number))
    with pytest.raises(SaveError, match="previous file, if any, is unchanged") as caught:
        put(path)
    assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert os.strerror(number) in str(caught.value)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]
    assert open_descriptors() == before


def test_a_failed_sync_cannot_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with replacing(tmp_path / "a", durable=True) as new:
        monkeypatch.setattr(os, "fdatasync", failing(errno.EIO))
        with pytest.raises(SaveError):
            new.commit()
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="once only"):
            new.commit()
    assert names(tmp_path) == []


def test_fault_of_delayed_writes_without_durability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SaveError, match="writing the data"), replacing(tmp_path / "a", durable=False) as new:
        monkeypatch.setattr(os, "dup", failing(errno.ENOSPC))
        new.commit()
    assert names(tmp_path) == []


def test_fault_of_the_directory_sync_says_that_the_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(SaveError, match="new file is in place"):
        put(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert names(tmp_path) == ["a"]
    assert open_descriptors() == before


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_file_system_without_directory_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: Any) -> None:
    monkeypatch.setattr(os, "fsync", failing(number))
    put(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("step", ["fdatasync", "rename", "fsync"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed(tmp_path: Path, step: Any, moment: Any) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def work() -> Any:
        real = getattr(os, step)

        def die(*args: Any) -> Any:
            if moment == "after":
                real(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, step, die)
        put(path)

    assert os.WTERMSIG(in_child(work)) == signal.SIGKILL
    published = step == "fsync" or (step, moment) == ("rename", "after")
    assert path.read_bytes() == (b"new" if published else b"old")
    stale = stale_temporaries(path)
    assert len(stale) == (0 if published else 1)
    assert names(tmp_path) == sorted(["a", *map(os.path.basename, stale)])
    put(path, b"next")
    assert path.read_bytes() == b"next"
    assert names(tmp_path) == ["a"]


def test_interrupted_while_entering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()

    def interrupt(_fd: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(publish, "_lock_new", interrupt)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path / "a")
    assert names(tmp_path) == []
    assert open_descriptors() == before


# ---- several writers


def test_temporaries_of_the_living_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with replacing(path, durable=False) as new:
                os.write(new.fd, b"child")
                os.write(to_parent[1], b"x")
                os.read(to_child[0], 1)
                new.commit()
            status = 0
        finally:
            os._exit(status)
    os.read(to_parent[0], 1)
    assert stale_temporaries(path) == []
    put(path, b"parent")
    assert len(names(tmp_path)) == 2
    os.write(to_child[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_bytes() == b"child", "the last one to finish wins"
    assert names(tmp_path) == ["a"]
    for fd in (*to_child, *to_parent):
        os.close(fd)


def test_threads_to_one_path(tmp_path: Path) -> None:
    path = tmp_path / "a"
    faults = []

    def work(letter: Any) -> Any:
        try:
            for _ in range(20):
                put(path, letter * 5000, durable=False)
                assert path.read_bytes() in (b"a" * 5000, b"b" * 5000, b"c" * 5000)
        except BaseException as exc:
            faults.append(exc)

    threads = [threading.Thread(target=work, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert names(tmp_path) == ["a"]


def orphan(target: Any, boot: Any = None) -> Any:
    """A temporary file that nobody holds."""
    path = publish._temporary_path(os.path.realpath(target))
    if boot:
        head, tail = path[: -len(publish._SUFFIX) - 24], path[-len(publish._SUFFIX) - 16 :]
        path = head + boot + tail
    Path(path).write_bytes(b"half")
    return path


def test_only_own_temporaries_go(tmp_path: Path) -> None:
    mine = orphan(tmp_path / "a")
    others = [orphan(tmp_path / "a.b"), orphan(tmp_path / "b"), str(tmp_path / ".a.1234.tmp-torchdirect")]
    Path(others[-1]).touch()
    link = publish._temporary_path(os.path.realpath(tmp_path / "a"))
    os.symlink(others[0], link)
    assert stale_temporaries(tmp_path / "a") == [mine]
    put(tmp_path / "a")
    assert names(tmp_path) == sorted(["a", os.path.basename(link), *map(os.path.basename, others)])


@pytest.mark.parametrize(("kind", "counts"), [("ext4", True), ("nfs", False), ("unknown", False)])
def test_temporary_of_another_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, counts: Any) -> None:
    monkeypatch.setattr(publish, "file_system_type", lambda _: kind)
    here = orphan(tmp_path / "a")
    elsewhere = orphan(tmp_path / "a", boot="00000000")
    assert stale_temporaries(tmp_path / "a") == sorted([here, elsewhere] if counts else [here])


def test_a_temporary_removed_before_its_lock_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = publish._lock_new
    seen: list[str] = []

    def late(fd: Any) -> Any:
        if not seen:
            seen.extend(stale_temporaries(tmp_path / "a"))
            os.unlink(seen[0])
        return real(fd)

    monkeypatch.setattr(publish, "_lock_new", late)
    before = open_descriptors()
    new = put(tmp_path / "a")
    assert len(seen) == 1 and new.temporary not in seen
    assert names(tmp_path) == ["a"]
    assert open_descriptors() == before


def test_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = orphan(tmp_path / "a")
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    put(tmp_path / "a")
    assert names(tmp_path) == sorted(["a", os.path.basename(left)]), "what cannot be told dead is left alone"


# ---- symbolic links and other kinds of files


def test_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "real.pt").write_bytes(b"old")
    (tmp_path / "one").symlink_to("data/real.pt")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    (tmp_path / "dangling").symlink_to("data/made.pt")
    (tmp_path / "linked").symlink_to("data")
    for link, name in (("two", "real.pt"), ("dangling", "made.pt"), ("linked/../data/x", "x"), ("linked/y", "y")):
        new = put(tmp_path / link, link.encode())
        assert new.target == os.path.realpath(tmp_path / "data" / name)
        assert (tmp_path / "data" / name).read_bytes() == link.encode()
        assert not (tmp_path / "data" / name).is_symlink()
    assert (tmp_path / "one").is_symlink() and (tmp_path / "dangling").is_symlink()
    assert names(tmp_path / "data") == ["made.pt", "real.pt", "x", "y"]


@pytest.mark.parametrize("path", ["loop", "loop/a"])
def test_link_loop(tmp_path: Path, path: Any) -> None:
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    with pytest.raises(SaveError) as caught:
        put(tmp_path / path)
    assert caught.value.errno == errno.ELOOP
    assert is_replaceable(tmp_path / path)


def test_hard_link_is_parted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    os.link(tmp_path / "a", tmp_path / "b")
    put(tmp_path / "a")
    assert (tmp_path / "b").read_bytes() == b"old"


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/null")
    for path in ("/dev/null", tmp_path / "fifo", tmp_path / "link"):
        assert not is_replaceable(path)
        with pytest.raises(SaveError, match="not a regular file"):
            put(path)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert stat.S_ISFIFO(os.stat(tmp_path / "fifo").st_mode)


def test_open_files_named_through_proc(tmp_path: Path) -> None:
    read, write = os.pipe()
    with open(tmp_path / "a", "w+b") as file:
        for fd in (read, file.fileno()):
            assert not is_replaceable(f"/proc/self/fd/{fd}")
            with pytest.raises(SaveError, match="open already"):
                put(f"/proc/self/fd/{fd}")
        (tmp_path / "link").symlink_to(f"/dev/fd/{file.fileno()}")
        assert not is_replaceable(tmp_path / "link")
    os.close(read)
    os.close(write)
    assert names(tmp_path) == ["a", "link"]


def test_is_replaceable(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for path in (tmp_path / "a", tmp_path / "missing", tmp_path, tmp_path / "no" / "dir", "\0"):
        assert is_replaceable(path)


# ---- paths that cannot be written


@pytest.mark.parametrize(
    ("path", "kind", "number"),
    [
        ("no/dir/a", SaveFileNotFoundError, errno.ENOENT),
        ("", SaveFileNotFoundError, errno.ENOENT),
        ("file/a", SaveNotADirectoryError, errno.ENOTDIR),
        ("dir", SaveIsADirectoryError, errno.EISDIR),
        ("dir/", SaveIsADirectoryError, errno.EISDIR),
        ("dir/.", SaveIsADirectoryError, errno.EISDIR),
        ("new/", SaveFileNotFoundError, errno.ENOENT),
        ("file/", SaveNotADirectoryError, errno.ENOTDIR),
        ("a" * 256, SaveError, errno.ENAMETOOLONG),
        ("bad-link", SaveFileNotFoundError, errno.ENOENT),
    ],
)
def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any, kind: Any, number: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "bad-link").symlink_to("no/dir/a")
    before = names(tmp_path)
    with pytest.raises(kind) as caught:
        put(path)
    assert type(caught.value) is kind
    assert (caught.value.errno, caught.value.filename) == (number, path)
    assert str(caught.value).startswith(f"{path}: ")
    assert names(tmp_path) == before


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SaveFileNotFoundError, match=r"Create directory '.*/no/dir' first"):
        put(tmp_path / "no" / "dir" / "a")


@as_root
def test_other_user(open_dir: Any) -> None:
    (open_dir / "mine.pt").write_bytes(b"old")
    (open_dir / "mine.pt").chmod(0o644)
    for name, mode in (("shared", 0o777), ("sticky", 0o1777)):
        (open_dir / name).mkdir()
        (open_dir / name / "root.pt").write_bytes(b"old")
        (open_dir / name / "root.pt").chmod(0o666)
        (open_dir / name / "strict.pt").write_bytes(b"old")
        (open_dir / name / "strict.pt").chmod(0o644)
        (open_dir / name).chmod(mode)

    def work() -> Any:
        for path in ("mine.pt", "new.pt", "shared/strict.pt", "sticky/root.pt"):
            with pytest.raises(SavePermissionError) as caught:
                put(open_dir / path)
            assert caught.value.errno in (errno.EACCES, errno.EPERM)
            assert isinstance(caught.value, (PermissionError, RuntimeError))
            assert str(open_dir) in str(caught.value)
        put(open_dir / "shared" / "root.pt")
        put(open_dir / "sticky" / "own.pt")
        put(open_dir / "sticky" / "own.pt")

    as_nobody(work)
    assert (open_dir / "mine.pt").read_bytes() == b"old"
    assert (open_dir / "shared" / "root.pt").read_bytes() == b"new"
    assert names(open_dir / "shared") == ["root.pt", "strict.pt"]
    assert names(open_dir / "sticky") == ["own.pt", "root.pt", "strict.pt"]


@as_root
def test_directory_that_may_be_written_but_not_read(open_dir: Any) -> None:
    (open_dir / "box").mkdir()
    (open_dir / "box").chmod(0o733)
    as_nobody(lambda: put(open_dir / "box" / "a"))
    assert names(open_dir / "box") == ["a"]


# ---- permissions, owner, attributes


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000, 0o777])
def test_new_file_obeys_the_umask(tmp_path: Path, umask: Any) -> None:
    old = os.umask(umask)
    try:
        put(tmp_path / "a")
    finally:
        os.umask(old)
    assert mode_of(tmp_path / "a") == 0o666 & ~umask


@as_root
def test_umask_that_denies_the_owner_does_not_deny_direct_io(open_dir: Any) -> None:
    (open_dir / "d").mkdir()
    (open_dir / "d").chmod(0o777)

    def work() -> Any:
        os.umask(0o777)
        with replacing(open_dir / "d" / "a", durable=False) as new:
            new.open_direct()
            new.commit()
        assert mode_of(open_dir / "d" / "a") == 0

    as_nobody(work)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755, 0o666])
def test_mode_is_kept_and_the_temporary_is_private(tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "a"
    path.touch()
    path.chmod(mode)
    with replacing(path, durable=False) as new:
        assert mode_of(new.temporary) == 0o600
        new.commit()
    assert mode_of(path) == mode


@as_root
def test_owner_is_kept_and_set_user_id_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    os.chown(path, 1234, 5678)
    path.chmod(0o6755)
    put(path)
    status = path.stat()
    assert (status.st_uid, status.st_gid, mode_of(path)) == (1234, 5678, 0o755)


@as_root
def test_another_group_gets_no_more_than_everybody(open_dir: Any) -> None:
    (open_dir / "d").mkdir()
    (open_dir / "d").chmod(0o777)
    path = open_dir / "d" / "a"
    path.touch()
    os.chown(path, NOBODY, 5678)
    path.chmod(0o664)
    as_nobody(lambda: put(path))
    assert (path.stat().st_gid, mode_of(path)) == (NOBODY, 0o644)


def test_extended_attributes_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    try:
        os.setxattr(path, "user.note", b"kept")
    except OSError as exc:
        pytest.skip(f"no extended attributes here: {exc}")
    put(path)
    assert os.getxattr(path, "user.note") == b"kept"


def acl(*entries: Any) -> Any:
    """An access list in the kernel's form, linux/posix_acl_xattr.h: version 2, then tag, permissions, id."""
    import struct

    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


NO_ID = 0xFFFFFFFF


def test_access_list_is_kept_and_none_is_inherited_in_place_of_none(tmp_path: Path) -> None:
    listed, plain = tmp_path / "listed", tmp_path / "plain"
    listed.touch()
    plain.touch()
    plain.chmod(0o644)
    entries = acl((1, 6, NO_ID), (2, 4, 1234), (4, 4, NO_ID), (16, 4, NO_ID), (32, 0, NO_ID))
    try:
        os.setxattr(listed, "system.posix_acl_access", entries)
        os.setxattr(tmp_path, "system.posix_acl_default", entries)
    except OSError as exc:
        pytest.skip(f"no access lists here: {exc}")
    put(listed)
    put(plain)
    put(tmp_path / "new")
    assert os.getxattr(listed, "system.posix_acl_access") == entries
    assert "system.posix_acl_access" not in os.listxattr(plain)
    assert mode_of(plain) == 0o644
    assert os.getxattr(tmp_path / "new", "system.posix_acl_access") == entries, "as open() would give"


def test_a_forked_child_has_nothing_of_it(tmp_path: Path) -> None:
    """It would keep the lock and the blocks of its parent's file for as long as it lives."""
    with replacing(tmp_path / "a", durable=True) as new:
        os.write(new.fd, b"new")
        new.open_direct()
        child = os.fork()
        if child == 0:
            links = []
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    links.append(os.readlink(f"/proc/self/fd/{name}"))
            new.__exit__(None, None, None)
            os._exit(any(str(tmp_path) in link for link in links))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.path.exists(new.temporary)
        new.commit()
    assert (tmp_path / "a").read_bytes() == b"new"
