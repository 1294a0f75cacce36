"""Expected influence from a few random directions in label space instead of all K labels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ifcomp.curvature.labels import Cotangents
from ifcomp.errors import SettingError


def check_probes(probes: int, classes: int) -> None:
    """Raise SettingError unless the number of probes is one that the classes allow."""
    if not isinstance(probes, int) or not 1 <= probes <= classes:
        raise SettingError(
            f"probes must be a whole number from 1 to the number of classes, {classes}, but is {probes}."
        )


def probe_cotangents(probability: Tensor, probes: int, seed: int) -> Cotangents:
    """Cotangents v with ``E[sum v v^T] = diag p - p p^T``, so that ``sum v^T M v`` estimates E[IF], [m, B, K].

    With ``s = sqrt(p)`` the matrix ``R = diag(s) (I - s s^T)`` is a root: ``R R^T = diag p - p p^T``. Its columns are
    mixed by m orthogonal directions with random signs that give every class the same weight, scaled by ``sqrt(K / m)``:
    unbiased for every m, exact for m = K. They depend on the seed only, so an example's estimate does not depend on the
    batch it comes in. Cost: 1 + 2m forward units.

    Args:
        probability: p, [B, K] in float64.
        probes: m, from 1 to K.
        seed: Seed of the rotation.
    """
    check_probes(probes, probability.shape[1])
    rotation = torch.from_numpy(_directions(probability.shape[1], probes, seed)).to(probability.device)
    roots = probability.sqrt()

    def make(chunk: slice) -> Tensor:
        chosen = rotation[:, chunk]
        along = roots @ chosen  # [B, m']
        return (roots.unsqueeze(0) * (chosen.T.unsqueeze(1) - along.T.unsqueeze(-1) * roots.unsqueeze(0))).contiguous()

    return Cotangents(probes, make)


def standard_error(forms: Tensor, classes: int) -> Tensor:
    """Standard error of ``sum_c v_c^T M v_c`` over the seeds of `probe_cotangents`, [B]; 0 for m = K.

    With all K directions the sum is exact, whatever the signs: so m of them are a sample without replacement from K
    numbers whose total is wanted. Over signs and shuffles these have one variance and one correlation, ``-1/(K-1)``,
    if the two columns that come as a pair count as one unit u of size ``n_u = 2``. Hence, with unit sums ``h_u`` and
    their mean ``h = sum_u h_u / m`` by column, ``S^2 = sum_u (h_u - n_u h)^2 / n_u / (units - 1)`` is an unbiased
    estimate of the variance of a column, and ``m (1 - m/K) S^2`` of that of the sum.

    Two probes are a single unit. Then S^2 is taken from the difference of the two, which also varies with the
    diagonal of the kernel: too large on average, never too small.

    Directions are the same for all examples, and so their errors are not independent.

    Args:
        forms: ``v_c^T M v_c`` of all probes in their order, [B, m] with m > 1.
        classes: K.
    """
    probes = forms.shape[1]
    alone = _alone(classes, probes)
    units = torch.cat([forms[:, :alone], forms[:, alone:].unflatten(1, (-1, 2)).sum(2)], 1)
    if units.shape[1] == 1:
        variance = (forms[:, 0] - forms[:, 1]).square() / 2 * (classes / (classes - 1))
    else:
        sizes = torch.ones(units.shape[1], dtype=forms.dtype, device=forms.device)
        sizes[alone:] = 2
        deviations = units - sizes * forms.mean(1, keepdim=True)
        variance = (deviations.square() / sizes).sum(1) / (units.shape[1] - 1)
    return (probes * (1 - probes / classes) * variance).sqrt()


def _alone(classes: int, probes: int) -> int:
    """Number of columns that are not one of a pair; they come first."""
    return max(probes % 2, probes - 2 * ((classes - 1) // 2))


def _directions(classes: int, probes: int, seed: int) -> np.ndarray:
    """Columns of a Hartley matrix with its rows shuffled and random signs, [K, m], each class (row) of norm 1.

    ``cas(x) = cos x + sin x``. Columns j and K - j together have rows of equal norm, and so have columns 0 and K/2
    alone.
    """
    generator = np.random.default_rng(seed % 2**64)
    pairs = [(j, classes - j) for j in range(1, (classes + 1) // 2)]
    alone = [0, classes // 2][: _alone(classes, probes)]  # of an odd number the first alone
    chosen = generator.permutation(len(pairs))[: (probes - len(alone)) // 2]
    columns = np.array([*alone, *(column for index in chosen for column in pairs[index])])
    angles = 2 * np.pi * np.outer(generator.permutation(classes), columns) / classes
    signs = generator.choice([-1.0, 1.0], size=(classes, 1))
    return np.asarray(signs * (np.cos(angles) + np.sin(angles)) / np.sqrt(probes))
