"""Eigenvectors of the covariances."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ifcomp.blocks.block import Basis
from ifcomp.curvature.accumulation import CovarianceSums
from ifcomp.distributed import run_distributed
from ifcomp.errors import NonFiniteError
from ifcomp.precision import as_double, as_type_of

#: Jitter of the retries, relative to the mean of the diagonal.
_JITTERS = (0.0, 1e-10, 1e-8, 1e-6)

#: Decomposes the covariance of a name; replaced by fits that save their progress.
Decompose = Callable[[str, Tensor], Tensor]


def eigenbases(sums: CovarianceSums, decompose: Decompose | None = None) -> list[dict[str, Basis]]:
    """Eigenbases of every block, for each of the settings.

    The decompositions are distributed over the processes.

    Args:
        sums: Covariances.
        decompose: Replaces `eigenvectors`; receives the name of a covariance and the covariance [G, C, C].
    """
    matrices = sums.tensors
    jobs = [partial(decompose or eigenvectors, name, matrix) for name, matrix in matrices.items()]
    costs = [float(matrix.numel() * matrix.shape[-1]) for matrix in matrices.values()]
    vectors = dict(zip(matrices, run_distributed(jobs, list(matrices.values()), costs), strict=True))
    return collect_bases(vectors, len(sums.outputs))


def collect_bases(vectors: Mapping[str, Tensor], settings: int) -> list[dict[str, Basis]]:
    """Group eigenvectors, named as `CovarianceSums.tensors`, by block for each of the settings."""

    def named(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in vectors.items() if name.startswith(prefix)}

    bases, inputs = [], named("inputs/")
    for number in range(settings):
        outputs = named(f"outputs/{number}/")
        bases.append({name: Basis(inputs.get(name), outputs.get(name)) for name in {**inputs, **outputs}})
    return bases


def basis_tensors(bases: Sequence[Mapping[str, Basis]]) -> dict[str, Tensor]:
    """All eigenvectors, named as `CovarianceSums.tensors`."""
    inputs = {f"inputs/{name}": basis.inputs for name, basis in bases[0].items() if basis.inputs is not None}
    return inputs | {
        f"outputs/{number}/{name}": basis.outputs
        for number, blocks in enumerate(bases)
        for name, basis in blocks.items()
        if basis.outputs is not None
    }


def eigenvectors(name: str, matrices: Tensor) -> Tensor:
    """Eigenvectors of symmetric matrices [G, C, C] in columns, smallest eigenvalue first.

    They are computed in float64 and returned in the precision and on the device of the matrices.

    Args:
        name: Name of the covariance, for messages.
        matrices: Covariances.

    Raises:
        NonFiniteError: If an entry is not finite, or the decomposition does not converge even with jitter.
    """
    if not matrices.isfinite().all():
        raise NonFiniteError(
            f"The covariance of {_describe(name)} has a NaN or infinite entry. Scale the inputs, or use float64."
        )
    double = as_double(matrices)
    scale = double.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    identity = torch.eye(double.shape[-1], dtype=double.dtype, device=double.device)
    for jitter in _JITTERS:
        try:
            vectors: Tensor = torch.linalg.eigh(double + jitter * scale * identity).eigenvectors
            return as_type_of(vectors, matrices).contiguous()
        except RuntimeError:  # LAPACK did not converge
            continue
    raise NonFiniteError(
        f"The eigendecomposition of the covariance of {_describe(name)} does not converge, not even with jitter. "
        "Scale the inputs, use model.double(), or leave the layer out with layers= or requires_grad_(False)."
    )


def _describe(name: str) -> str:
    """A covariance in words, from its name ``inputs/LAYER`` or ``outputs/NUMBER/LAYER``."""
    side, _, layer = name.partition("/")
    if side == "inputs":
        return f"the inputs of layer '{layer}'"
    return f"the output gradients of layer '{layer.partition('/')[2]}'"
