"""A change of variables in which the objective is nearly round: makes training quick, and leaves its result alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ifcomp.errors import SettingError
from ifcomp.oracle.network import Network, Points

#: A symmetric linear map of weights [P] to [P], best close to ``(n G + lambda)^(-1/2)``.
Preconditioner = Callable[[Tensor], Tensor]

#: At most so many directions of curvature are looked at, and no more than fit in so many bytes.
_ROWS, _BYTES = 1500, 2**30

#: Directions with less curvature than this multiple of lambda are as good as flat.
_FLAT = 0.1

#: How far from symmetric rounding may leave a handed-in map.
_ASYMMETRY = 1e-3


def fisher_root(network: Network, points: Points, log_base: Tensor, lam: float) -> Preconditioner:
    """``(A^T A + lambda)^(-1/2)``, with rows A of the exact Fisher's square root at the most uncertain examples.

    The Fisher of the sum of KL divergences is ``n G = sum_ik a_ik a_ik^T`` with
    ``a_ik = beta sqrt(p_k) J_i^T (e_k - p)``. Most training examples are certain, so few of these rows make up nearly
    all of it. With ``A^T A = V diag(s) V^T`` the root is ``(1 + V ((1 + s/lambda)^(-1/2) - 1) V^T) / sqrt(lambda)``.

    Args:
        network: The model.
        points: Training inputs.
        log_base: Their log probabilities at theta_0, [n, K].
        lam: lambda.
    """
    theta = network.base().requires_grad_()
    most = max(1, min(_ROWS, _BYTES // (theta.numel() * theta.element_size())))
    probability = log_base.exp()
    order = (probability * (1 - probability)).flatten().argsort(descending=True, stable=True)
    wanted = torch.zeros_like(probability, dtype=torch.bool)
    wanted.view(-1)[order[:most]] = True
    rows = torch.stack(_fisher_rows(network, points, theta, wanted))
    strengths, vectors = torch.linalg.eigh(rows.double() @ rows.double().T)
    kept = strengths > max(_FLAT * lam, 100 * torch.finfo(theta.dtype).eps * float(strengths.max()))
    axes = (vectors[:, kept].T / strengths[kept].sqrt().unsqueeze(1)).to(theta.dtype) @ rows
    shrink = ((1 + strengths[kept] / lam).rsqrt() - 1).to(theta.dtype)
    return lambda vector: (vector + axes.T @ (shrink * (axes @ vector))) / math.sqrt(lam)


def check_preconditioner(preconditioner: Preconditioner, like: Tensor) -> Preconditioner:
    """Return the map, or raise SettingError unless it maps [P] to [P] and looks symmetric."""
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


def _fisher_rows(network: Network, points: Points, theta: Tensor, wanted: Tensor) -> list[Tensor]:
    """The rows ``a_ik`` where ``wanted`` [n, K] is true: one backward pass each."""
    needed = wanted[wanted.any(1)]
    examples = (
        piece.select(slice(at, at + 1))
        for piece in points.pieces(theta.device, wanted.any(1))
        for at in range(piece.size)
    )
    rows = []
    for example, labels in zip(examples, needed, strict=True):
        log_probability = network.log_probabilities(theta, example)[0]
        for label in labels.nonzero().flatten().tolist():
            weight = log_probability[label].detach().div(2).exp()
            rows.append(torch.autograd.grad(weight * log_probability[label], theta, retain_graph=True)[0])
    return rows
