"""PyTorch's own `save` and `load`, whatever `patch_torch` has put in their places."""

from __future__ import annotations

import torch

save = torch.save
load = torch.load
