"""Save and load PyTorch checkpoints over the shortest path between storage and GPU memory.

>>> import torchdirect as td
>>> td.save(model.state_dict(), "ckpt.pt")
>>> state = td.load("ckpt.pt", map_location="cuda")
>>> print(td.last_transfer())
"""

from torchdirect.checkpoint import TransferFallbackWarning, load, save
from torchdirect.defaults import Settings, settings
from torchdirect.errors import (
    CorruptCheckpointError,
    LoadError,
    SaveError,
    SettingsError,
    TorchDirectError,
    TransferUnavailableError,
)
from torchdirect.memory import release_staging
from torchdirect.transfer import TransferReport, TransferType, last_transfer

__version__ = "0.1.0"

__all__ = [
    "CorruptCheckpointError",
    "LoadError",
    "SaveError",
    "Settings",
    "SettingsError",
    "TorchDirectError",
    "TransferFallbackWarning",
    "TransferReport",
    "TransferType",
    "TransferUnavailableError",
    "last_transfer",
    "load",
    "release_staging",
    "save",
    "settings",
]
