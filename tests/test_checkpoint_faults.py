"""Bad input and failing systems: a clear error, the old file whole, nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchdirect as td
from checkpoints import same
from torchdirect import memory

STATE = {"first.weight": torch.arange(300_000.0), "second.bias": torch.arange(70_001.0), "third": torch.ones(5)}
ROADS = ["CPU_ONLY", "CPU_CACHED_GPU"]


@pytest.fixture(autouse=True)
def leaves_nothing(tmp_path: Path) -> Iterator[None]:
    gc.collect()
    before = (sorted(os.listdir("/proc/self/fd")), threading.active_count(), memory.staging_pool._reserved)
    yield
    gc.collect()
    assert (sorted(os.listdir("/proc/self/fd")), threading.active_count(), memory.staging_pool._reserved) == before
    assert [p for p in tmp_path.rglob("*") if "tmp-torchdirect" in p.name] == []


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.pt"
    td.save(STATE, path)
    return path


# ---------------------------------------------------------------------------------------------------- bad input


def test_missing_directory_empty_and_text(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        td.load(tmp_path / "none.pt")
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        td.load(tmp_path)
    (tmp_path / "empty.pt").touch()
    with pytest.raises(EOFError, match=r"empty\.pt.*0 bytes"):
        td.load(tmp_path / "empty.pt")
    (tmp_path / "text.pt").write_text("hello, this is no checkpoint")
    with pytest.raises(pickle.UnpicklingError, match=r"text\.pt.*hello"):
        td.load(tmp_path / "text.pt")


def test_a_zip_that_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("holiday/a.jpg", b"x" * (2 << 20))
    with pytest.raises(RuntimeError, match=r"photos\.zip.*no record 'data\.pkl'.*holiday/a\.jpg"):
        td.load(path)
    with zipfile.ZipFile(path, "w"):
        pass
    with pytest.raises(td.CorruptCheckpointError, match="empty"):
        td.load(path)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_truncated(keep: float, good: Path) -> None:
    data = good.read_bytes()
    good.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(RuntimeError, match=r"good\.pt.*cut short"):
        td.load(good)


@pytest.mark.parametrize("mode", ["read", "write"])
def test_without_permission(mode: str, good: Path) -> None:
    """As another user, in a child process; root may do everything."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    good.chmod(0o600)
    for folder in good.parents:
        if folder.owner() == "root" and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    action = "td.load(path)" if mode == "read" else "td.save({}, path)"
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setuid(65534)
            path = str(good)  # noqa: F841 - used by the action
            exec(action)
        except PermissionError as exc:
            status = 0 if str(good) in str(exc) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert same(torch.load(good), STATE)


