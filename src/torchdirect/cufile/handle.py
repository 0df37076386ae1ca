"""Registered files: synchronous reads and writes between a file and device memory."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from dataclasses import dataclass, replace
from types import TracebackType
from typing import final

from . import driver, structs
from .errors import CuFileError, Failure, decode_status, decode_transfer
from .library import Library

_UDEV_DATA = "/run/udev/data"
_MOUNTINFO = "/proc/self/mountinfo"
_NOT_REGISTERED, _INTERNAL_ERROR, _NVFS_SETUP_ERROR, _NOT_SUPPORTED = 5027, 5030, 5033, 5008

_lock = threading.Lock()
_live = 0


def registered() -> int:
    """Return how many file handles this binding holds registered; for leak tests."""
    return _live


@dataclass(frozen=True)
class FileFacts:
    """Where a file lives: what an error message needs to say.

    ``device`` is ``major:minor``; ``source`` is what is mounted, such as ``/dev/nvme0n1p1``. Unknown facts are "".
    """

    file_system: str
    device: str
    source: str
    has_udev_record: bool

    def __str__(self) -> str:
        kind = f"{self.file_system} file system" if self.file_system else "unknown file system"
        source = f" on {self.source}" if self.source else ""
        return f"{kind}{source}, device {self.device or 'unknown'}"


def file_facts(fd: int) -> FileFacts:
    """Find out which file system and device hold an open file; never raises."""
    try:
        number = os.fstat(fd).st_dev
    except OSError:
        return FileFacts("", "", "", False)
    device = f"{os.major(number)}:{os.minor(number)}"
    record = os.path.exists(os.path.join(_UDEV_DATA, f"b{device}"))
    try:
        with open(_MOUNTINFO) as mounts:
            for line in mounts:
                # proc(5): the third field is major:minor; type and source follow the lone dash.
                before, _, after = line.partition(" - ")
                if before.split()[2] == device:
                    kind, source = after.split()[:2]
                    return FileFacts(kind, device, source, record)
    except (OSError, IndexError, ValueError):
        pass
    return FileFacts("", device, "", record)


def _remedy(code: int, facts: FileFacts, remedy: str) -> str:
    if code not in (_NOT_REGISTERED, _INTERNAL_ERROR, _NVFS_SETUP_ERROR, _NOT_SUPPORTED):
        return remedy
    if facts.file_system == "overlay":
        return "keep the file on a bind mount or volume, not on the container's overlay; " + remedy
    if code != _NVFS_SETUP_ERROR and facts.device and not facts.has_udev_record:
        return (
            f"udev has no record {_UDEV_DATA}/b{facts.device} here: mount the host's udev data "
            f"(docker run -v /run/udev:/run/udev:ro)"
        )
    return remedy


def path_of(fd: int) -> str | None:
    """Return the path of an open file, for messages; None when it is not known."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None


def _deregister(library: Library, raw: int, owner: int) -> None:
    global _live
    # After a fork the registration belongs to the parent.
    if os.getpid() != owner:
        return
    try:
        library.function("cuFileHandleDeregister")(raw)
    finally:
        with _lock:
            _live -= 1
        driver.release()


