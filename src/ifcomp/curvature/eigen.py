"""Eigenvectors of the covariances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ifcomp.curvature.factors import Basis, Covariances
from ifcomp.errors import NonFiniteError

#: Jitter of the retries, relative to the mean of the diagonal.
_JITTERS = (0.0, 1e-10, 1e-8, 1e-6)


def eigenbases(several: Sequence[Covariances]) -> list[Mapping[str, Basis]]:
    """The eigenvectors of every covariance, computed in float64 and kept in the covariance's precision.

    Fits that were made together share their input covariances, which are decomposed once.
    """
    inputs: dict[str, tuple[Tensor, Tensor]] = {}  # the last covariance of a block and its eigenvectors

    def input_basis(name: str, covariance: Tensor | None) -> Tensor | None:
        if covariance is None:
            return None
        if name not in inputs or inputs[name][0] is not covariance:
            inputs[name] = covariance, eigenvectors(covariance, f"the inputs of layer '{name}'")
        return inputs[name][1]

    return [
        {
            name: Basis(
                input_basis(name, covariance.inputs),
                eigenvectors(covariance.outputs, f"the output gradients of layer '{name}'"),
            )
            for name, covariance in covariances.blocks.items()
        }
        for covariances in several
    ]


def eigenvectors(matrices: Tensor, what: str) -> Tensor:
    """Columns of eigenvectors of symmetric matrices [G, C, C], smallest eigenvalue first.

    Raises:
        NonFiniteError: If an entry is not finite, or the decomposition does not converge with jitter either; names
        ``what``.
    """
    if not matrices.isfinite().all():
        raise NonFiniteError(f"The covariance of {what} has a NaN or infinite entry. Scale the inputs, or use float64.")
    double = matrices.double()
    scale = double.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    identity = torch.eye(double.shape[-1], dtype=double.dtype, device=double.device)
    for jitter in _JITTERS:
        try:
            vectors: Tensor = torch.linalg.eigh(double + jitter * scale * identity).eigenvectors
            return vectors.to(matrices.dtype).contiguous()
        except RuntimeError:  # what torch raises when LAPACK does not converge
            continue
    raise NonFiniteError(f"The eigendecomposition of the covariance of {what} does not converge, not even with jitter.")
