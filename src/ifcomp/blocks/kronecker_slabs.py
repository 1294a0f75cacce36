"""Per-example gradients of Kronecker blocks in the eigenbasis, formed one cache-sized slab at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ifcomp.blocks.block import Basis
from ifcomp.blocks.kronecker_inputs import KroneckerInputs, rotate
from ifcomp.blocks.kronecker_plan import KroneckerPlan


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


def _rotate_outputs(basis: Tensor, values: Tensor) -> Tensor:
    """``Q_S^T v`` for values [b, G, C, O, N] and a basis [G, O, O]."""
    groups = values.transpose(1, 2)  # [b, C, G, O, N]
    rotated: Tensor = rotate(basis, groups.flatten(0, 1)).unflatten(0, groups.shape[:2])
    return rotated.transpose(1, 2)


def _rotate_features(basis: Tensor, gradients: Tensor) -> Tensor:
    """``G Q_A`` for gradients [b, G, C, O, J] and a basis [G, J, J]: one product per group."""
    by_group = gradients.transpose(0, 1)
    return (by_group.flatten(1, 3) @ basis).view(by_group.shape).transpose(0, 1)


def slices(size: int, step: int) -> list[slice]:
    """Consecutive slices of at most ``step`` entries."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
