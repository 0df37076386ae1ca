"""The cuFile driver session: opened once however many users there are, probed first, measured and set.

``cuFileDriverOpen`` can end the process instead of returning an error (under WSL, and on some machines with half of
the software installed), so :func:`acquire` refuses WSL and lets a short-lived child process try first.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from . import child as _child
from . import library as _library
from . import structs
from .errors import CuFileError, CuFileUnavailableError, decode_status
from .library import Library, Version
from .structs import (
    BoolParameter,
    DriverControl,
    DriverStatus,
    Feature,
    SizeParameter,
    StatsLevel,
    StatsLevel1,
    StatsLevel2,
    StatsLevel3,
    StringParameter,
)

#: Set to 0 to open the driver without the child process that tries it first.
PROBE_VARIABLE = "TORCHDIRECT_CUFILE_PROBE"
#: Whether :func:`acquire` lets a child process try the driver first.
Probing = Literal["first", "never"]
_ALREADY_OPEN = 5026
_PROC_VERSION = "/proc/version"

# The child imports nothing of this package: it must start fast, and must not load torch or touch this process's CUDA.
_CHILD = """
import ctypes, json, os, sys
class Status(ctypes.Structure):
    _fields_ = [("err", ctypes.c_int), ("cu_err", ctypes.c_int)]
library = ctypes.CDLL(sys.argv[1])
library.cuFileDriverOpen.restype = Status
status = library.cuFileDriverOpen()
try:
    os.fstat(0)
    stdin = True
except OSError:
    stdin = False
