"""Eigenvectors of the covariances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ifcomp.curvature.factors import Basis, Covariances, covariance_sums
from ifcomp.distributed import run_distributed
from ifcomp.errors import NonFiniteError
from ifcomp.io.resumable import NO_CHECKPOINT, ResumableWork, check_saved_tensor

#: Jitter of the retries, relative to the mean of the diagonal.
_JITTERS = (0.0, 1e-10, 1e-8, 1e-6)


#: What a fit does, in order, as checkpoints call it.
STAGES = ("covariances", "eigenvectors", "second moments")


def eigenbases(several: Sequence[Covariances], work: ResumableWork = NO_CHECKPOINT) -> list[Mapping[str, Basis]]:
    """The eigenvectors of every covariance, computed in float64 and kept in the covariance's precision.

    Fits that were made together share their input covariances, which are decomposed once. The work is
    spread over the processes that share it.

    Args:
        several: Covariances of fits that were made together.
        work: Saves them, and the eigenvectors that there are already, now and then.
    """
    jobs: dict[int, tuple[Tensor, str]] = {}  # by the identity of the covariance
    for covariances in several:
        for name, covariance in covariances.blocks.items():
            if covariance.inputs is not None:
                jobs[id(covariance.inputs)] = covariance.inputs, f"the inputs of layer '{name}'"
            jobs[id(covariance.outputs)] = covariance.outputs, f"the output gradients of layer '{name}'"
    matrices = [matrix for matrix, _ in jobs.values()]
    ready: dict[str, Tensor] = {}
    common = {"examples/0": torch.tensor(several[0].count, device="cpu"), **covariance_sums(several)}
    saved = work.begin_stage(STAGES[1], lambda: ready, common)

    def decompose(name: str, matrix: Tensor, what: str) -> Tensor:
        if name in saved:
            ready[name] = check_saved_tensor(name, saved[name], matrix).to(matrix.device)
        else:
            ready[name] = eigenvectors(matrix, what)
            work.save_if_due()
        return ready[name]

    made = run_distributed(
        [partial(decompose, f"basis/{number}", *job) for number, job in enumerate(jobs.values())],
        matrices,
        [float(matrix.numel() * matrix.shape[-1]) for matrix in matrices],
    )
    vectors = dict(zip(jobs, made, strict=True))
    return [
        {
            name: Basis(
                None if covariance.inputs is None else vectors[id(covariance.inputs)], vectors[id(covariance.outputs)]
            )
            for name, covariance in covariances.blocks.items()
        }
        for covariances in several
    ]


def basis_tensors(bases: Sequence[Mapping[str, Basis]]) -> dict[str, Tensor]:
    """The tensors of bases that were made together, by name; those that they share once."""
    tensors = {
        id(tensor): tensor
        for blocks in bases
        for basis in blocks.values()
        for tensor in (basis.inputs, basis.outputs)
        if tensor is not None
    }
    return {f"basis/{number}": tensor for number, tensor in enumerate(tensors.values())}


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
    raise NonFiniteError(
        f"The eigendecomposition of the covariance of {what} does not converge, not even with jitter. Scale the "
        "inputs, use model.double(), or leave the layer out with layers= or requires_grad_(False)."
    )
