"""Expected influence from a few random directions in label space instead of all K labels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ifcomp.errors import SettingError


def probe_cotangents(probability: Tensor, probes: int, seed: int) -> Tensor:
    """Cotangents v with ``E[sum v v^T] = diag p - p p^T``, so that ``sum v^T M v`` estimates E[IF], [m, B, K].

    With ``s = sqrt(p)`` the matrix ``R = diag(s) (I - s s^T)`` is a root: ``R R^T = diag p - p p^T``. Its columns are
    mixed by the first m rows of a random rotation, scaled by ``sqrt(K / m)``: unbiased for every m, exact for m = K.
    The rotation depends on the seed only, so an example's estimate does not depend on the batch it comes in. Cost: 1 +
    2m forward units.

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
    normal = np.random.default_rng(seed).standard_normal((classes, probes))
    orthogonal, triangular = np.linalg.qr(normal)
    directions = orthogonal * np.sign(np.diag(triangular)) * np.sqrt(classes / probes)
    rotation = torch.from_numpy(directions).to(probability.device)
    roots = probability.sqrt()
    along = roots @ rotation  # [B, m]
    return (roots.unsqueeze(0) * (rotation.T.unsqueeze(1) - along.T.unsqueeze(-1) * roots.unsqueeze(0))).contiguous()
