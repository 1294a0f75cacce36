"""Seeded samples of examples."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def seeded_sample(count: int, size: int, seed: int) -> Tensor:
    """Return sorted indices of ``size`` of ``count`` examples, drawn at random; all if there are no more.

    The random stream is spawned from the seed. So the sample does not coincide with a permutation that the user draws
    with the same seed, for instance to split the data or to plant wrong labels.
    """
    if count <= size:
        return torch.arange(count)
    stream = np.random.SeedSequence(seed % 2**64, spawn_key=(0,))
    return torch.from_numpy(np.sort(np.random.default_rng(stream).choice(count, size, replace=False)))
