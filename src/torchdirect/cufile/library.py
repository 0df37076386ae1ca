"""Finding and loading libcufile.

Nothing is searched for or loaded at import. :func:`load` opens the library once per process; functions that an older
library lacks are missing from :attr:`Library.features` and raise :class:`CuFileUnsupportedError` when called.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import site
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from . import structs
from .errors import CuFileNotFoundError, CuFileUnsupportedError, check_status

#: Path of the libcufile to use; nothing else is searched when it is set.
ENVIRONMENT_VARIABLE = "TORCHDIRECT_LIBCUFILE"

_P = ctypes.c_void_p
_STATUS = structs.Status
_TRANSFER = (_P, _P, ctypes.c_size_t, structs.off_t, structs.off_t)

# Result type and argument types, as cufile.h declares them. Outputs are passed as plain addresses or byref().
_PROTOTYPES: MappingProxyType[str, tuple[Any, tuple[Any, ...]]] = MappingProxyType(
    {
        "cuFileDriverOpen": (_STATUS, ()),
        "cuFileDriverClose": (_STATUS, ()),
        "cuFileDriverClose_v2": (_STATUS, ()),
        "cuFileUseCount": (ctypes.c_long, ()),
        "cuFileDriverGetProperties": (_STATUS, (_P,)),
        "cuFileDriverSetPollMode": (_STATUS, (ctypes.c_bool, ctypes.c_size_t)),
        "cuFileDriverSetMaxDirectIOSize": (_STATUS, (ctypes.c_size_t,)),
        "cuFileDriverSetMaxCacheSize": (_STATUS, (ctypes.c_size_t,)),
        "cuFileDriverSetMaxPinnedMemSize": (_STATUS, (ctypes.c_size_t,)),
        "cuFileHandleRegister": (_STATUS, (_P, _P)),
        "cuFileHandleDeregister": (None, (_P,)),
        "cuFileBufRegister": (_STATUS, (_P, ctypes.c_size_t, ctypes.c_int)),
        "cuFileBufDeregister": (_STATUS, (_P,)),
        "cuFileRead": (structs.ssize_t, _TRANSFER),
        "cuFileWrite": (structs.ssize_t, _TRANSFER),
        "cuFileBatchIOSetUp": (_STATUS, (_P, ctypes.c_uint)),
        "cuFileBatchIOSubmit": (_STATUS, (_P, ctypes.c_uint, _P, ctypes.c_uint)),
        "cuFileBatchIOGetStatus": (_STATUS, (_P, ctypes.c_uint, _P, _P, _P)),
        "cuFileBatchIOCancel": (_STATUS, (_P,)),
        "cuFileBatchIODestroy": (None, (_P,)),
        "cuFileReadAsync": (_STATUS, (_P,) * 7),
        "cuFileWriteAsync": (_STATUS, (_P,) * 7),
        "cuFileStreamRegister": (_STATUS, (_P, ctypes.c_uint)),
        "cuFileStreamDeregister": (_STATUS, (_P,)),
        "cuFileGetVersion": (_STATUS, (_P,)),
        "cuFileGetParameterSizeT": (_STATUS, (ctypes.c_int, _P)),
        "cuFileSetParameterSizeT": (_STATUS, (ctypes.c_int, ctypes.c_size_t)),
        "cuFileGetParameterBool": (_STATUS, (ctypes.c_int, _P)),
        "cuFileSetParameterBool": (_STATUS, (ctypes.c_int, ctypes.c_bool)),
        "cuFileGetParameterString": (_STATUS, (ctypes.c_int, _P, ctypes.c_int)),
        "cuFileSetParameterString": (_STATUS, (ctypes.c_int, ctypes.c_char_p)),
        "cuFileGetParameterMinMaxValue": (_STATUS, (ctypes.c_int, _P, _P)),
        "cuFileGetBARSizeInKB": (_STATUS, (ctypes.c_int, _P)),
        "cuFileSetStatsLevel": (_STATUS, (ctypes.c_int,)),
        "cuFileGetStatsLevel": (_STATUS, (_P,)),
        "cuFileStatsStart": (_STATUS, ()),
        "cuFileStatsStop": (_STATUS, ()),
        "cuFileStatsReset": (_STATUS, ()),
        "cuFileGetStatsL1": (_STATUS, (_P,)),
        "cuFileGetStatsL2": (_STATUS, (_P,)),
        "cuFileGetStatsL3": (_STATUS, (_P,)),
    }
)


@dataclass(frozen=True)
class LibraryLocation:
    """A libcufile file and the way it was found: ``environment``, ``loaded``, ``loader``, ``toolkit`` or ``pip``."""

    path: str
    source: str


@dataclass(frozen=True)
class SearchReport:
    """What a search found, and every place it looked at, in order."""

    location: LibraryLocation | None
    looked_at: tuple[str, ...]


@dataclass(frozen=True, order=True)
class Version:
    """Version of libcufile, for example ``Version(1, 15, 0)``."""

    major: int
    minor: int
    patch: int

    @classmethod
    def from_packed(cls, packed: int) -> Version:
        """Unpack cuFile's number, 1000 * major + 10 * minor, so that 1150 is 1.15."""
        return cls(packed // 1000, packed % 1000 // 10, packed % 10)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class Library:
    """A loaded libcufile. Calls release the interpreter lock and keep errno apart per thread."""

    def __init__(self, location: LibraryLocation) -> None:
        self.location = location
        try:
            library = ctypes.CDLL(location.path, use_errno=True)
        except OSError as error:
            raise CuFileNotFoundError(
                f"{location.path} ({location.source}) cannot be loaded as libcufile: {error}",
                f"install libcufile for this machine, or set {ENVIRONMENT_VARIABLE} to its path",
            ) from error
        self._cdll = library
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(library, name, None)
            if function is not None:
                function.restype, function.argtypes = result, arguments
                self._functions[name] = function
        if "cuFileRead" not in self._functions or "cuFileHandleRegister" not in self._functions:
            raise CuFileNotFoundError(
                f"{location.path} ({location.source}) is no libcufile: it has no cuFileRead or cuFileHandleRegister",
                f"set {ENVIRONMENT_VARIABLE} to the path of libcufile.so.0",
            )
        self.features: frozenset[str] = frozenset(self._functions)

    def has(self, function: str) -> bool:
        """Tell whether this libcufile exports a function."""
        return function in self._functions

    def function(self, name: str) -> Callable[..., Any]:
        """Look up a cuFile function.

        Raises
        ------
        CuFileUnsupportedError
            When this libcufile is too old to have it.
        """
        found = self._functions.get(name)
        if found is None:
            raise CuFileUnsupportedError(
                f"{self.location.path} has no {name}", "install a newer CUDA toolkit or nvidia-cufile package"
            )
        return found

    def call(self, name: str, *arguments: Any, path: str | None = None, detail: str = "") -> None:
        """Call a function that returns ``CUfileError_t``; raise :class:`CuFileError` unless it succeeds."""
        status = self.function(name)(*arguments)
        check_status(status.err, status.cu_err, name, path, detail)

    def version(self) -> Version:
        """Return the version of this libcufile; needs neither a GPU nor an open driver."""
        packed = ctypes.c_int()
        self.call("cuFileGetVersion", ctypes.byref(packed))
        return Version.from_packed(packed.value)


def _versioned_names(directory: str) -> list[str]:
    # The soname has been libcufile.so.0 since the first release; a later one is taken when .0 is not there.
    pattern = re.compile(r"libcufile\.so(\.\d+)*$")
    found = [p for p in glob.glob(os.path.join(glob.escape(directory), "libcufile.so*")) if pattern.search(p)]
    return sorted(found, key=lambda p: (not p.endswith(".so.0"), p.endswith(".so"), p))


def _loaded_already() -> list[str]:
    # A library that the process holds (torch links libcufile) must be shared: the driver state lives in it.
    try:
        with open("/proc/self/maps") as maps:
            paths = [line.split(maxsplit=5)[5].strip() for line in maps if "/libcufile.so" in line]
    except OSError:
        return []
    return list(dict.fromkeys(p for p in paths if os.path.isfile(p)))


def _loader_directories() -> Iterator[str]:
    yield from (d for d in os.environ.get("LD_LIBRARY_PATH", "").split(":") if d)
    for ldconfig in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        if os.path.exists(ldconfig):
            try:
                listing = subprocess.run(
                    [ldconfig, "-p"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False
                ).stdout
            except (OSError, subprocess.SubprocessError):
                listing = ""
            yield from (
                os.path.dirname(line.rpartition("=> ")[2])
                for line in listing.splitlines()
                if line.lstrip().startswith("libcufile.so")
            )
            return


def _toolkit_directories() -> Iterator[str]:
    roots = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    roots += ["/usr/local/cuda", *sorted(glob.glob("/usr/local/cuda-*"), key=_natural, reverse=True)]
    for root in roots:
        yield os.path.join(root, "lib64")
        yield from sorted(glob.glob(os.path.join(glob.escape(root), "targets", "*", "lib")))


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path)]


