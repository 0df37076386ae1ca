"""A trial of cuFile on one file, in a short-lived child process.

libcufile may end the process that opens its driver, keeps its settings for the life of a process, and needs a CUDA
context. So the trial runs in a child: this process never opens the driver, and does not touch CUDA.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from torchdirect import system
from torchdirect.cufile import child, driver, library
from torchdirect.cufile.errors import CuFileUnavailableError, Failure, cuda_error_name, decode_status, decode_transfer

__all__ = ["GpuTransfer", "Proof", "prove", "trial_file"]

_BLOCK = 4096
_PREFIX = ".torchdirect-trial-"
_ALREADY_OPEN = 5026

# The child imports nothing of this package, so that it starts fast. It tells each step as it is done: if it dies, the
# last line says where. ALLOW_COMPAT_MODE is CUFileBoolConfigParameter_t 1; descriptor type 1 is OPAQUE_FD.
_CHILD = r"""
import ctypes, json, os, sys
path, gpus, fd, strict, writable, size = sys.argv[1], sys.argv[2], *(int(a) for a in sys.argv[3:7])
P, N, OFF = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
class Status(ctypes.Structure):
    _fields_ = [("err", ctypes.c_int), ("cu_err", ctypes.c_int)]
class Union(ctypes.Union):
    _fields_ = [("fd", ctypes.c_int), ("handle", P)]
class Descr(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handle", Union), ("fs_ops", P)]
class Props(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint), ("minor", ctypes.c_uint), ("poll", N), ("direct", N),
        ("status", ctypes.c_uint), ("control", ctypes.c_uint), ("features", ctypes.c_uint), ("rest", ctypes.c_uint * 5)]
def tell(step, **facts):
    os.write(1, b"\nPROOF " + json.dumps(dict(facts, step=step)).encode() + b"\n")
tell("load")
library = ctypes.CDLL(path, use_errno=True)
def call(name, *arguments):
    function = getattr(library, name)
    function.restype = Status
    status = function(*arguments)
    return [status.err, status.cu_err]
wanted = ("cuFileReadAsync", "cuFileBatchIOSetUp", "cuFileSetParameterBool")
symbols = [name for name in wanted if hasattr(library, name)]
forbade = bool(strict and "cuFileSetParameterBool" in symbols
    and call("cuFileSetParameterBool", ctypes.c_int(1), ctypes.c_bool(False))[0] == 0)
tell("symbols", symbols=symbols, forbade=forbade)
status = call("cuFileDriverOpen")
tell("open", status=status)
if status[0] not in (0, 5026):
    os._exit(0)
props = Props()
if call("cuFileDriverGetProperties", ctypes.byref(props))[0] == 0:
    tell("properties", nvfs=[props.major, props.minor], flags=props.status, features=props.features)
descr, handle = Descr(type=1), P()
descr.handle.fd = fd
status = call("cuFileHandleRegister", ctypes.byref(handle), ctypes.byref(descr))
tell("register", status=status)
if status[0]:
    os._exit(0)
def move(index):
    device, context, pointer, name = ctypes.c_int(), P(), ctypes.c_uint64(), ctypes.create_string_buffer(32)
    cuda_error = (cuda.cuDeviceGet(ctypes.byref(device), index)
        or cuda.cuDeviceGetPCIBusId(name, 32, device)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or cuda.cuCtxSetCurrent(context) or cuda.cuMemAlloc_v2(ctypes.byref(pointer), N(1 << 20)))
    if cuda_error:
        return tell("gpu", index=index, pci=name.value.decode().lower(), cuda=cuda_error)
    facts = {"buffer": call("cuFileBufRegister", P(pointer.value), N(1 << 20), 0)}
    for function in (("cuFileWrite",) if writable else ()) + ("cuFileRead",):
        run = getattr(library, function)
        run.restype, run.argtypes = ctypes.c_ssize_t, (P, P, N, OFF, OFF)
        ctypes.set_errno(0)
        facts[function] = [run(handle, pointer.value, size, 0, 0), ctypes.get_errno()]
        if facts[function][0] < 0:
            break
    if facts["buffer"][0] == 0:
        call("cuFileBufDeregister", P(pointer.value))
    cuda.cuMemFree_v2(pointer)
    tell("gpu", index=index, pci=name.value.decode().lower(), cuda=0, **facts)
if size and gpus != "none":
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        tell("cuda", error="libcuda.so.1 cannot be loaded")
    else:
        count = ctypes.c_int()
        cuda_error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
        tell("cuda", cuda=cuda_error)
        indices = range(count.value) if gpus == "all" else [int(gpus)]
        for index in () if cuda_error else indices:
            move(index)