os.write(1, b"\\nPROBE " + json.dumps([status.err, status.cu_err, stdin]).encode() + b"\\n")
os._exit(0)
"""


@dataclass(frozen=True)
class ProbeResult:
    """Whether opening the cuFile driver is safe and works here; if not, why, and what helps."""

    ok: bool
    reason: str
    remedy: str


@dataclass(frozen=True)
class DriverProperties:
    """Properties of the open driver session (``CUfileDrvProps_t``).

    Sizes are in KiB, the time-out is in milliseconds. ``nvfs_version`` is (0, 0) when the nvidia-fs kernel module
    takes no part, as in compatibility mode.
    """

    nvfs_version: tuple[int, int]
    poll_threshold_kib: int
    max_direct_io_kib: int
    status: DriverStatus
    control: DriverControl
    features: Feature
    max_device_cache_kib: int
    per_buffer_cache_kib: int
    max_pinned_kib: int
    max_batch_entries: int
    batch_timeout_ms: int


_lock = threading.RLock()
_count = 0
_kept = False
_holder: Library | None = None
_owned = False
_probe: ProbeResult | None = None


def _after_fork_in_child() -> None:
    # The session belongs to the parent: CUDA does not survive a fork, so the child must neither use nor close it.
    global _lock, _count, _kept, _holder, _owned, _probe
    _lock, _count, _kept, _holder, _owned, _probe = threading.RLock(), 0, False, None, False, None


os.register_at_fork(after_in_child=_after_fork_in_child)


def is_wsl() -> bool:
    """Tell whether this is the Windows Subsystem for Linux, where libcufile aborts the process."""
    try:
        with open(_PROC_VERSION) as text:
            return "microsoft" in text.read().lower()
    except OSError:
        return False


_WSL = ProbeResult(
    False,
    "this is WSL, where opening the cuFile driver ends the process",
    "use a host transfer type, or native Linux",
)


def probe(timeout: float = 30.0) -> ProbeResult:
    """Let a short-lived child process open the cuFile driver, and remember the answer for this process.

    Parameters
    ----------
    timeout
        Seconds to wait for the child before it is killed. Starting CUDA on a machine with many GPUs takes seconds.

    Returns
    -------
    ProbeResult
        Never raises: a missing libcufile, WSL, an abort, a hang and an error code all become a reason and a remedy.
        ``TORCHDIRECT_CUFILE_PROBE=0`` answers ok without a child, except under WSL.
    """
    global _probe
    with _lock:
        if is_wsl():
            return _WSL
        if os.environ.get(PROBE_VARIABLE) == "0":
            return ProbeResult(True, f"not probed ({PROBE_VARIABLE}=0)", "")
        if _probe is None:
            _probe = _probe_in_child(timeout)
        return _probe


def reset_probe() -> None:
    """Forget the remembered probe, so that the next one asks again."""
    global _probe
    with _lock:
        _probe = None


def _probe_in_child(timeout: float) -> ProbeResult:
    try:
        path = _library.load().location.path
    except CuFileUnavailableError as error:
        return ProbeResult(False, error.reason, error.remedy)
    try:
        ended = _child.python(_CHILD, [path], timeout)
    except OSError as error:
        return ProbeResult(
            False,
            f"the child process that tries the cuFile driver first could not start: {error}",
            f"set {PROBE_VARIABLE}=0 to open the driver untried",
        )
    if ended.returncode is None:
        return ProbeResult(
            False,
            f"opening the cuFile driver did not end within {timeout:g} seconds",
            "check that nvidia-smi answers, and see dmesg",
        )
    logged = f" (cufile.log: {ended.logged})" if ended.logged else ""
    return _judge(ended.returncode, ended.stdout, ended.stderr, logged)


def _judge(returncode: int, stdout: bytes, stderr: bytes, logged: str) -> ProbeResult:
    line = next((part for part in stdout.splitlines() if part.startswith(b"PROBE ")), None)
    if line is None:
        last = stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        how = f"signal {_signal_name(-returncode)}" if returncode < 0 else f"exit status {returncode}"
        return ProbeResult(
            False,
            f"opening the cuFile driver ended a test process with {how}{logged}{': ' + last if last else ''}",
            "use a host transfer type; check that the NVIDIA driver, nvidia-fs and /run/udev fit together",
        )
    err, cu_err, stdin = json.loads(line.removeprefix(b"PROBE "))
    failure = decode_status(err, cu_err)
    if failure is not None and failure.code != _ALREADY_OPEN:
        code = failure.code or failure.errno
        return ProbeResult(
            False,
            f"cuFileDriverOpen answers {failure.name} ({code}): {failure.meaning}{logged}",
            failure.remedy,
        )
    if not stdin:
        # Seen where nvidia-fs is loaded but its device nodes are missing: the error path closes descriptor 0.
        return ProbeResult(
            False,
            "opening the cuFile driver closes descriptor 0 of the process",
            "pass /dev/nvidia-fs* into the container, or unload nvidia-fs",
        )
    return ProbeResult(True, "the cuFile driver opens", "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def acquire(probing: Probing = "first") -> Library:
    """Open the driver session, or count one more user of the open one; safe from any thread.

    Parameters
    ----------
    probing
        ``"first"`` lets a child process try before the first open (see :func:`probe`); ``"never"`` does not. WSL is
        refused either way.

    Returns
    -------
    Library
        The library whose driver is open. Pair every call with one :func:`release`.

    Raises
    ------
    CuFileUnavailableError
        When libcufile is missing, or opening it here would fail or end the process.
    CuFileError
        When ``cuFileDriverOpen`` fails.
    """
    global _count, _holder, _owned
    with _lock:
        if _holder is not None:
            _count += 1
            return _holder
        loaded = _library.load()
        if is_wsl():
            raise CuFileUnavailableError(_WSL.reason, _WSL.remedy)
        # Another user of the same library (torch, KvikIO) may have opened the driver: then nothing is left to try.
        if probing == "first" and loaded.function("cuFileUseCount")() <= 0:
            result = probe()
            if not result.ok:
                raise CuFileUnavailableError(result.reason, result.remedy)
        _owned = True
        try:
            loaded.call("cuFileDriverOpen")
        except CuFileError as error:
            if error.code != _ALREADY_OPEN:
                raise
            _owned = False
        _holder, _count = loaded, 1
        return loaded


def release() -> None:
    """Count one user less; the last one closes the driver session.

    Raises
    ------
    RuntimeError
        When the session is not open.
    CuFileError
        When closing fails. The session then counts as closed, since cuFile offers no way to find out.
    """
    global _count, _holder
    with _lock:
        if _holder is None:
            raise RuntimeError("the cuFile driver is not open; release() needs an acquire() before it")
        _count -= 1
        if _count:
            return
        holder, _holder = _holder, None
        if _owned:
            # cufile.h maps cuFileDriverClose to the _v2 symbol; libraries from before that have only the first name.
            holder.call("cuFileDriverClose_v2" if holder.has("cuFileDriverClose_v2") else "cuFileDriverClose")


@contextmanager
def session(probing: Probing = "first") -> Iterator[Library]:
    """Hold the driver session open for a ``with`` block: :func:`acquire`, then :func:`release`."""
    held = acquire(probing)
    try:
        yield held
    finally:
        release()


def keep_open() -> None:
    """Hold the driver session open until :func:`let_close` or the end of the process.

    Opening and closing cost some tenths of a second, which a program that saves again and again should pay once.

    Raises
    ------
    CuFileUnavailableError, CuFileError
        As :func:`acquire`.
    """
    global _kept
    with _lock:
        if not _kept:
            acquire()
            _kept = True
            # Before the finalizers of handles are registered, so that it runs after them.
            atexit.register(let_close)


def let_close() -> None:
    """Undo :func:`keep_open`; the driver closes when its other users have let go."""
    global _kept
    with _lock:
        if _kept:
            _kept = False
            atexit.unregister(let_close)
            with contextlib.suppress(CuFileError):
                release()


def use_count() -> int:
    """Return how many users of this binding hold the session."""
    with _lock:
        return _count


def library_use_count() -> int:
    """Return how often the driver is open in this process by libcufile's own count, all its users together."""
    return int(_library.load().function("cuFileUseCount")())


