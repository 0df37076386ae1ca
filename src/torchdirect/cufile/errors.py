"""What cuFile's answers mean, and the exceptions that carry them.

cuFile reports failure in three ways, and each has its own decoder here:

- most functions return ``CUfileError_t``: a cuFile code and a CUDA code (:func:`decode_status`);
- ``cuFileRead`` and ``cuFileWrite`` return a byte count, or -1 with ``errno`` set, or a cuFile code made negative
  (:func:`decode_transfer`);
- batch events and stream requests store a byte count, a negative errno or a negative cuFile code
  (:func:`decode_completion`).
"""

from __future__ import annotations

import errno as errno_module
import os
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

#: ``CUFILEOP_BASE_ERR``: every cuFile code lies above it, every errno below it.
BASE_CODE = 5000
_CUDA_DRIVER_ERROR = 5011


@dataclass(frozen=True)
class ErrorInfo:
    """One ``CUfileOpError`` code: its name in ``cufile.h``, what it means and what helps."""

    code: int
    name: str
    meaning: str
    remedy: str


_LOG = "look for the cause in cufile.log (CUFILE_LOGFILE_PATH sets where it is written)"
_RETRY = "retry; if it happens again, " + _LOG

_ROWS: tuple[tuple[int, str, str, str], ...] = (
    (
        1,
        "CU_FILE_DRIVER_NOT_INITIALIZED",
        "the cuFile driver is not open, or nvidia-fs is not loaded and compatibility mode is off",
        "load nvidia-fs (modprobe nvidia-fs) or set allow_compat_mode to true in cufile.json",
    ),
    (2, "CU_FILE_DRIVER_INVALID_PROPS", "a driver property is not valid", "correct the properties in cufile.json"),
    (
        3,
        "CU_FILE_DRIVER_UNSUPPORTED_LIMIT",
        "a driver property is outside its range",
        "use a multiple of 4 KiB within the driver's limits",
    ),
    (
        4,
        "CU_FILE_DRIVER_VERSION_MISMATCH",
        "libcufile and the nvidia-fs kernel module do not fit together",
        "install the nvidia-fs release that belongs to this CUDA version",
    ),
    (
        5,
        "CU_FILE_DRIVER_VERSION_READ_ERROR",
        "the version of the nvidia-fs kernel module cannot be read",
        "check that nvidia-fs is loaded and /proc/driver/nvidia-fs is readable here",
    ),
    (6, "CU_FILE_DRIVER_CLOSING", "the cuFile driver is being closed", "finish every transfer before closing"),
    (
        7,
        "CU_FILE_PLATFORM_NOT_SUPPORTED",
        "GPUDirect Storage does not support this platform",
        "use a host transfer type, or allow_compat_mode in cufile.json",
    ),
    (
        8,
        "CU_FILE_IO_NOT_SUPPORTED",
        "GPUDirect Storage does not support this file's file system or device",
        "put the file on a supported file system (ext4 or xfs on NVMe, Lustre, ...), or set allow_compat_mode",
    ),
    (
        9,
        "CU_FILE_DEVICE_NOT_SUPPORTED",
        "GPUDirect Storage does not support this GPU",
        "use a data-centre GPU, or a host transfer type",
    ),
    (10, "CU_FILE_NVFS_DRIVER_ERROR", "the nvidia-fs kernel module refused a request", "see dmesg; " + _LOG),
    (
        11,
        "CU_FILE_CUDA_DRIVER_ERROR",
        "a CUDA driver call failed",
        "see the CUDA error beside this one; make the GPU's context current before calling",
    ),
    (12, "CU_FILE_CUDA_POINTER_INVALID", "the address is no device pointer", "pass the address of CUDA memory"),
    (
        13,
        "CU_FILE_CUDA_MEMORY_TYPE_INVALID",
        "the address belongs to a kind of memory that cuFile does not take",
        "use memory from cudaMalloc, not managed or pool memory",
    ),
    (
        14,
        "CU_FILE_CUDA_POINTER_RANGE_ERROR",
        "the range leaves the allocation that it starts in",
        "keep address + offset + size inside one allocation",
    ),
    (
        15,
        "CU_FILE_CUDA_CONTEXT_MISMATCH",
        "the memory belongs to another CUDA context than the current one",
        "make the memory's own device current before calling",
    ),
    (
        16,
        "CU_FILE_INVALID_MAPPING_SIZE",
        "the buffer is larger than the memory that may be pinned",
        "register smaller pieces, transfer unregistered, or raise max_device_pinned_mem_size_kb in cufile.json",
    ),
    (
        17,
        "CU_FILE_INVALID_MAPPING_RANGE",
        "the transfer leaves the registered range",
        "keep offset + size inside the registered buffer",
    ),
    (18, "CU_FILE_INVALID_FILE_TYPE", "the file is of a type that cuFile does not take", "use a regular file"),
    (
        19,
        "CU_FILE_INVALID_FILE_OPEN_FLAG",
        "the file was opened with flags that cuFile does not take",
        "open it with O_DIRECT and without O_APPEND",
    ),
    (20, "CU_FILE_DIO_NOT_SET", "the file was opened without O_DIRECT", "open it with O_DIRECT"),
    (
        22,
        "CU_FILE_INVALID_VALUE",
        "an argument is not valid",
        "check sizes, offsets and alignment (4096 bytes), and the limit of batch entries",
    ),
    (
        23,
        "CU_FILE_MEMORY_ALREADY_REGISTERED",
        "this buffer is registered already",
        "use the registration that exists, or deregister it first",
    ),
    (24, "CU_FILE_MEMORY_NOT_REGISTERED", "this buffer is not registered", "register the buffer first"),
    (
        25,
        "CU_FILE_PERMISSION_DENIED",
        "access to the driver or the file was refused",
        "check the permissions of the file and of /dev/nvidia-fs*",
    ),
    (26, "CU_FILE_DRIVER_ALREADY_OPEN", "the cuFile driver is open already", "set parameters before it is opened"),
    (
        27,
        "CU_FILE_HANDLE_NOT_REGISTERED",
        "the file is not registered; at registration, udev has no record of the disk below it",
        "in a container, mount the host's udev data (docker run -v /run/udev:/run/udev:ro)",
    ),
    (
        28,
        "CU_FILE_HANDLE_ALREADY_REGISTERED",
        "this file descriptor is registered already",
        "use the handle that exists, or a second descriptor",
    ),
    (29, "CU_FILE_DEVICE_NOT_FOUND", "the GPU was not found", "check nvidia-smi and CUDA_VISIBLE_DEVICES"),
    (
        30,
        "CU_FILE_INTERNAL_ERROR",
        "cuFile failed inside; at registration, it often cannot identify the volume below the file",
        "in a container, mount /run/udev and use a bind mount instead of the overlay; " + _LOG,
    ),
    (31, "CU_FILE_GETNEWFD_FAILED", "no file descriptor was left", "raise the limit of open files (ulimit -n)"),
    (
        33,
        "CU_FILE_NVFS_SETUP_ERROR",
        "cuFile could not be initialised: libcuda.so.1 or nvidia-fs is missing or refused to start",
        "install the NVIDIA driver, pass the GPU (and /dev/nvidia-fs*) into the container; " + _LOG,
    ),
    (
        34,
        "CU_FILE_IO_DISABLED",
        "cufile.json switches GPUDirect Storage off for this file",
        "remove the file system from the deny list in cufile.json",
    ),
    (35, "CU_FILE_BATCH_SUBMIT_FAILED", "a batch could not be submitted", "submit fewer entries; " + _LOG),
    (
        36,
        "CU_FILE_GPU_MEMORY_PINNING_FAILED",
        "GPU memory could not be pinned (BAR1 space may be used up)",
        "register smaller pieces, transfer unregistered, or end other processes that pin GPU memory",
    ),
    (37, "CU_FILE_BATCH_FULL", "the batch has no room left", "collect completed entries before submitting more"),
    (
        38,
        "CU_FILE_ASYNC_NOT_SUPPORTED",
        "stream operations are not supported here",
        "use synchronous or batch transfers, or a newer NVIDIA driver",
    ),
    # Up to libcufile 1.14, 5039 was the end marker CU_FILE_IO_MAX_ERROR; 1.15 moved that to 5050.
    (39, "CU_FILE_INTERNAL_BATCH_SETUP_ERROR", "setting up a batch failed inside", _RETRY),
    (40, "CU_FILE_INTERNAL_BATCH_SUBMIT_ERROR", "submitting a batch failed inside", _RETRY),
    (41, "CU_FILE_INTERNAL_BATCH_GETSTATUS_ERROR", "asking for the state of a batch failed inside", _RETRY),
    (42, "CU_FILE_INTERNAL_BATCH_CANCEL_ERROR", "cancelling a batch failed inside", _RETRY),
    (43, "CU_FILE_NOMEM_ERROR", "cuFile ran out of memory", "free host or GPU memory and retry"),
    (44, "CU_FILE_IO_ERROR", "the storage reported an error", "see dmesg; " + _LOG),
    (
        45,
        "CU_FILE_INTERNAL_BUF_REGISTER_ERROR",
        "registering a buffer failed inside",
        "register smaller pieces, or transfer unregistered; " + _LOG,
    ),
    (46, "CU_FILE_HASH_OPR_ERROR", "a lookup table inside cuFile failed", _RETRY),
    (
        47,
        "CU_FILE_INVALID_CONTEXT_ERROR",
        "there is no valid CUDA context",
        "make the GPU's context current on this thread before calling",
    ),
    (48, "CU_FILE_NVFS_INTERNAL_DRIVER_ERROR", "the nvidia-fs kernel module failed inside", "see dmesg; " + _LOG),
    (
        49,
        "CU_FILE_BATCH_NOCOMPAT_ERROR",
        "the batch needs compatibility mode, which is off",
        "set allow_compat_mode to true in cufile.json",
    ),
    (50, "CU_FILE_IO_MAX_ERROR", "this is the end marker of the list, no real error", _LOG),
)

