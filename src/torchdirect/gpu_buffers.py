"""GPU memory that the user registered with cuFile, to be reused by many transfers."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from torchdirect import cufile
from torchdirect.errors import TransferUnavailableError

_lock = threading.Lock()
_buffers: dict[int, cufile.RegisteredBuffer] = {}


def registered_base(tensor: torch.Tensor) -> int | None:
    """Return where the registered buffer of a tensor begins; None if its storage is not registered."""
    address = tensor.untyped_storage().data_ptr()
    return address if address in _buffers else None


class BufferRegistration:
    """A registered buffer; leaving a ``with`` block deregisters it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage  # keeps the memory alive while cuFile knows it

    def __enter__(self) -> BufferRegistration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._storage.data_ptr() in _buffers:
            deregister_buffer(self._storage)


def register_buffer(buffer: torch.Tensor | torch.UntypedStorage) -> BufferRegistration:
    """Register the memory of a GPU tensor with cuFile, so that the disk can reach it without a buffer in between.

    It pays for memory that many transfers use, such as a pool of KV-cache blocks, on a machine where GPUDirect Storage
    is real; in cuFile's compatibility mode it gains nothing, and `GPU_ASYNC` refuses such memory. All of the tensor's
    storage is registered.

    Parameters
    ----------
    buffer
        A tensor or storage on a CUDA device.

    Returns
    -------
    BufferRegistration
        Usable in a ``with`` block; or call `deregister_buffer`. The memory must outlive the registration.

    Raises
    ------
    ValueError
        If it is not GPU memory, is empty, or is registered already.
    TransferUnavailableError
        If cuFile cannot register it.
    """
    storage = _storage(buffer)
    if storage.device.type != "cuda" or not storage.nbytes():
        raise ValueError(f"cuFile registers GPU memory, not {storage.nbytes()} bytes on {storage.device}")
    address = storage.data_ptr()
    with _lock:
        if address in _buffers:
            raise ValueError(f"the buffer at {address:#x} is registered already; deregister_buffer() it first")
        try:
            with torch.cuda.device(storage.device):
                _buffers[address] = cufile.RegisteredBuffer(address, storage.nbytes())
        except cufile.CuFileUnavailableError as exc:
            raise TransferUnavailableError("GDS", exc.reason, exc.remedy) from exc
        except cufile.CuFileError as exc:
            raise TransferUnavailableError("GDS", str(exc), "Go on without: transfers do not need it") from exc
    return BufferRegistration(storage)


def deregister_buffer(buffer: torch.Tensor | torch.UntypedStorage) -> None:
    """Undo `register_buffer`. No transfer may use the memory meanwhile.

    Raises
    ------
    ValueError
        If it is not registered.
    """
    address = _storage(buffer).data_ptr()
    with _lock:
        registered = _buffers.pop(address, None)
    if registered is None:
        raise ValueError(f"the buffer at {address:#x} is not registered")
    registered.close()


def _storage(buffer: torch.Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    return buffer.untyped_storage() if isinstance(buffer, torch.Tensor) else buffer