def _pip_directories() -> Iterator[str]:
    roots = [p for p in sys.path if p and os.path.isdir(p)]
    roots += [*site.getsitepackages(), site.getusersitepackages()]
    for root in roots:
        for folder in ("cu13", "cu12", "cufile"):
            yield os.path.join(root, "nvidia", folder, "lib")


def search() -> SearchReport:
    """Look for libcufile without loading it.

    The order is: the file that ``TORCHDIRECT_LIBCUFILE`` names (then nothing else), a libcufile that this process has
    loaded, ``LD_LIBRARY_PATH`` and the loader's cache, the CUDA toolkit, pip packages.

    Raises
    ------
    CuFileNotFoundError
        When ``TORCHDIRECT_LIBCUFILE`` names no file.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        if not os.path.isfile(named):
            raise CuFileNotFoundError(
                f"{ENVIRONMENT_VARIABLE}={named!r} names no file", "set it to the path of libcufile.so.0, or unset it"
            )
        return SearchReport(LibraryLocation(os.path.abspath(named), "environment"), (named,))
    looked_at: list[str] = ["/proc/self/maps"]
    loaded = _loaded_already()
    if loaded:
        return SearchReport(LibraryLocation(loaded[0], "loaded"), tuple(looked_at))
    for source, directories in (
        ("loader", _loader_directories()),
        ("toolkit", _toolkit_directories()),
        ("pip", _pip_directories()),
    ):
        for directory in directories:
            if directory in looked_at:
                continue
            looked_at.append(directory)
            names = _versioned_names(directory)
            if names:
                return SearchReport(LibraryLocation(names[0], source), tuple(looked_at))
    return SearchReport(None, tuple(looked_at))


def find() -> LibraryLocation | None:
    """Return where libcufile is, or None; :func:`search` also tells where it looked."""
    return search().location


_lock = threading.Lock()
_library: Library | None = None


def load() -> Library:
    """Load libcufile, once per process; safe from any thread.

    Raises
    ------
    CuFileNotFoundError
        When no libcufile was found, or the file cannot be loaded. A failure is not remembered: the next call tries
        again.
    """
    global _library
    library = _library
    if library is not None:
        return library
    with _lock:
        if _library is None:
            report = search()
            if report.location is None:
                raise CuFileNotFoundError(
                    f"libcufile was not found; looked at {', '.join(report.looked_at)}",
                    f"install the CUDA toolkit or 'pip install nvidia-cufile', or set {ENVIRONMENT_VARIABLE}",
                )
            _library = Library(report.location)
        return _library


def loaded() -> Library | None:
    """Return the library if :func:`load` has loaded it, without loading it."""
    return _library


def has(function: str) -> bool:
    """Tell whether libcufile exports a function, loading it first; False where there is no libcufile."""
    try:
        return load().has(function)
    except CuFileNotFoundError:
        return False


def unload() -> None:
    """Forget the loaded library, so that the next :func:`load` searches again; for tests.

    The file stays mapped: libcufile starts threads, so unmapping it is not safe.
    """
    global _library
    with _lock:
        _library = None
