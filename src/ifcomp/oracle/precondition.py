"""Preconditioner of hindsight training: it changes the speed of convergence, not the result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ifcomp.errors import SettingError

#: Symmetric linear map of weights [P] to [P], ideally close to ``(n G + lambda)^(-1/2)``.
Preconditioner = Callable[[Tensor], Tensor]

#: Relative asymmetry allowed for rounding.
_ASYMMETRY = 1e-3


def check_preconditioner(preconditioner: Preconditioner, like: Tensor) -> Preconditioner:
    """Return the map, or raise SettingError unless it maps [P] to [P] and is symmetric for two random vectors."""
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(like.shape, generator=generator).to(like) for _ in range(2))
    images = [preconditioner(one), preconditioner(two)]
    if any(not isinstance(image, Tensor) or image.shape != like.shape for image in images):
        raise SettingError(f"The preconditioner must map a vector of {len(like)} weights to one of the same length.")
    sides = float(images[0] @ two), float(one @ images[1])
    scale = float(images[0].norm() * two.norm())
    if not abs(sides[0] - sides[1]) <= _ASYMMETRY * scale:
        raise SettingError(
            "The preconditioner must be a symmetric linear map, such as a vector times (n G + lambda)^(-1/2), but "
            f"u^T T v and v^T T u differ: {sides[0]:.6g} and {sides[1]:.6g}."
        )
    return preconditioner
