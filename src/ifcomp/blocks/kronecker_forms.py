"""Quadratic and bilinear forms of a Kronecker block, by two exact algorithms.

*Direct* forms every rotated gradient D and sums ``D^2 W``. *Pairs* never forms a gradient: with rotated inputs a and
output gradients b,

    sum_ij D_ij^2 W_ij = sum_{t,t'} sum_i b_ti b_t'i V_tt'i,     V_tt'i = sum_j W_ij a_tj a_t'j,

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
        """``sum_ij D_ij^2 W_ij``, [B, C]."""
        forms = output_grads.new_zeros(output_grads.shape[:2])
        for examples, columns, gradients in self._slabs(output_grads):
            weights = self.weights[..., columns].flatten(1)
            forms[examples] += torch.einsum("bgcn,gn->bc", gradients.square_().flatten(3), weights)
        return forms

    def bilinear(self, output_grads: Tensor) -> Tensor:
        """``sum_ij D_ij W_ij E_ij``, [B, C, C]."""
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
        basis: Q_S [G, O, O]; None is the identity.
        pairs: V [B, G, O, T, T].
    """

    basis: Tensor | None
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

    def labels(self, residual: Tensor, top: Tensor) -> Tensor:
        """``v_y^T M v_y`` of ``v_y = p - e_y`` for every output y, [B, O], with one group and one position.

        ``M = Q_S diag(V) Q_S^T``, so the form is ``p^T M p - 2 (M p)_y + M_yy``. This cancels for a label of
        probability near 1, so that of ``top`` is ``residual^T M residual``. Cost: O^2 multiplications per example.

        Args:
            residual: ``p - e_top``, [B, O].
            top: The most probable label, [B].
        """
        weights, index = self.pairs.flatten(1), top.unsqueeze(1)
        probability = residual.scatter_add(1, index, torch.ones_like(residual[:, :1]))
        basis = None if self.basis is None else self.basis[0]
        rotated, rotated_residual = (value if basis is None else value @ basis for value in (probability, residual))
        products = weights * rotated
        products, diagonal = (products, weights) if basis is None else (products @ basis.T, weights @ basis.T.square())
        forms = (weights * rotated.square()).sum(1, keepdim=True) - 2 * products + diagonal
        return forms.scatter(1, index, (weights * rotated_residual.square()).sum(1, keepdim=True))

    def _rotated(self, output_grads: Tensor) -> Tensor:
        """Output gradients in the eigenbasis, [B, G, O, C, T]."""
        rotated: Tensor = rotate(self.basis, output_grads.flatten(0, 1)).unflatten(0, output_grads.shape[:2])
        return rotated.permute(0, 2, 3, 1, 4)


def pair_form(inputs: KroneckerInputs, basis: Basis, weights: Tensor) -> PairForm:
    """Compute V for all examples. V is symmetric, so only pairs t <= t' are computed.

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
    for examples in slices(inputs.batch_size, step):
        features = inputs.rotate(basis, examples).permute(1, 0, 3, 2)  # [G, b, T, J]
        products = features[:, :, left] * features[:, :, right]
        sums = products.flatten(1, 2) @ weights.transpose(1, 2)  # [G, b pairs, O]
        sums = sums.unflatten(1, (-1, len(left))).permute(1, 0, 3, 2)  # [b, G, O, pairs]
        parts.append(sums[..., place])
    return PairForm(basis.outputs, torch.cat(parts))


def gradient_slabs(
    inputs: KroneckerInputs, output_grads: Tensor, basis: Basis, plan: KroneckerPlan
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Form all gradients ``Q_S^T (sum_t b_t a_t^T) Q_A``.

    Args:
        inputs: Canonical inputs a.
        output_grads: Output gradients b [B, C, G, O, T], not rotated.
        basis: Eigenbasis.
        plan: Whether inputs and output gradients are rotated before the product, and the size of a slab.

    Yields:
        The examples, the columns (inputs) and the gradients [b, G, C, O, j] of a slab.
    """
    assert basis.inputs is not None
    for examples in slices(len(output_grads), plan.examples):
        outputs = output_grads[examples].transpose(1, 2)  # [b, G, C, O, T]
        if plan.rotate_outputs_first:
            outputs = _rotate_outputs(basis.outputs, outputs)
        features = inputs.rotate(basis, examples) if plan.rotate_inputs_first else inputs.unfold(examples)
        matrices, features = outputs.flatten(2, 3), features.transpose(2, 3)  # [b, G, C O, T], [b, G, T, J]
        for columns in slices(inputs.shape.in_features, plan.columns):
            gradients = (matrices @ features[..., columns]).unflatten(2, outputs.shape[2:4])
            if not plan.rotate_inputs_first:
                gradients = _rotate_features(basis.inputs, gradients)
            if not plan.rotate_outputs_first:
                gradients = _rotate_outputs(basis.outputs, gradients)
            yield examples, columns, gradients


def _rotate_outputs(basis: Tensor | None, values: Tensor) -> Tensor:
    """``Q_S^T v`` for values [b, G, C, O, N] and a basis [G, O, O]; None is the identity."""
    groups = values.transpose(1, 2)  # [b, C, G, O, N]
    rotated: Tensor = rotate(basis, groups.flatten(0, 1)).unflatten(0, groups.shape[:2])
    return rotated.transpose(1, 2)


def _rotate_features(basis: Tensor, gradients: Tensor) -> Tensor:
    """``D Q_A`` for gradients [b, G, C, O, J] and a basis [G, J, J]: one product per group."""
    by_group = gradients.transpose(0, 1)
    return (by_group.flatten(1, 3) @ basis).view(by_group.shape).transpose(0, 1)


def slices(size: int, step: int) -> list[slice]:
    """Consecutive slices of at most ``step`` entries."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
