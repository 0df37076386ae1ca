"""Save and load PyTorch checkpoints over the shortest path between storage and GPU memory.

>>> import torchdirect as td
>>> td.save(model.state_dict(), "ckpt.pt")
>>> state = td.load("ckpt.pt", map_location="cuda")
>>> print(td.last_transfer())
"""

from torchdirect.checkpoint import TransferFallbackWarning, load, save
from torchdirect.defaults import Settings, settings
from torchdirect.direct_file import DirectFile, StreamTransfer, TransferBatch
from torchdirect.errors import (
    CorruptCheckpointError,
    LoadError,
    SaveError,
    SettingsError,
    TorchDirectError,
    TransferUnavailableError,
)
from torchdirect.gpu_buffers import BufferRegistration, deregister_buffer, register_buffer
from torchdirect.memory import release_staging
from torchdirect.transfer import TransferReport, TransferType, last_transfer

__version__ = "0.1.0"

__all__ = [
    "BufferRegistration",
    "CorruptCheckpointError",
    "DirectFile",
    "LoadError",
    "SaveError",
    "Settings",
    "SettingsError",
    "StreamTransfer",
    "TorchDirectError",
    "TransferBatch",
    "TransferFallbackWarning",
    "TransferReport",
    "TransferType",
    "TransferUnavailableError",
    "deregister_buffer",
    "last_transfer",
    "load",
    "register_buffer",
    "release_staging",
    "save",
    "settings",
]
