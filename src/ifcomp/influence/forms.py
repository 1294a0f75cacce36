"""Quadratic forms ``v^T M v`` and bilinear forms ``v^T M w`` of logit cotangents, summed over blocks.

``M(x) = J (G + delta)^-1 J^T`` is the logit kernel [K, K] of an example. A cotangent is a vector over the logits.
Units are beta-free: gradients are ``J^T v`` without a factor beta, and ``IF_beta(x, y) = v^T M v`` for ``v = p - e_y``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ifcomp.blocks.block import Block, Form
from ifcomp.curvature.factors import Factors
from ifcomp.curvature.labels import Cotangents, label_cotangents
from ifcomp.influence.weights import Weights
from ifcomp.layers.recording import Recording
from ifcomp.precision import as_double, as_type_of


def sum_blocks(
    values: Mapping[str, Tensor], weights: Mapping[str, Weights], shape: tuple[int, ...], like: Tensor
) -> Tensor:
    """Sum scaled forms over blocks in float64. Blocks of lower precision are copied to the CPU in one transfer.

    Args:
        values: Forms of each block in units of its scale.
        weights: Inverse curvature by block.
        shape: Shape of a form.
        like: A float64 tensor on the device of the result.
    """
    total = torch.zeros(shape, dtype=torch.float64, device=like.device)
    if values:
        for name, value in zip(values, as_double(torch.stack(list(values.values()))), strict=True):
            total += value * weights[name].scale
    return total


class FormEvaluator:
    """Evaluates forms for one recorded microbatch."""

    def __init__(
        self, factors: Factors, weights: Mapping[str, Weights], recording: Recording, chunk_size: int, cotangents: int
    ) -> None:
        """Bind a recording to the inverse curvature.

        Args:
            factors: The curvature.
            weights: Inverse curvature by block.
            recording: The forward pass.
            chunk_size: Number of cotangents to stack.
            cotangents: Number of cotangents in all calls.
        """
        self._factors, self._weights, self._recording = factors, weights, recording
        self._at_once, self._cotangents = chunk_size, cotangents
        self._forms: dict[str, Form] = {}

    def quadratic(self, cotangents: Cotangents) -> Tensor:
        """``v^T M v`` for cotangents [C, B, K], as [B, C] in float64."""
        return torch.cat([self._quadratic(chunk) for chunk in cotangents.chunks(self._at_once)], 1)

    def labels(self, probability: Tensor) -> Tensor:
        """``v^T M v`` of the residual ``v = p - e_y`` of every label, as [B, K] in float64, for p [B, K]."""
        return self.quadratic(label_cotangents(probability))

    def bilinear(self, cotangents: Tensor) -> Tensor:
        """``v_c^T M v_d`` for cotangents [C, B, K], as [B, C, C] in float64. All C are stacked at once."""
        count, size = cotangents.shape[:2]
        values = {
            block.name: self._build(block, count, count).bilinear(output_grads)
            for block, _, output_grads in self._recording.canonical(cotangents, self._recording.blocks)
        }
        return sum_blocks(values, self._weights, (size, count, count), cotangents)

    def last_layer(self, residual: Tensor, top: Tensor) -> Tensor:
        """``v^T M v`` of ``v = p - e_y`` for every label, of the last layer alone, [B, K] in float64.

        It needs no backward pass. It is 0 if the last layer with a weight matrix has not one output per label.

        Args:
            residual: ``p - e_top``, [B, K] in float64.
            top: The most probable label, [B].
        """
        blocks = {block.name: block for block in self._recording.blocks if block.has_eigenbasis}
        called = [blocks[name] for name in self._recording.calls if name in blocks]  # in the order of the forward pass
        if not called:
            return torch.zeros_like(residual)
        block, weights = called[-1], self._weights[called[-1].name]
        inputs, basis = self._recording.inputs(block), self._factors.blocks[block.name].basis
        values = weights.values
        forms = block.label_forms(inputs, basis, values, as_type_of(residual, values), top.to(values.device))
        return torch.zeros_like(residual) if forms is None else as_double(forms).to(residual.device) * weights.scale

    def _quadratic(self, cotangents: Tensor) -> Tensor:
        values = {
            block.name: self._form(block).quadratic(output_grads)
            for block, _, output_grads in self._recording.canonical(cotangents, self._recording.blocks)
        }
        return sum_blocks(values, self._weights, (cotangents.shape[1], len(cotangents)), cotangents)

    def _form(self, block: Block) -> Form:
        """The form of a block; built once."""
        if block.name not in self._forms:
            self._forms[block.name] = self._build(block, self._at_once, self._cotangents)
        return self._forms[block.name]

    def _build(self, block: Block, chunk_size: int, cotangents: int) -> Form:
        weights, inputs = self._weights[block.name], self._recording.inputs(block)
        plan = block.plan(inputs, chunk_size, cotangents, weights.condition)
        return block.form(inputs, self._factors.blocks[block.name].basis, weights.values, plan)
