"""Save and load PyTorch checkpoints over the shortest path between storage and GPU memory.

>>> import torchdirect as td
>>> td.save(model.state_dict(), "ckpt.pt")
>>> state = td.load("ckpt.pt", map_location="cuda")
>>> print(td.last_transfer())
"""

from torchdirect import safetensors
from torchdirect.checkpoint import load, save
from torchdirect.conversion import Converted, convert
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
from torchdirect.in_place import load_into
from torchdirect.lazy import CheckpointHandle, TensorSlice
from torchdirect.lazy import open_checkpoint as open
from torchdirect.memory import release_staging
from torchdirect.patch import Patch, patch_torch
from torchdirect.replicas import replicated
from torchdirect.road import TransferFallbackWarning
from torchdirect.sharded import load_sharded, save_sharded
from torchdirect.tensor_file import TensorInfo
from torchdirect.transfer import TransferReport, TransferType, last_transfer
from torchdirect.verification import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "BufferRegistration",
    "CheckpointHandle",
    "Converted",
    "CorruptCheckpointError",
    "DirectFile",
    "LoadError",
    "Patch",
    "SaveError",
    "Settings",
    "SettingsError",
    "StreamTransfer",
    "TensorInfo",
    "TensorSlice",
    "TorchDirectError",
    "TransferBatch",
    "TransferFallbackWarning",
    "TransferReport",
    "TransferType",
    "TransferUnavailableError",
    "Verification",
    "convert",
    "deregister_buffer",
    "last_transfer",
    "load",
    "load_into",
    "load_sharded",
    "open",
    "patch_torch",
    "register_buffer",
    "release_staging",
    "replicated",
    "safetensors",
    "save",
    "save_sharded",
    "settings",
    "verify",
]
