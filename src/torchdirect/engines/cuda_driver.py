"""The few calls of the CUDA driver that workers make once per window, and what PyTorch does not offer.

A load from the page cache runs at the speed of memory, with a dozen threads under one interpreter lock. There a
``Tensor.copy_`` with its views costs several times what the driver's call does, and a thread that lets go of the lock
may wait long to get it back. Calls that only queue work, or ask, keep it.

A thread binds a device before it makes other calls for it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_NOT_READY = 600


class CudaDriver:
    """Entry points of libcuda. Streams and events are handles; addresses are those that tensors give.

    Parameters
    ----------
    keeping
        The library, called with the interpreter lock held.
    releasing
        The library, called without it.
    """

    def __init__(self, keeping: ctypes.CDLL, releasing: ctypes.CDLL) -> None:
        handle, address, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
        self._to_device = _function(keeping.cuMemcpyHtoDAsync_v2, address, handle, size, handle)
        self._from_device = _function(keeping.cuMemcpyDtoHAsync_v2, handle, address, size, handle)
        self._context_retain = _function(keeping.cuDevicePrimaryCtxRetain, ctypes.POINTER(handle), ctypes.c_int)
        self._context_set = _function(keeping.cuCtxSetCurrent, handle)
        self._contexts: dict[int, int] = {}
        self._stream_create = _function(keeping.cuStreamCreate, ctypes.POINTER(handle), ctypes.c_uint)
        self._event_create = _function(keeping.cuEventCreate, ctypes.POINTER(handle), ctypes.c_uint)
        self._event_destroy = _function(keeping.cuEventDestroy_v2, handle)
        self._event_record = _function(keeping.cuEventRecord, handle, handle)
        self._event_query = _function(keeping.cuEventQuery, handle)
        self._event_synchronize = _function(releasing.cuEventSynchronize, handle)
        self._exchange_mode = _function(keeping.cuThreadExchangeStreamCaptureMode, ctypes.POINTER(ctypes.c_int))
        self._error_string = _function(keeping.cuGetErrorString, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))

    def bind(self, device: int) -> None:
        """Make the context that PyTorch uses on a device, by index, the current one of this thread.

        PyTorch itself does that with its first call of the CUDA runtime in a thread, and not before.
        """
        context = self._contexts.get(device)
        if context is None:
            found = ctypes.c_void_p()
            # Retained for as long as the process lives, as by the CUDA runtime.
            if error := self._context_retain(ctypes.byref(found), device):
                self._fail(error, f"looking for the context of device {device}")
            context = self._contexts[device] = found.value or 0
        if error := self._context_set(context):
            self._fail(error, f"binding device {device}")

    def to_device(self, device_address: int, host_address: int, nbytes: int, stream: int) -> None:
        """Queue a copy of `nbytes` from pinned host memory to a GPU."""
        if error := self._to_device(device_address, host_address, nbytes, stream):
            self._fail(error, f"copying {nbytes} bytes from host memory to the GPU")

    def from_device(self, host_address: int, device_address: int, nbytes: int, stream: int) -> None:
        """Queue a copy of `nbytes` from a GPU to pinned host memory."""
        if error := self._from_device(host_address, device_address, nbytes, stream):
            self._fail(error, f"copying {nbytes} bytes from the GPU to host memory")

    def create_stream(self) -> int:
        """Return a new stream of the bound device, which waits for no other."""
        stream = ctypes.c_void_p()
        if error := self._stream_create(ctypes.byref(stream), _STREAM_NON_BLOCKING):
            self._fail(error, "creating a stream")
        return stream.value or 0

    def create_event(self) -> int:
        """Return a new event of the bound device."""
        event = ctypes.c_void_p()
        if error := self._event_create(ctypes.byref(event), _EVENT_DISABLE_TIMING):
            self._fail(error, "creating an event")
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Destroy an event that nobody waits for."""
        self._event_destroy(event)

    def record(self, event: int, stream: int) -> None:
        """Let `event` stand for everything that is queued on `stream` now."""
        if error := self._event_record(event, stream):
            self._fail(error, "recording an event")

    def wait(self, event: int) -> None:
        """Wait until everything has ended that `event` stands for."""
        error = self._event_query(event)
        if error == _NOT_READY:
            error = self._event_synchronize(event)
        if error:
            self._fail(error, "waiting for the GPU")

    def exchange_capture_mode(self, mode: int = _CAPTURE_MODE_RELAXED) -> int:
        """Set what this thread may do while another captures a CUDA graph; return what it might before.

        By default a wait, a query or a registration of memory in any thread breaks a capture. The relaxed mode allows
        them to a thread that touches nothing which is captured.
        """
        value = ctypes.c_int(mode)
        if error := self._exchange_mode(ctypes.byref(value)):
            self._fail(error, "setting the capture mode")
        return value.value

    def _fail(self, error: int, doing: str) -> None:
        text = ctypes.c_char_p()
        self._error_string(error, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {error} while {doing}: {(text.value or b'unknown').decode()}")


def _function(function: Callable[..., int], *arguments: type) -> Callable[..., int]:
    function.argtypes = arguments  # type: ignore[attr-defined]
    return function


@functools.cache
def cuda_driver() -> CudaDriver | None:
    """Return the driver's calls; None where there is no libcuda, as with builds of PyTorch for other GPUs."""
    try:
        return CudaDriver(ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None