#: Every ``CUfileOpError`` code of libcufile 1.15 but 0; 5021 and 5032 do not exist.
CODES: MappingProxyType[int, ErrorInfo] = MappingProxyType(
    {BASE_CODE + n: ErrorInfo(BASE_CODE + n, name, meaning, remedy) for n, name, meaning, remedy in _ROWS}
)

_CUDA_NAMES: MappingProxyType[int, str] = MappingProxyType(
    {
        1: "CUDA_ERROR_INVALID_VALUE",
        2: "CUDA_ERROR_OUT_OF_MEMORY",
        3: "CUDA_ERROR_NOT_INITIALIZED",
        4: "CUDA_ERROR_DEINITIALIZED",
        34: "CUDA_ERROR_STUB_LIBRARY",
        46: "CUDA_ERROR_DEVICE_UNAVAILABLE",
        100: "CUDA_ERROR_NO_DEVICE",
        101: "CUDA_ERROR_INVALID_DEVICE",
        201: "CUDA_ERROR_INVALID_CONTEXT",
        400: "CUDA_ERROR_INVALID_HANDLE",
        700: "CUDA_ERROR_ILLEGAL_ADDRESS",
        709: "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        719: "CUDA_ERROR_LAUNCH_FAILED",
        800: "CUDA_ERROR_NOT_PERMITTED",
        801: "CUDA_ERROR_NOT_SUPPORTED",
        802: "CUDA_ERROR_SYSTEM_NOT_READY",
        803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        804: "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        999: "CUDA_ERROR_UNKNOWN",
    }
)


