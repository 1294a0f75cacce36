"""Whitened per-example gradients: influence between examples.

With ``w = (G + delta)^(-1/2) g`` the influence of one labelled example on another is the dot product of their w. The
influence of an example on itself does not need w.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ifcomp.curvature.factors import Factors
from ifcomp.influence.weights import Weights
from ifcomp.layers.recording import Recording


def whitened_gradients(
    factors: Factors, weights: Mapping[str, Weights], recording: Recording, cotangent: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Whitened gradients [B, P] of ``sum_k cotangent[b, k] logits[b, k]``, block by block.

    Dot products are in units of the block's `Weights.scale`.

    Args:
        factors: The curvature.
        weights: Inverse curvature by block.
        recording: The forward pass.
        cotangent: [B, K].
    """
    for block, inputs, output_grads in recording.canonical(cotangent.unsqueeze(0), recording.blocks):
        gradients = block.gradients(inputs, output_grads, factors.blocks[block.name].basis).squeeze(1)
        yield block.name, gradients * weights[block.name].values.sqrt().flatten()