def version() -> Version:
    """Return the version of libcufile; raises `CuFileUnsupportedError` for one too old to tell."""
    return _library.load().version()


def properties() -> DriverProperties:
    """Return the properties of the driver session, opening it for the question when it is closed."""
    raw = structs.DrvProps()
    with session() as held:
        held.call("cuFileDriverGetProperties", ctypes.byref(raw))
    return DriverProperties(
        nvfs_version=(raw.nvfs.major_version, raw.nvfs.minor_version),
        poll_threshold_kib=raw.nvfs.poll_thresh_size,
        max_direct_io_kib=raw.nvfs.max_direct_io_size,
        status=DriverStatus(raw.nvfs.dstatusflags),
        control=DriverControl(raw.nvfs.dcontrolflags),
        features=Feature(raw.fflags),
        max_device_cache_kib=raw.max_device_cache_size,
        per_buffer_cache_kib=raw.per_buffer_cache_size,
        max_pinned_kib=raw.max_device_pinned_mem_size,
        max_batch_entries=raw.max_batch_io_size,
        batch_timeout_ms=raw.max_batch_io_timeout_msecs,
    )


def set_poll_mode(threshold_kib: int | None) -> None:
    """Poll for completion of transfers up to `threshold_kib` KiB, or never (None). Needs an open session."""
    on = threshold_kib is not None
    _library.load().call("cuFileDriverSetPollMode", on, threshold_kib if threshold_kib is not None else 4)


def set_max_direct_io(kib: int) -> None:
    """Set the largest transfer that libcufile hands to nvidia-fs at once: KiB, a multiple of 4."""
    _set_limit("cuFileDriverSetMaxDirectIOSize", kib)


def set_max_cache(kib: int) -> None:
    """Set how much GPU memory libcufile reserves per device for bounce buffers: KiB, a multiple of 4."""
    _set_limit("cuFileDriverSetMaxCacheSize", kib)


def set_max_pinned(kib: int) -> None:
    """Set how much GPU memory buffer registration may pin: KiB, a multiple of 4."""
    _set_limit("cuFileDriverSetMaxPinnedMemSize", kib)


def _set_limit(function: str, kib: int) -> None:
    if kib < 0:
        raise ValueError(f"a size cannot be negative: {kib} KiB")
    _library.load().call(function, kib, detail=f"{kib} KiB")


@overload
def get_parameter(parameter: SizeParameter) -> int: ...
@overload
def get_parameter(parameter: BoolParameter) -> bool: ...
@overload
def get_parameter(parameter: StringParameter) -> str: ...
def get_parameter(parameter: SizeParameter | BoolParameter | StringParameter) -> int | bool | str:
    """Read a parameter: the live value while the driver is open, else the value staged for the next open."""
    loaded = _library.load()
    if isinstance(parameter, StringParameter):
        text = ctypes.create_string_buffer(4096)
        loaded.call("cuFileGetParameterString", parameter, text, len(text), detail=parameter.name)
        return os.fsdecode(text.value)
    if isinstance(parameter, BoolParameter):
        flag = ctypes.c_bool()
        loaded.call("cuFileGetParameterBool", parameter, ctypes.byref(flag), detail=parameter.name)
        return flag.value
    size = ctypes.c_size_t()
    loaded.call("cuFileGetParameterSizeT", parameter, ctypes.byref(size), detail=parameter.name)
    return size.value