def test_cuda_without_cuda(good: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(RuntimeError, match="CUDA"):
        td.load(good, map_location="cuda")
    for name in ("CPU_GPU", "CPU_ASYNC_GPU"):
        with pytest.raises(td.TransferUnavailableError, match=f"{name}.*no tensor is on a GPU"):
            td.load(good, transfer_type=name)
        with pytest.warns(td.TransferFallbackWarning, match=name):
            assert same(td.load(good, transfer_type=name, fallback="warn"), STATE)
        report = td.last_transfer()
        assert report is not None
        assert report.used in (td.TransferType.CPU_ONLY, td.TransferType.CPU_CACHED_GPU)
        assert name in report.fallbacks[0]
    with pytest.raises(RuntimeError, match="pin_memory"):
        td.load(good, pin_memory=True)


# ------------------------------------------------------------------------------------------------- full storage


def test_device_files_are_written_not_replaced() -> None:
    td.save(STATE, "/dev/null")
    assert not Path("/dev/null").is_file()
    with pytest.raises(OSError, match="/dev/full") as caught:
        td.save(STATE, "/dev/full")
    assert caught.value.errno == errno.ENOSPC
    assert not Path("/dev/full").is_file()


def test_file_size_limit_keeps_the_old_file(good: Path) -> None:
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        with pytest.raises(td.SaveError, match=r"good\.pt") as caught:
            td.save(torch.ones(4_000_000), good)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert caught.value.errno == errno.EFBIG
    assert isinstance(caught.value, RuntimeError)
    assert same(torch.load(good), STATE)


def in_namespace(script: str) -> None:
    """Run Python in a mount namespace of its own."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs root and mount namespaces")
    result = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", script], check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]


def test_a_full_tmpfs(tmp_path: Path) -> None:
    in_namespace(f"""
import errno, os, subprocess, torch, torchdirect as td
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", {str(tmp_path)!r}], check=True)
os.chdir({str(tmp_path)!r})
td.save(torch.arange(3.), "a.pt")
for durable in (True, False):
    try:
        td.save(torch.ones(4_000_000), "a.pt", durable=durable)
    except td.SaveError as exc:
        assert exc.errno == errno.ENOSPC and "a.pt" in str(exc) and "16" in str(exc), exc
    else:
        raise SystemExit("no error")
    assert os.listdir() == ["a.pt"], os.listdir()
    assert torch.equal(td.load("a.pt"), torch.arange(3.))
""")


@pytest.mark.parametrize("num_threads", [2, 4], ids=["written", "mapped"])
def test_files_in_memory(num_threads: int, tmp_path: Path) -> None:
    """With several threads a file on tmpfs is written through a mapping, after its pages have been set aside."""
    in_namespace(f"""
import os, subprocess, torch, torchdirect as td, zipfile
from torchdirect.engines import file_io
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", {str(tmp_path)!r}], check=True)
path, state = {str(tmp_path)!r} + "/a.pt", {{"w": torch.randn(3_000_001), "small": torch.arange(9)}}
calls, real = [], os.pwritev
os.pwritev = lambda *a: (calls.append(a[0]), real(*a))[1]
td.save(state, path, num_threads={num_threads}, chunk_bytes=1 << 20)
assert bool(calls) is ({num_threads} < 4), calls
assert zipfile.ZipFile(path).testzip() is None
loaded = torch.load(path)
assert all(torch.equal(loaded[k], state[k]) for k in state)
try:
    td.save(torch.zeros(14_000_000), path, num_threads={num_threads})
except td.SaveError as exc:
    assert "a.pt" in str(exc), exc
else:
    raise SystemExit("no error")
assert os.listdir({str(tmp_path)!r}) == ["a.pt"]
assert torch.equal(td.load(path)["w"], state["w"])
""")


def test_a_file_system_without_direct_io(tmp_path: Path) -> None:
    in_namespace(f"""
import subprocess, torch, torchdirect as td, warnings
subprocess.run(["mount", "-t", "ramfs", "none", {str(tmp_path)!r}], check=True)
path = {str(tmp_path)!r} + "/a.pt"
state = torch.arange(1_000_000.)
td.save(state, path)
assert td.last_transfer().used is td.TransferType.CPU_CACHED_GPU, td.last_transfer()
assert "ramfs" in td.last_transfer().reason
assert torch.equal(td.load(path), state)
for call in (lambda **k: td.save(state, path, **k), lambda **k: td.load(path, **k)):
    try:
        call(transfer_type="CPU_ONLY")
    except td.TransferUnavailableError as exc:
        assert "ramfs" in str(exc) and "AUTO" in exc.remedy, exc
    else:
        raise SystemExit("no error")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        call(transfer_type="CPU_ONLY", fallback="warn")
    assert [w.category for w in caught] == [td.TransferFallbackWarning], caught
    assert td.last_transfer().used is td.TransferType.CPU_CACHED_GPU
""")


# ------------------------------------------------------------------------------------------------ faulty transfers

Transfer = Callable[[int, list[memoryview], int], int]


def test_direct_io_refused_at_the_first_transfer(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(real: Transfer) -> Transfer:
        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{fd}") and fcntl_flags(fd) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, buffers, offset)

        return call

    monkeypatch.setattr(os, "preadv", refuse(os.preadv))
    monkeypatch.setattr(os, "pwritev", refuse(os.pwritev))
    for call in (lambda **k: td.save(STATE, good, **k), lambda **k: td.load(good, **k)):
        with pytest.raises(td.TransferUnavailableError, match="EINVAL"):
            call(transfer_type="CPU_ONLY")
        with td.settings(fallback="warn"):
            call(transfer_type="CPU_ONLY")
        report = td.last_transfer()
        assert report is not None
        assert "EINVAL" in report.fallbacks[0]
    assert same(torch.load(good), STATE)


def fcntl_flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)


@given(
    counts=st.lists(st.integers(1, 60_000), min_size=1, max_size=30), road=st.sampled_from(ROADS), again=st.booleans()
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_short_transfers_are_taken_up_again(counts: list[int], road: str, again: bool, tmp_path: Path) -> None:
    turn = iter(counts * 2)
    lock = threading.Lock()

    def shorten(real: Transfer) -> Transfer:
        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            with lock:
                count = next(turn, None)
            if count is None:
                return real(fd, buffers, offset)
            if again and count % 5 == 0:
                raise OSError(errno.EAGAIN, "again")
            step = 512 if fcntl_flags(fd) & os.O_DIRECT else 1
            return real(fd, [buffers[0][: max(step, count // step * step)]], offset)

        return call

    path = tmp_path / "short.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", shorten(os.pwritev))
        patch.setattr(os, "preadv", shorten(os.preadv))
        td.save(STATE, path, transfer_type=road, chunk_bytes=65536, durable=False)
        assert same(td.load(path, transfer_type=road, chunk_bytes=65536), STATE)
    assert same(torch.load(path), STATE)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("nth", [0, 3, 7])
def test_an_error_in_the_nth_transfer(nth: int, road: str, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(real: Transfer) -> Transfer:
        calls = iter(range(1000))

        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            if next(calls) == nth:
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, buffers, offset)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail(os.pwritev))
        with pytest.raises(td.SaveError, match=r"good\.pt.*Input/output error") as caught:
            td.save({"other": torch.ones(500_000)}, good, transfer_type=road, chunk_bytes=65536)
        assert caught.value.errno == errno.EIO
    assert same(torch.load(good), STATE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail(os.preadv))
        with pytest.raises(td.LoadError, match=r"good\.pt.*offset \d+.*(first\.weight|second\.bias|third)"):
            td.load(good, transfer_type=road, chunk_bytes=65536)
    assert same(td.load(good, transfer_type=road), STATE)


@pytest.mark.parametrize("road", ROADS)
def test_a_file_that_shrinks_while_it_is_read(road: str, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def shrink(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(good, 100_000)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", shrink)
    with pytest.raises(td.CorruptCheckpointError, match=r"good\.pt: the file ends at offset \d+, within tensor 'first"):
        td.load(good, transfer_type=road)


@pytest.mark.parametrize("call", ["save", "load"])
def test_interrupted_while_workers_run(call: str, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "pwritev" if call == "save" else "preadv"
    real, main = getattr(os, name), threading.main_thread().ident
    assert main is not None
    sent = threading.Event()

    def interrupt(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not sent.is_set():
            sent.set()
            signal.pthread_kill(main, signal.SIGINT)
        return int(real(fd, buffers, offset))

    monkeypatch.setattr(os, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        if call == "save":
            td.save({"x": torch.ones(2_000_000)}, good, transfer_type="CPU_ONLY", chunk_bytes=65536)
        else:
            td.load(good, transfer_type="CPU_CACHED_GPU", chunk_bytes=65536)
    monkeypatch.undo()
    assert same(td.load(good), STATE)


@pytest.mark.parametrize("started", [0, 1])
def test_threads_that_cannot_start(started: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = threading.Thread.start
    count = iter(range(1000))

    def start(self: threading.Thread) -> None:
        if next(count) >= started:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    td.save(STATE, tmp_path / "t.pt", transfer_type="CPU_ONLY", chunk_bytes=65536)
    assert same(td.load(tmp_path / "t.pt", transfer_type="CPU_ONLY", chunk_bytes=65536), STATE)


def test_staging_is_bounded_and_can_be_released(tmp_path: Path) -> None:
    td.release_staging()
    with td.settings(staging_bytes="2MiB", chunk_bytes="512KiB", num_threads=16):
        td.save(STATE, tmp_path / "s.pt", transfer_type="CPU_CACHED_GPU")
        td.load(tmp_path / "s.pt", transfer_type="CPU_ONLY")
        assert 0 < memory.staging_pool.nbytes <= 2 << 20
    td.release_staging()
    assert memory.staging_pool.nbytes == 0
