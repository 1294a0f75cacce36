"""Seeded samples of examples."""

from __future__ import annotations

import torch
from torch import Tensor


def seeded_sample(count: int, size: int, seed: int) -> Tensor:
    """Return sorted indices of ``size`` of ``count`` examples, drawn at random; all if there are no more."""
    if count <= size:
        return torch.arange(count)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randperm(count, generator=generator)[:size].sort().values