library.cuFileHandleDeregister(handle)
tell("end")
os._exit(0)
"""


@dataclass(frozen=True)
class GpuTransfer:
    """One block moved, or not, between the file and a GPU.

    Attributes
    ----------
    gpu : int
        CUDA's index.
    pci : str
        PCI address.
    ok : bool
        Whether the block moved.
    reason, remedy : str
        Why not, and what helps.
    tried : bool
        Whether cuFile was asked at all; not where CUDA itself refused, as on a GPU that is full or used exclusively.
    """

    gpu: int
    pci: str
    ok: bool
    reason: str = ""
    remedy: str = ""
    tried: bool = True


@dataclass(frozen=True)
class Proof:
    """What a trial found.

    Attributes
    ----------
    ok : bool
        Whether the file was registered and every transfer that cuFile was asked for succeeded.
    reason, remedy : str
        Why not, and what helps.
    driver_opened, registered : bool
        How far it came.
    refused : bool
        Whether cuFile answered with an error, rather than hanging or ending the process.
    forbade_compatibility : bool
        Whether libcufile took the order not to fall back to compatibility mode.
    nvfs_version : tuple of int
        Version of nvidia-fs that libcufile works with; (0, 0) where it takes no part.
    status_flags, features : int
        `torchdirect.cufile.structs.DriverStatus` and `Feature` bits.
    tried : bool
        Whether cuFile was asked at all; not where no file could be opened or no process started for it.
    symbols : tuple of str
        Which of the newer functions this libcufile has.
    transfers : tuple of GpuTransfer
        One per GPU that was looked at.
    """

    ok: bool
    reason: str = ""
    remedy: str = ""
    driver_opened: bool = False
    registered: bool = False
    refused: bool = False
    forbade_compatibility: bool = False
    nvfs_version: tuple[int, int] = (0, 0)
    status_flags: int = 0
    features: int = 0
    tried: bool = True
    symbols: tuple[str, ...] = ()
    transfers: tuple[GpuTransfer, ...] = ()

    def on_gpu(self, pci: str, index: int) -> GpuTransfer | None:
        """Return the transfer of a GPU, by its PCI address, else by its index."""
        by_address = next((t for t in self.transfers if pci and _short(t.pci) == _short(pci)), None)
        return by_address or next((t for t in self.transfers if not pci and t.gpu == index), None)


def _short(pci: str) -> str:
    # CUDA writes the domain with eight digits, the kernel with four.
    domain, _, rest = pci.lower().partition(":")
    return f"{int(domain, 16):x}:{rest}" if rest and all(c in "0123456789abcdef" for c in domain) else pci.lower()


def prove(
    path_or_fd: system.PathOrFd,
    *,
    forbid_compatibility: bool = True,
    writable: bool = False,
    gpu: int | Literal["all", "none"] = "all",
    timeout: float = 30.0,
) -> Proof:
    """Let a child process register a file with cuFile and move one block between it and GPUs.

    Parameters
    ----------
    path_or_fd : path or int
        The file. For a directory, or a file without a name, a temporary file in the directory stands in.
    forbid_compatibility : bool, optional
        Whether libcufile is told not to fall back to compatibility mode.
    writable : bool, optional
        Whether the first block of the file may be overwritten. Otherwise it is only read.
    gpu : int, "all" or "none", optional
        Which GPUs to move a block to: CUDA's index of one, all of them, or none, which only registers the file. Every
        one costs a CUDA context, some hundred MiB of its memory for a moment.
    timeout : float, optional
        Seconds until the child is killed.

    Returns
    -------
    Proof
        Never raises for what cuFile or the file does.
    """
    # The probe also knows WSL and the abort at driver open, and remembers its answer.
    probed = driver.probe(timeout)
    if not probed.ok:
        return Proof(False, probed.reason, probed.remedy)
    try:
        location = library.find()
        if location is None:
            return Proof(False, "libcufile was not found", "install the CUDA toolkit, or 'pip install nvidia-cufile'")
        with _opened(path_or_fd, writable) as (fd, may_write):
            size = _BLOCK if os.fstat(fd).st_size >= _BLOCK else 0
            arguments = [location.path, str(gpu), *(str(int(a)) for a in (fd, forbid_compatibility, may_write, size))]
            return _run(arguments, fd, forbid_compatibility, timeout)
    except CuFileUnavailableError as error:
        return Proof(False, error.reason, error.remedy)
    except OSError as error:
        reason = f"no file could be opened with O_DIRECT to try cuFile on: {os.strerror(error.errno or 0)}"
        return Proof(
            False, reason, "name a directory that you may write, on a file system with direct I/O", tried=False
        )


@contextmanager
def trial_file(directory: str, nbytes: int = _BLOCK) -> Iterator[str]:
    """Make a file of zeros for the length of a ``with`` block, and yield its path; it is removed whatever happens.

    Raises
    ------
    OSError
        If it cannot be made.
    """
    # It needs a name: libcufile opens the file again by its name, and answers 5031 or 5019 to one from O_TMPFILE.
    path = os.path.join(directory, f"{_PREFIX}{secrets.token_hex(8)}")
    try:
        # Within the try block, so that there is no moment in which Ctrl-C would leave the file behind.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(nbytes))
            os.fsync(fd)
        finally:
            os.close(fd)
        yield path
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


@contextmanager
def _opened(path_or_fd: system.PathOrFd, writable: bool) -> Iterator[tuple[int, bool]]:
    """Open the file with ``O_DIRECT``, or a temporary one in its place; yield it and whether it may be written."""
    # A descriptor is opened anew through /proc: O_DIRECT must not be set on its other users.
    path = f"/proc/self/fd/{path_or_fd}" if isinstance(path_or_fd, int) else os.fsdecode(path_or_fd)
    status = os.stat(path)
    if not status.st_nlink:
        # A file without a name, whose directory must do.
        path = os.path.dirname(os.readlink(path))
        status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        with trial_file(path) as name, _opened(name, True) as opened:
            yield opened
        return
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_DIRECT | os.O_CLOEXEC)
    try:
        yield fd, writable
    finally:
        os.close(fd)


def _run(arguments: list[str], fd: int, strict: bool, timeout: float) -> Proof:
    environment = {"CUFILE_ALLOW_COMPAT_MODE": "false"} if strict else {}
    try:
        ended = child.python(_CHILD, arguments, timeout, environment=environment, pass_fds=(fd,))
    except OSError as error:
        return Proof(
            False, f"a trial of cuFile could not start: {error}", "set TMPDIR to a writable folder", tried=False
        )
    return judge(_steps(ended.stdout), ended.returncode, ended.logged)


def _steps(output: bytes) -> list[dict[str, Any]]:
    lines = (line for line in output.splitlines() if line.startswith(b"PROOF "))
    return [json.loads(line.removeprefix(b"PROOF ")) for line in lines]


def _name(step: dict[str, Any]) -> str:
    return str(step["step"])


def judge(steps: list[dict[str, Any]], returncode: int | None, logged: str = "") -> Proof:
    """Make a proof of what the child wrote, how it ended (None: not in time) and the first error in its log."""
    told: dict[str, dict[str, Any]] = {_name(step): step for step in steps}
    known: dict[str, Any] = {
        "driver_opened": "open" in told and told["open"]["status"][0] in (0, _ALREADY_OPEN),
        "forbade_compatibility": bool(told.get("symbols", {}).get("forbade")),
        "symbols": tuple(told.get("symbols", {}).get("symbols", ())),
    }
    if "properties" in told:
        major, minor = told["properties"]["nvfs"]
        known.update(nvfs_version=(major, minor), status_flags=told["properties"]["flags"])
        known["features"] = told["properties"]["features"]
    detail = f" (cufile.log: {logged})" if logged else ""
    for step, function in (("open", "cuFileDriverOpen"), ("register", "cuFileHandleRegister")):
        failure = decode_status(*told[step]["status"]) if step in told else None
        if failure is not None and failure.code != _ALREADY_OPEN:
            return Proof(False, _text(function, failure) + detail, failure.remedy, refused=True, **known)
    known["registered"] = "register" in told
    known["transfers"] = transfers = tuple(_transfer(step) for step in steps if _name(step) == "gpu")
    if "end" not in told:
        last = _name(steps[-1]) if steps else "start"
        if returncode is None:
            reason = f"a trial of cuFile did not end in time; its last step was '{last}'{detail}"
            return Proof(False, reason, "check that nvidia-smi answers, and see dmesg", **known)
        reason = f"cuFile ended a trial process with {_ending(returncode)} after the step '{last}'{detail}"
        return Proof(False, reason, "use a host transfer type; look for the cause in cufile.log", **known)
    failed = next((transfer for transfer in transfers if transfer.tried and not transfer.ok), None)
    if failed is not None:
        return Proof(False, f"GPU {failed.gpu}: {failed.reason}{detail}", failed.remedy, **known)
    return Proof(True, **known)


def _ending(returncode: int) -> str:
    try:
        return signal.Signals(-returncode).name if returncode < 0 else f"status {returncode}"
    except ValueError:
        return f"signal {-returncode}"


def _transfer(step: dict[str, Any]) -> GpuTransfer:
    index, pci = int(step["index"]), str(step["pci"])
    if step["cuda"]:
        reason = f"no CUDA context and memory for a trial: {cuda_error_name(step['cuda'])} ({step['cuda']})"
        return GpuTransfer(index, pci, False, reason, "free the GPU (nvidia-smi shows who uses it)", tried=False)
    for function in ("cuFileWrite", "cuFileRead"):
        if function in step:
            failure = decode_transfer(*step[function])
            if failure is not None:
                return GpuTransfer(index, pci, False, _text(function, failure), failure.remedy)
            if step[function][0] < _BLOCK:
                reason = f"{function} moved {step[function][0]} of {_BLOCK} bytes"
                return GpuTransfer(index, pci, False, reason, "look for the cause in cufile.log")
    return GpuTransfer(index, pci, True)


def _text(function: str, failure: Failure) -> str:
    return f"{function} answers {failure.name} ({failure.code or failure.errno}): {failure.meaning}"
