"""Per-example gradients of Kronecker blocks in the eigenbasis, a cache-sized slab at a time.

Rotating can be done before the gradient is formed (on inputs and output gradients, per position) or after it (on the
gradient, per label). Both give the same matrix; which one is cheaper depends on the shapes, and `plan_rotation` writes
the rule down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp.curvature.factors import Basis
from ifcomp.layers.block import KroneckerBlock
from ifcomp.layers.capture import Recording

#: Entries of one slab of gradients: small enough to stay in a core's second-level cache while it is squared and summed.
SLAB_ENTRIES = 1 << 18

#: Below this many positions a basis is applied to all positions of all examples as one large matrix product.
_FEW_POSITIONS = 64


@dataclass(frozen=True)
class RotationPlan:
    """When to rotate, and how much to hold at once.

    Attributes:
        inputs_first: Rotate inputs (cost T J^2) rather than gradients (cost C O J^2, C cotangents).
        outputs_first: Rotate output gradients (cost C T O^2) rather than gradients (cost C O^2 J).
        examples: Examples per slab.
        rows: Output rows per slab.
    """

    inputs_first: bool
    outputs_first: bool
    examples: int
    rows: int


@dataclass(frozen=True)
class Slab:
    """Rotated gradients of some examples and output rows.

    Attributes:
        examples: Which examples of the batch.
        rows: Which output rows of the block.
        gradients: [B', G, C, O', J]; may be changed in place.
    """

    examples: slice
    rows: slice
    gradients: Tensor


def plan_rotation(block: KroneckerBlock, positions: int, cotangents: int) -> RotationPlan:
    """Choose by counting multiplications; rows are only split where one example's gradients outgrow a slab."""
    outputs, columns = block.rows, block.columns
    per_example = cotangents * block.groups * outputs * columns
    rows = outputs if per_example <= SLAB_ENTRIES else max(1, SLAB_ENTRIES // (per_example // outputs))
    return RotationPlan(
        inputs_first=block.shared_offsets or positions <= cotangents * outputs,
        outputs_first=rows < outputs or positions <= columns,
        examples=max(1, SLAB_ENTRIES // per_example),
        rows=rows,
    )


def apply_basis(basis: Tensor, values: Tensor) -> Tensor:
    """``Q^T v`` at every position.

    Args:
        basis: Q [G, C, C].
        values: [B, G, C, T].
    """
    if values.shape[1] == 1 and values.shape[3] <= _FEW_POSITIONS:
        flat = values[:, 0].transpose(1, 2)
        return (flat.reshape(-1, flat.shape[-1]) @ basis[0]).view(flat.shape).transpose(1, 2).unsqueeze(1)
    return basis.transpose(-1, -2) @ values


def rotated_columns(recording: Recording, block: KroneckerBlock, basis: Basis) -> Tensor:
    """Inputs in the eigenbasis, [B, G, J, T]. With shared offsets channels are rotated before they are unfolded."""
    assert basis.inputs is not None
    inputs = basis.inputs
    if block.shared_offsets:
        return recording.columns(block, lambda channels: apply_basis(inputs, channels))
    return apply_basis(inputs, recording.columns(block))


def rotated_slabs(recording: Recording, block: KroneckerBlock, basis: Basis, rows: Sequence[Tensor]) -> Iterator[Slab]:
    """All per-example gradients of a block in the eigenbasis ``Q_S^T (sum_t b_t a_t^T) Q_A``, slab by slab.

    Args:
        recording: The forward pass, for the inputs a.
        block: The block.
        basis: Its eigenbasis.
        rows: Output gradients b, one [B, G, O, T] for each cotangent.
    """
    plan = plan_rotation(block, recording.positions(block), len(rows))
    columns = rotated_columns(recording, block, basis) if plan.inputs_first else recording.columns(block)
    if plan.outputs_first:
        rows = [apply_basis(basis.outputs, row) for row in rows]
    stacked = torch.stack(list(rows), 2)  # [B, G, C, O, T]
    transposed = columns.transpose(-1, -2)  # [B, G, T, J]
    for first in range(0, recording.batch, plan.examples):
        examples = slice(first, first + plan.examples)
        for top in range(0, block.rows, plan.rows):
            kept = slice(top, min(top + plan.rows, block.rows))
            part = stacked[examples, :, :, kept].flatten(2, 3)
            formed = (part @ transposed[examples]).unflatten(2, (len(rows), -1))
            if not plan.inputs_first:
                assert basis.inputs is not None
                formed = formed @ basis.inputs.unsqueeze(1)
            if not plan.outputs_first:
                formed = basis.outputs.transpose(-1, -2).unsqueeze(1) @ formed
            yield Slab(examples, kept, formed)