@overload
def set_parameter(parameter: SizeParameter, value: int) -> None: ...
@overload
def set_parameter(parameter: BoolParameter, value: bool) -> None: ...
@overload
def set_parameter(parameter: StringParameter, value: str) -> None: ...
def set_parameter(parameter: SizeParameter | BoolParameter | StringParameter, value: int | bool | str) -> None:
    """Stage a parameter for the next open of the driver.

    Raises
    ------
    CuFileError
        Code 5026 while the driver is open, 5022 for a value that libcufile does not take.
    TypeError
        When the value's type is not the parameter's.
    """
    loaded = _library.load()
    detail = f"{parameter.name}={value!r}"
    if isinstance(parameter, StringParameter) and isinstance(value, str):
        loaded.call("cuFileSetParameterString", parameter, os.fsencode(value), detail=detail)
    elif isinstance(parameter, BoolParameter) and isinstance(value, bool):
        loaded.call("cuFileSetParameterBool", parameter, value, detail=detail)
    elif isinstance(parameter, SizeParameter) and isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{detail}: a size cannot be negative")
        loaded.call("cuFileSetParameterSizeT", parameter, value, detail=detail)
    else:
        raise TypeError(f"{detail}: {type(parameter).__name__} does not take a {type(value).__name__}")


def parameter_range(parameter: SizeParameter) -> tuple[int, int]:
    """Return the least and the greatest value of a size parameter; libcufile 1.15 or newer."""
    low, high = ctypes.c_size_t(), ctypes.c_size_t()
    _library.load().call(
        "cuFileGetParameterMinMaxValue", parameter, ctypes.byref(low), ctypes.byref(high), detail=parameter.name
    )
    return low.value, high.value


def bar_size_kib(gpu: int) -> int:
    """Return the size of a GPU's BAR1 window in KiB; libcufile 1.15 or newer."""
    size = ctypes.c_size_t()
    _library.load().call("cuFileGetBARSizeInKB", gpu, ctypes.byref(size), detail=f"GPU {gpu}")
    return size.value


def set_stats_level(level: StatsLevel) -> None:
    """Set how much libcufile counts; libcufile 1.15 or newer, as all statistics."""
    _library.load().call("cuFileSetStatsLevel", level)


def stats_level() -> StatsLevel:
    """Return how much libcufile counts."""
    level = ctypes.c_int()
    _library.load().call("cuFileGetStatsLevel", ctypes.byref(level))
    return StatsLevel(level.value)


def stats_start() -> None:
    """Start counting, at the level that was set before. Needs an open session."""
    _library.load().call("cuFileStatsStart")


def stats_stop() -> None:
    """Stop counting. Needs an open session."""
    _library.load().call("cuFileStatsStop")


def stats_reset() -> None:
    """Set every counter to zero. Needs an open session."""
    _library.load().call("cuFileStatsReset")


_Stats = TypeVar("_Stats", StatsLevel1, StatsLevel2, StatsLevel3)


def _read_stats(function: str, kind: type[_Stats]) -> _Stats:
    stats = kind()
    _library.load().call(function, ctypes.byref(stats))
    return stats


def stats_l1() -> StatsLevel1:
    """Return the counters; needs at least ``StatsLevel.BASIC``."""
    return _read_stats("cuFileGetStatsL1", StatsLevel1)


def stats_l2() -> StatsLevel2:
    """Return counters and size histograms; needs at least ``StatsLevel.HISTOGRAMS``."""
    return _read_stats("cuFileGetStatsL2", StatsLevel2)


def stats_l3() -> StatsLevel3:
    """Return counters, histograms and one record per GPU; needs ``StatsLevel.PER_GPU``."""
    return _read_stats("cuFileGetStatsL3", StatsLevel3)


def stats_dict(stats: ctypes.Structure) -> dict[str, Any]:
    """Turn a statistics structure into nested dictionaries and lists, for printing or JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, ctypes.Structure):
            return stats_dict(value)
        return [plain(item) for item in value] if isinstance(value, ctypes.Array) else value

    return {field[0]: plain(getattr(stats, field[0])) for field in stats._fields_}
