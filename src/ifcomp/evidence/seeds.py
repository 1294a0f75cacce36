"""Seeded samples of examples."""

from __future__ import annotations

import torch
from torch import Tensor


def seeded_sample(count: int, size: int, seed: int) -> Tensor:
    """Sorted indices of at most ``size`` of ``count`` examples; all of them if they are not more."""
    if count <= size:
        return torch.arange(count)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randperm(count, generator=generator)[:size].sort().values
