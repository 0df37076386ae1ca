"""Save and load PyTorch checkpoints over the shortest path between storage and GPU memory.

>>> import torchdirect as td
>>> td.save(model.state_dict(), "ckpt.pt")
>>> state = td.load("ckpt.pt", map_location="cuda")
>>> print(td.last_transfer())
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchdirect import dcp, safetensors
    from torchdirect.background import save_async
    from torchdirect.checkpoint import load, save
    from torchdirect.conversion import Converted, convert
    from torchdirect.defaults import Settings, settings
    from torchdirect.direct_file import DirectFile, StreamTransfer, TransferBatch
    from torchdirect.errors import (
        CorruptCheckpointError,
        LoadError,
        SaveError,
        SavePendingError,
        SettingsError,
        TorchDirectError,
        TransferUnavailableError,
    )
    from torchdirect.gpu_buffers import BufferRegistration, deregister_buffer, register_buffer
    from torchdirect.in_place import load_into
    from torchdirect.lazy import CheckpointHandle, TensorSlice
    from torchdirect.lazy import open_checkpoint as open
    from torchdirect.manager import BrokenCheckpointWarning, CheckpointManager
    from torchdirect.memory import release_staging
    from torchdirect.patch import Patch, patch_torch
    from torchdirect.pending import PendingSave
    from torchdirect.replicas import replicated
    from torchdirect.road import TransferFallbackWarning
    from torchdirect.sharded import load_sharded, save_sharded
    from torchdirect.tensor_file import TensorInfo
    from torchdirect.transfer import TransferReport, TransferType, last_transfer
    from torchdirect.verification import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "BrokenCheckpointWarning",
    "BufferRegistration",
    "CheckpointHandle",
    "CheckpointManager",
    "Converted",
    "CorruptCheckpointError",
    "DirectFile",
    "LoadError",
    "Patch",
    "PendingSave",
    "SaveError",
    "SavePendingError",
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
    "dcp",
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
    "save_async",
    "save_sharded",
    "settings",
    "verify",
]

_MODULES = {
    "background": ("save_async",),
    "checkpoint": ("load", "save"),
    "conversion": ("Converted", "convert"),
    "defaults": ("Settings", "settings"),
    "direct_file": ("DirectFile", "StreamTransfer", "TransferBatch"),
    "errors": (
        "CorruptCheckpointError",
        "LoadError",
        "SaveError",
        "SavePendingError",
        "SettingsError",
        "TorchDirectError",
        "TransferUnavailableError",
    ),
    "gpu_buffers": ("BufferRegistration", "deregister_buffer", "register_buffer"),
    "in_place": ("load_into",),
    "lazy": ("CheckpointHandle", "TensorSlice", "open"),
    "manager": ("BrokenCheckpointWarning", "CheckpointManager"),
    "memory": ("release_staging",),
    "patch": ("Patch", "patch_torch"),
    "pending": ("PendingSave",),
    "replicas": ("replicated",),
    "road": ("TransferFallbackWarning",),
    "sharded": ("load_sharded", "save_sharded"),
    "tensor_file": ("TensorInfo",),
    "transfer": ("TransferReport", "TransferType", "last_transfer"),
    "verification": ("Verification", "verify"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
_OWN_NAMES = {"open": "open_checkpoint"}


def __getattr__(name: str) -> object:
    """Import what is asked for when it is first asked for: a process that loads one file needs a third of the code."""
    module = _HOMES.get(name)
    if module is None:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")  # sets the attribute
    value = getattr(importlib.import_module(f"{__name__}.{module}"), _OWN_NAMES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
