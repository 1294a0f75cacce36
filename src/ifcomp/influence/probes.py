"""Expected influence from a few random directions in label space instead of all K labels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ifcomp.errors import SettingError


def probe_cotangents(probability: Tensor, probes: int, seed: int) -> Tensor:
    """Cotangents v with ``E[sum v v^T] = diag p - p p^T``, so that ``sum v^T M v`` estimates E[IF], [m, B, K].

    With ``s = sqrt(p)`` the matrix ``R = diag(s) (I - s s^T)`` is a root: ``R R^T = diag p - p p^T``. Its columns are
    mixed by m orthogonal directions with random signs that give every class the same weight, scaled by ``sqrt(K / m)``:
    unbiased for every m, exact for m = K. They depend on the seed only, so an example's estimate does not depend on the
    batch it comes in. Cost: 1 + 2m forward units.

    Args:
        probability: p, [B, K] in float64.
        probes: m, from 1 to K.
        seed: Of the rotation.
    """
    classes = probability.shape[1]
    if not isinstance(probes, int) or not 1 <= probes <= classes:
        raise SettingError(
            f"probes must be a whole number from 1 to the number of classes, {classes}, but is {probes}."
        )
    rotation = torch.from_numpy(_directions(classes, probes, seed)).to(probability.device)
    roots = probability.sqrt()
    along = roots @ rotation  # [B, m]
    return (roots.unsqueeze(0) * (rotation.T.unsqueeze(1) - along.T.unsqueeze(-1) * roots.unsqueeze(0))).contiguous()


def _directions(classes: int, probes: int, seed: int) -> np.ndarray:
    """Columns of a Hartley matrix with its rows shuffled and random signs, [K, m], each class (row) of norm 1.

    ``cas(x) = cos x + sin x``. Columns j and K - j together have rows of equal norm, and so have columns 0 and K/2
    alone.
    """
    generator = np.random.default_rng(seed)
    singles = [0] if classes % 2 else [0, classes // 2]
    pairs = [(j, classes - j) for j in range(1, (classes + 1) // 2)]
    alone = singles[: max(probes % 2, probes - 2 * len(pairs))]
    chosen = generator.permutation(len(pairs))[: (probes - len(alone)) // 2]
    columns = np.array([*alone, *(column for index in chosen for column in pairs[index])])
    angles = 2 * np.pi * np.outer(generator.permutation(classes), columns) / classes
    signs = generator.choice([-1.0, 1.0], size=(classes, 1))
    return np.asarray(signs * (np.cos(angles) + np.sin(angles)) / np.sqrt(probes))