def cuda_error_name(code: int) -> str:
    """Name a ``CUresult`` code, for example 2 as ``CUDA_ERROR_OUT_OF_MEMORY``."""
    return _CUDA_NAMES.get(code, f"CUresult {code}")


@dataclass(frozen=True)
class Failure:
    """A failure that cuFile reported.

    Attributes
    ----------
    code
        The ``CUfileOpError`` code, above 5000, or 0 when the operating system reported the error.
    errno
        The errno of the operating system, or ``EIO`` beside a cuFile code.
    name
        Name of the code, for example ``CU_FILE_INTERNAL_ERROR`` or ``ENOSPC``.
    meaning, remedy
        What happened, and what helps.
    cuda_error
        The ``CUresult`` beside the code, or 0.
    """

    code: int
    errno: int
    name: str
    meaning: str
    remedy: str
    cuda_error: int = 0


def describe_code(code: int, cuda_error: int = 0) -> Failure:
    """Describe a cuFile code (positive, above 5000); an unknown one gets a name that tells the number."""
    info = CODES.get(code)
    if info is None:
        meaning = "this cuFile code is not known; it may be newer than this binding"
        info = ErrorInfo(code, f"CU_FILE_ERROR_{code}", meaning, _LOG)
    meaning = info.meaning
    if cuda_error and (code == _CUDA_DRIVER_ERROR or cuda_error in _CUDA_NAMES):
        meaning += f" ({cuda_error_name(cuda_error)}, {cuda_error})"
    return Failure(code, errno_module.EIO, info.name, meaning, info.remedy, cuda_error)


_ERRNO_REMEDIES: MappingProxyType[int, str] = MappingProxyType(
    {
        errno_module.ENOSPC: "free space on the file system",
        errno_module.EDQUOT: "free space or raise the quota",
        errno_module.EIO: "see dmesg for errors of the disk; transfer smaller pieces or fewer at a time",
        errno_module.EINVAL: "align size, offsets and address to 4096 bytes for a file opened with O_DIRECT",
        errno_module.EBADF: "open the file in the mode that the transfer needs",
        errno_module.ENOMEM: "free host memory",
    }
)


