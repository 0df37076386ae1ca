"""A stand-in for libcufile in tests; ``cufile_double.c`` describes every fault that it can inject.

A test module gets the fixtures with ``from cufile_double import *`` in a ``conftest.py`` (with the tests folder on
``sys.path``). ``cufile_double`` makes ``torchdirect.cufile`` use a fresh, fault-free double without the probe::

    def test_short_read(cufile_double):
        cufile_double.set("cap.read", 4096)
        ...
        cufile_double.assert_no_leaks()
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = [
    "CuFileDouble",
    "build",
    "cufile_double",
    "cufile_double_old",
    "cufile_double_old_path",
    "cufile_double_path",
]

SOURCE = Path(__file__).with_name("cufile_double.c")
_LIVE = ("opens", "handles", "buffers", "batches", "streams", "async")


def build(directory: Path, *flags: str) -> Path:
    """Compile the double into a directory as ``libcufile.so.0``; skips the test when there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("the cuFile double needs a C compiler (gcc), and none was found")
    target = directory / "libcufile.so.0"
    options = ["-shared", "-fPIC", "-O1", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *options, *flags, "-o", str(target), str(SOURCE)], check=True)
    return target


class CuFileDouble:
    """The control functions of a loaded double."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.double_set.argtypes = (ctypes.c_char_p, ctypes.c_long)
        self._library.double_get.argtypes = (ctypes.c_char_p,)
        self._library.double_get.restype = ctypes.c_long
        self._library.double_reset.restype = None
        self._library.double_run_stream.argtypes = (ctypes.c_void_p,)
        self._library.double_run_stream.restype = ctypes.c_long

    def set(self, key: str, value: int) -> None:
        """Give a setting a value."""
        assert self._library.double_set(key.encode(), value) == 0

    def get(self, key: str) -> int:
        """Read a setting or a counter; 0 when it was never set."""
        return int(self._library.double_get(key.encode()))

    def fail(self, function: str, code: int, *, nth: int = 0, start: int = 0, cuda: int = 0) -> None:
        """Let a cuFile function fail: every call, only the nth, or every one from `start` on."""
        self.set(f"fail.{function}", code)
        self.set(f"fail.{function}.nth", nth)
        self.set(f"fail.{function}.from", start)
        self.set(f"fail.{function}.cuda", cuda)

    def heal(self, function: str) -> None:
        """Let a cuFile function work again."""
        self.set(f"fail.{function}", 0)

    def run_stream(self, stream: int = 0) -> int:
        """Run what waits on a stream (0: on every stream); return how many requests ran."""
        return int(self._library.double_run_stream(stream))

    def reset(self) -> None:
        """Forget settings, counters and live objects."""
        self._library.double_reset()

    def live(self) -> dict[str, int]:
        """Return how many objects of each kind exist."""
        return {kind: self.get(f"live.{kind}") for kind in _LIVE}

    def assert_no_leaks(self) -> None:
        """Assert that nothing is open, registered or pending."""
        assert self.live() == dict.fromkeys(_LIVE, 0)


def _use(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuFileDouble]:
    from torchdirect.cufile import driver, library

    monkeypatch.setenv("TORCHDIRECT_LIBCUFILE", str(path))
    monkeypatch.setenv("TORCHDIRECT_CUFILE_PROBE", "0")
    monkeypatch.delenv("CUFILE_DOUBLE", raising=False)
    library.unload()
    driver.reset_probe()
    double = CuFileDouble(path)
    double.reset()
    yield double
    monkeypatch.delenv("CUFILE_DOUBLE", raising=False)
    # A test that failed may have left the session open; the next one must start with it closed.
    driver.let_close()
    double.reset()
    while driver.use_count():
        try:
            driver.release()
        except OSError:
            pass
    double.reset()
    library.unload()
    driver.reset_probe()


@pytest.fixture(scope="session")
def cufile_double_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the compiled double."""
    return build(tmp_path_factory.mktemp("cufile_double"))


@pytest.fixture(scope="session")
def cufile_double_old_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a double without streams, statistics, parameters and version."""
    return build(tmp_path_factory.mktemp("cufile_double_old"), "-DCUFILE_DOUBLE_OLD")


@pytest.fixture
def cufile_double(cufile_double_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuFileDouble]:
    """A fresh double that ``torchdirect.cufile`` uses, without the probe."""
    yield from _use(cufile_double_path, monkeypatch)


@pytest.fixture
def cufile_double_old(cufile_double_old_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuFileDouble]:
    """A fresh double of an old library that ``torchdirect.cufile`` uses, without the probe."""
    yield from _use(cufile_double_old_path, monkeypatch)
