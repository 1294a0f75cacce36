"""Kronecker blocks: the per-example gradient is ``D = sum_t b_t a_t^T``, [G, O, J].

Canonical inputs a [B, G, J, T] have G groups, J features per group and T shared positions; the bias is a last feature
that is always 1. Canonical output gradients b are [B, C, G, O, T] for C cotangents. In the eigenbasis the gradient is
``Q_S^T D Q_A``, and EKFAC keeps the mean of its squares.

With shared offsets (SUA, spatially uncorrelated activations) one input basis over channels serves all offsets of a
convolution kernel. Unfolding moves values and never mixes channels, so channels are rotated before they are unfolded.

The input covariance is over positions whose output gradient is not zero, so the basis does not depend on the amount of
padding. With shared offsets it is over input positions that an active output position depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ifcomp.blocks.block import Basis, Block, FactorShapes, Form
from ifcomp.blocks.kronecker_forms import DirectForm, gradient_slabs, pair_form
from ifcomp.blocks.kronecker_inputs import KroneckerInputs, KroneckerShape, rotate
from ifcomp.blocks.kronecker_plan import KroneckerPlan, make_plan

#: Rounding errors of a backward pass are below this multiple of eps, relative to the largest gradient of the example.
_ROUNDING = 100


@dataclass(frozen=True)
class KroneckerBlock(Block):
    """Curvature ``(Q_S kron Q_A) diag(Lambda) (Q_S kron Q_A)^T`` with Lambda [G, O, J].

    Attributes:
        shape: G, O, J and what the input basis is over.
    """

    shape: KroneckerShape

    @property
    def treatment(self) -> str:
        details = ["SUA"] * self.shape.shares_offsets + ["identity output basis"] * (not self.shape.rotates_outputs)
        return f"EKFAC ({', '.join(details)})" if details else "EKFAC"

    @property
    def factor_shapes(self) -> FactorShapes:
        groups, outputs, side = self.shape.groups, self.shape.out_features, self.shape.basis_size
        output_basis = (groups, outputs, outputs) if self.shape.rotates_outputs else None
        return FactorShapes((groups, outputs, self.shape.in_features), (groups, side, side), output_basis)

    def limit_output_basis(self, maximum: int) -> KroneckerBlock:
        if self.shape.out_features <= maximum:
            return self
        return replace(self, shape=replace(self.shape, rotates_outputs=False))

    def plan(
        self, inputs: KroneckerInputs, chunk_size: int, cotangents: int = 1, condition: float = float("inf")
    ) -> KroneckerPlan:
        return make_plan(self.shape, inputs.positions, chunk_size, cotangents, condition)

    def active_positions(self, output_grads: Tensor) -> Tensor:
        """A gradient counts as zero if it is below the rounding errors of the example's largest gradient.

        In fused attention the gradient of a query with a single key is a rounding error instead of zero. Masks with
        finite values leave padding a gradient of at most this size.
        """
        sizes = output_grads.abs().sum(3)  # [B, C, G, T]
        rounding = _ROUNDING * torch.finfo(sizes.dtype).eps * sizes.amax((2, 3), keepdim=True)
        return (sizes > rounding).any(1)

    def input_covariance(self, inputs: KroneckerInputs, active: Tensor | None) -> Tensor:
        assert active is not None
        if self.shape.shares_offsets:
            values, counted = inputs.channels(), inputs.active_channels(active)
        else:
            values, counted = inputs.unfold(), active
        # A product, because indexing by a mask would synchronise a GPU.
        return _outer_products(values * counted.unsqueeze(2).to(values.dtype))

    def output_covariance(self, output_grads: Tensor) -> Tensor | None:
        if not self.shape.rotates_outputs:
            return None
        return _outer_products(output_grads.flatten(0, 1))

    def add_second_moments(
        self, total: Tensor, inputs: KroneckerInputs, output_grads: Tensor, basis: Basis | None, plan: KroneckerPlan
    ) -> None:
        assert basis is not None
        if inputs.positions == 1:  # the squares of an outer product are the outer product of squares
            squares = rotate(basis.outputs, output_grads.flatten(0, 1)).square().unflatten(0, output_grads.shape[:2])
            features = inputs.rotate(basis).square_()
            total += torch.einsum("bgo,bgj->goj", squares.sum(1)[..., 0], features[..., 0])
            return
        for _, columns, gradients in gradient_slabs(inputs, output_grads, basis, plan):
            total[..., columns] += gradients.square_().sum((0, 2))

    def form(self, inputs: KroneckerInputs, basis: Basis | None, weights: Tensor, plan: KroneckerPlan) -> Form:
        assert basis is not None
        if plan.kernel == "pairs":
            return pair_form(inputs, basis, weights)
        return DirectForm(inputs, basis, weights, plan)

    def label_forms(
        self, inputs: KroneckerInputs, basis: Basis | None, weights: Tensor, residual: Tensor, top: Tensor
    ) -> Tensor | None:
        assert basis is not None
        if (inputs.positions, self.shape.groups, self.shape.out_features) != (1, 1, residual.shape[1]):
            return None
        return pair_form(inputs, basis, weights).labels(residual, top)

    def gradients(self, inputs: KroneckerInputs, output_grads: Tensor, basis: Basis | None = None) -> Tensor:
        if basis is None:
            return torch.einsum("bcgot,bgjt->bcgoj", output_grads, inputs.unfold()).flatten(2)
        (size, cotangents), shape = output_grads.shape[:2], self.shape
        gradients = output_grads.new_empty(size, shape.groups, cotangents, shape.out_features, shape.in_features)
        plan = self.plan(inputs, cotangents)
        for examples, columns, slab in gradient_slabs(inputs, output_grads, basis, plan):
            gradients[examples, ..., columns] = slab
        return gradients.transpose(1, 2).flatten(2)


def _outer_products(values: Tensor) -> Tensor:
    """``sum_bt v v^T`` [G, side, side] for values [B, G, side, T]."""
    if values.shape[1] == 1 and values.shape[3] >= values.shape[2]:
        vectors = values[:, 0]
        return torch.addbmm(vectors.new_zeros(()), vectors, vectors.transpose(1, 2), beta=0).unsqueeze(0)
    vectors = values.permute(1, 2, 0, 3).flatten(2)
    return vectors @ vectors.transpose(1, 2)
