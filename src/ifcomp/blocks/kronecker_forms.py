"""Quadratic and bilinear forms of a Kronecker block, by two exact algorithms.

*Direct* forms every rotated gradient G and sums ``G^2 W``. *Pairs* never forms a gradient: with rotated inputs a and
output gradients b,

    sum_ij G_ij^2 W_ij = sum_{t,t'} sum_i b_ti b_t'i V_tt'i,     V_tt'i = sum_j W_ij a_tj a_t'j,

where V does not depend on the cotangent. At one position it is a closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp.blocks.block import Basis
from ifcomp.blocks.kronecker_inputs import KroneckerInputs, rotate
from ifcomp.blocks.kronecker_plan import KroneckerPlan
from ifcomp.blocks.kronecker_slabs import gradient_slabs, slices

#: Entries of the products of input pairs that are formed at once.
_PAIR_ENTRIES = 1 << 23


@dataclass(frozen=True)
class DirectForm:
    """The form from gradients that are formed slab by slab.

    Attributes:
        inputs: Canonical inputs.
        basis: Eigenbasis.
        weights: W [G, O, J].
        plan: Rotation and slab sizes.
    """

    inputs: KroneckerInputs
    basis: Basis
    weights: Tensor
    plan: KroneckerPlan

    def quadratic(self, output_grads: Tensor) -> Tensor:
        """``sum_ij G_ij^2 W_ij``, [B, C]."""
        forms = output_grads.new_zeros(output_grads.shape[:2])
        for examples, columns, gradients in self._slabs(output_grads):
            weights = self.weights[..., columns].flatten(1)
            forms[examples] += torch.einsum("bgcn,gn->bc", gradients.square_().flatten(3), weights)
        return forms

    def bilinear(self, output_grads: Tensor) -> Tensor:
        """``sum_ij G_ij W_ij H_ij``, [B, C, C]."""
        size, cotangents = output_grads.shape[:2]
        forms = output_grads.new_zeros(size, cotangents, cotangents)
        roots = self.weights.sqrt()
        for examples, columns, gradients in self._slabs(output_grads):
            whitened = (gradients * roots[:, None, :, columns]).transpose(1, 2).flatten(2)  # [b, C, G O j]
            forms[examples] += whitened @ whitened.transpose(1, 2)
        return forms

    def _slabs(self, output_grads: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        return gradient_slabs(self.inputs, output_grads, self.basis, self.plan)


@dataclass(frozen=True)
class PairForm:
    """The form from products of pairs of positions.

    Attributes:
        basis: Q_S [G, O, O].
        pairs: V [B, G, O, T, T].
    """

    basis: Tensor
    pairs: Tensor

    def quadratic(self, output_grads: Tensor) -> Tensor:
        """``sum_{t,t'} sum_i b_ti b_t'i V_tt'i``, [B, C]."""
        outputs = self._rotated(output_grads)
        if outputs.shape[4] == 1:
            return (outputs.squeeze(4).square().transpose(2, 3) @ self.pairs.squeeze(4)).sum(1).squeeze(2)
        return (outputs @ self.pairs).mul_(outputs).sum((1, 2, 4))

    def bilinear(self, output_grads: Tensor) -> Tensor:
        """``sum_{t,t'} sum_i b_ti c_t'i V_tt'i``, [B, C, C]."""
        outputs = self._rotated(output_grads)
        return (outputs @ self.pairs @ outputs.transpose(3, 4)).sum((1, 2))

    def _rotated(self, output_grads: Tensor) -> Tensor:
        """Output gradients in the eigenbasis, [B, G, O, C, T]."""
        rotated: Tensor = rotate(self.basis, output_grads.flatten(0, 1)).unflatten(0, output_grads.shape[:2])
        return rotated.permute(0, 2, 3, 1, 4)


def pair_form(inputs: KroneckerInputs, basis: Basis, weights: Tensor) -> PairForm:
    """Compute V for all examples; it is symmetric, so half of it is summed.

    Args:
        inputs: Canonical inputs.
        basis: Eigenbasis.
        weights: W [G, O, J].
    """
    positions = inputs.positions
    left, right = torch.triu_indices(positions, positions, device=weights.device)
    place = left.new_empty(positions, positions)
    place[left, right] = place[right, left] = torch.arange(len(left), device=left.device)
    step = max(1, _PAIR_ENTRIES // (inputs.shape.groups * len(left) * inputs.shape.in_features))
    parts = []
    for examples in slices(inputs.batch, step):
        features = inputs.rotate(basis, examples).permute(1, 0, 3, 2)  # [G, b, T, J]
        products = features[:, :, left] * features[:, :, right]
        sums = products.flatten(1, 2) @ weights.transpose(1, 2)  # [G, b pairs, O]
        sums = sums.unflatten(1, (-1, len(left))).permute(1, 0, 3, 2)  # [b, G, O, pairs]
        parts.append(sums[..., place])
    return PairForm(basis.outputs, torch.cat(parts))