@final
class FileHandle:
    """A file registered with cuFile.

    The handle holds the driver session open, and deregisters when closed, at the end of a ``with`` block, when it is
    garbage, or at the end of the process. It does not own the descriptor: close that after the handle. Closing a
    handle while transfers on it run is the caller's error. Transfers may run from many threads at a time.

    Parameters
    ----------
    fd
        An open descriptor of a regular file. GPUDirect needs ``O_DIRECT``; compatibility mode takes others too.
    path
        The path for messages; by default the one that the kernel knows.

    Raises
    ------
    CuFileError
        When registration fails; the message names path, file system, device and remedy.
    CuFileUnavailableError
        When the driver cannot be opened.
    """

    def __init__(self, fd: int, *, path: str | None = None) -> None:
        global _live
        self.fd = fd
        self.path = path if path is not None else path_of(fd)
        library = driver.acquire()
        try:
            descr = structs.Descr(type=structs.FileHandleType.OPAQUE_FD)
            descr.handle.fd = fd
            raw = ctypes.c_void_p()
            status = library.function("cuFileHandleRegister")(ctypes.byref(raw), ctypes.byref(descr))
            self.check(status, "cuFileHandleRegister")
        except BaseException:
            driver.release()
            raise
        with _lock:
            _live += 1
        self._raw = raw.value or 0
        self._read = library.function("cuFileRead")
        self._write = library.function("cuFileWrite")
        self._close = weakref.finalize(self, _deregister, library, self._raw, os.getpid())

    def _error(self, failure: Failure, function: str, detail: str = "") -> CuFileError:
        facts = file_facts(self.fd)
        if failure.code:
            failure = replace(failure, remedy=_remedy(failure.code, facts, failure.remedy))
        return CuFileError(failure, function, self.path, "; ".join(filter(None, (detail, str(facts)))))

    def check(self, status: structs.Status, function: str, detail: str = "") -> None:
        """Raise :class:`CuFileError` about this file unless `status` says success."""
        failure = decode_status(status.err, status.cu_err)
        if failure is not None:
            raise self._error(failure, function, detail)

    @property
    def closed(self) -> bool:
        """Whether the handle is deregistered."""
        return not self._close.alive

    @property
    def raw(self) -> int:
        """The ``CUfileHandle_t``; ValueError when closed."""
        if not self._close.alive:
            raise ValueError(f"the cuFile handle of {self.path!r} is closed")
        return self._raw

    def read(self, device_ptr: int, nbytes: int, file_offset: int = 0, ptr_offset: int = 0) -> int:
        """Read from the file into device memory; blocks, and lets other Python threads run.

        Parameters
        ----------
        device_ptr
            Base address: of the registered buffer when it is registered, else of the memory.
        nbytes, file_offset, ptr_offset
            Bytes to move, where in the file, and where from `device_ptr`.

        Returns
        -------
        int
            Bytes moved. Fewer than `nbytes` at the end of the file, or when cuFile stops early: then go on from there.

        Raises
        ------
        CuFileError
            ``errno`` tells an error of the operating system, ``code`` one of cuFile.
        """
        return self._transfer("cuFileRead", device_ptr, nbytes, file_offset, ptr_offset)

    def write(self, device_ptr: int, nbytes: int, file_offset: int = 0, ptr_offset: int = 0) -> int:
        """Write device memory into the file; see :meth:`read` for parameters, result and errors.

        GPU work that fills the memory must have finished: cuFile does not wait for streams.
        """
        return self._transfer("cuFileWrite", device_ptr, nbytes, file_offset, ptr_offset)

    def _transfer(self, function: str, device_ptr: int, nbytes: int, file_offset: int, ptr_offset: int) -> int:
        check_range(nbytes, file_offset, ptr_offset)
        call = self._read if function == "cuFileRead" else self._write
        ctypes.set_errno(0)
        result = int(call(self.raw, device_ptr, nbytes, file_offset, ptr_offset))
        if result >= 0:
            return result
        failure = decode_transfer(result, ctypes.get_errno())
        assert failure is not None
        raise self._error(failure, function, f"{nbytes} bytes at offset {file_offset}")

    def close(self) -> None:
        """Deregister; closing twice is allowed."""
        self._close()

    def __enter__(self) -> FileHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_range(nbytes: int, file_offset: int, ptr_offset: int) -> None:
    """Raise ValueError for a size or offset that C would take for another one: negative, or beyond 2**63 - 1."""
    if max(file_offset, ptr_offset) + nbytes >= 1 << 63:
        raise ValueError(
            f"the range ends beyond 2**63 - 1: nbytes={nbytes}, file_offset={file_offset}, ptr_offset={ptr_offset}"
        )
    if nbytes < 0 or file_offset < 0 or ptr_offset < 0:
        raise ValueError(
            f"sizes and offsets cannot be negative: nbytes={nbytes}, file_offset={file_offset}, ptr_offset={ptr_offset}"
        )
