"""Seeded samples of examples."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def seeded_order(count: int, size: int, seed: int) -> Tensor:
    """Return the indices of ``size`` of ``count`` examples in random order; of all if there are no more.

    The random stream is spawned from the seed. So the sample does not coincide with a permutation that the user draws
    with the same seed, for instance to split the data or to plant wrong labels.
    """
    stream = np.random.SeedSequence(seed % 2**64, spawn_key=(0,))
    return torch.from_numpy(np.random.default_rng(stream).choice(count, min(size, count), replace=False))


def seeded_sample(count: int, size: int, seed: int) -> Tensor:
    """Return the same indices in increasing order."""
    return torch.arange(count) if count <= size else seeded_order(count, size, seed).sort().values