def describe_errno(number: int, cuda_error: int = 0) -> Failure:
    """Describe an errno (positive); 0 stands for a failure that set none."""
    if number == 0:
        return Failure(0, errno_module.EIO, "EIO", "the call failed without setting errno", _LOG, cuda_error)
    name = errno_module.errorcode.get(number, f"errno {number}")
    return Failure(0, number, name, os.strerror(number), _ERRNO_REMEDIES.get(number, _LOG), cuda_error)


def _describe_magnitude(magnitude: int, cuda_error: int = 0) -> Failure:
    return describe_code(magnitude, cuda_error) if magnitude > BASE_CODE else describe_errno(magnitude, cuda_error)


def decode_status(err: int, cuda_error: int = 0) -> Failure | None:
    """Decode a ``CUfileError_t``.

    Parameters
    ----------
    err, cuda_error
        Its two fields. ``cufile.h`` takes the absolute value of ``err`` before it looks at it, and so does this.

    Returns
    -------
    Failure or None
        None for success. ``cuda_error`` alone is no failure: cuFile says to read it only beside an error.
    """
    return None if err == 0 else _describe_magnitude(abs(err), cuda_error)


def decode_transfer(result: int, errno_value: int) -> Failure | None:
    """Decode what ``cuFileRead`` or ``cuFileWrite`` returned.

    Parameters
    ----------
    result
        Bytes moved when not negative; -1 for an error of the operating system; else a negative cuFile code.
    errno_value
        errno right after the call; read only when `result` is -1.
    """
    if result >= 0:
        return None
    return describe_errno(errno_value) if result == -1 else _describe_magnitude(-result)


def decode_completion(value: int) -> Failure | None:
    """Decode what a batch event or a stream request stored.

    Parameters
    ----------
    value
        Bytes moved when not negative; else a negative errno (-5 is ``EIO``) or a negative cuFile code (-5030 is
        ``CU_FILE_INTERNAL_ERROR``).
    """
    if value >= 0:
        return None
    if value == -1:
        # EPERM by the rule, but also cuFile's way to say "see errno", which nobody can read after the fact.
        meaning = "not permitted, or an error of the operating system that cuFile did not pass on"
        return Failure(0, errno_module.EPERM, "EPERM", meaning, _LOG)
    return _describe_magnitude(-value)


class CuFileError(OSError):
    """A cuFile call failed.

    Attributes
    ----------
    failure : Failure
        The decoded answer; its fields are also attributes of the exception.
    code : int
        ``CUfileOpError`` code, or 0 when the operating system reported the error.
    errno : int
        errno of the operating system, or ``EIO`` beside a cuFile code.
    name : str
        Name of the code.
    cuda_error : int
        ``CUresult`` beside the code, or 0.
    function : str
        The cuFile function.
    path : str or None
        The file, when known.
    remedy : str
        What helps.
    """

    def __init__(self, failure: Failure, function: str, path: str | None = None, detail: str = "") -> None:
        super().__init__(failure.errno, failure.meaning)
        self.failure = failure
        self.code = failure.code
        self.name = failure.name
        self.cuda_error = failure.cuda_error
        self.remedy = failure.remedy
        self.function = function
        self.path = path
        self.detail = detail

    def __str__(self) -> str:
        number = self.failure.code or self.failure.errno
        where = f" for {self.path!r}" if self.path else ""
        detail = f" [{self.detail}]" if self.detail else ""
        failure = self.failure
        return f"{self.function} failed{where}: {failure.name} ({number}): {failure.meaning}{detail}; {failure.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.failure, self.function, self.path, self.detail)


class CuFileUnavailableError(RuntimeError):
    """cuFile cannot be used in this process; `reason` says why and `remedy` what helps."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.remedy)


class CuFileNotFoundError(CuFileUnavailableError):
    """libcufile was not found, or the file that was found cannot be loaded."""


class CuFileUnsupportedError(CuFileUnavailableError):
    """This libcufile is too old for the call."""


def check_status(err: int, cuda_error: int, function: str, path: str | None = None, detail: str = "") -> None:
    """Raise :class:`CuFileError` unless a ``CUfileError_t`` says success."""
    failure = decode_status(err, cuda_error)
    if failure is not None:
        raise CuFileError(failure, function, path, detail)
