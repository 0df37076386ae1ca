"""Distributed checkpoints: a storage writer and a storage reader for ``torch.distributed.checkpoint``.

Planning, resharding, deduplication and the collectives are PyTorch's. The bytes take torchdirect's road, and a
checkpoint directory is replaced as a whole. The files are those that PyTorch's own reader and writer know.

>>> import torchdirect as td
>>> td.dcp.save({"model": model.state_dict()}, "checkpoints/step-1000")
>>> td.dcp.load(state, "checkpoints/step-1000")
"""

from torchdirect.dcp.api import async_save, load, save
from torchdirect.dcp.reader import DirectReader
from torchdirect.dcp.writer import DirectWriter

__all__ = ["DirectReader", "DirectWriter", "async_save", "load", "save"]
