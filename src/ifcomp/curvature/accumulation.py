"""Sums over the training data: covariances in the first pass, second moments in the second.

Both functions add the contribution of one recorded microbatch to accumulators. Fits of several settings share the
forward pass and the input covariances.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp.blocks.block import Basis
from ifcomp.curvature.labels import Cotangents, directions_and_sizes
from ifcomp.layers.recorder import Recorder
from ifcomp.layers.recording import Recording
from ifcomp.precision import as_double, as_type_of

#: Largest ratio of a rounding error to the largest gradient, in units of eps.
_ROUNDINGS = 1e3


@dataclass(frozen=True, eq=False)
class CovarianceSums:
    """Sums of outer products over examples and positions.

    Attributes:
        inputs: ``sum a a^T`` over active positions, [G, C, C] by block; blocks with one-hot inputs have none.
        outputs: ``sum b b^T`` [G, O, O] by block, for each of the settings.
    """

    inputs: Mapping[str, Tensor]
    outputs: Sequence[Mapping[str, Tensor]]

    @classmethod
    def zeros(cls, recorder: Recorder, settings: int) -> CovarianceSums:
        """Accumulators for all blocks with an eigenbasis."""
        shapes = {block.name: block.factor_shapes for block in recorder.blocks if block.has_eigenbasis}
        inputs = {name: recorder.zeros(*shape.input_basis) for name, shape in shapes.items() if shape.input_basis}
        outputs = [
            {name: recorder.zeros(*shape.output_basis) for name, shape in shapes.items() if shape.output_basis}
            for _ in range(settings)
        ]
        return cls(inputs, outputs)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All sums by name."""
        inputs = {f"inputs/{name}": total for name, total in self.inputs.items()}
        return inputs | {
            f"outputs/{number}/{name}": total
            for number, totals in enumerate(self.outputs)
            for name, total in totals.items()
        }

    def add(self, recording: Recording, cotangents: Sequence[Cotangents], chunk_size: int) -> None:
        """Add the outer products of one microbatch.

        A position counts in the input covariance if its output gradient is nonzero for at least one cotangent. Backward
        passes start from cotangents of equal size, so that gradients of confident examples do not underflow.

        Args:
            recording: The forward pass.
            cotangents: Fisher cotangents of each of the settings.
            chunk_size: Number of cotangents to stack.
        """
        blocks = [block for block in recording.blocks if block.has_eigenbasis]
        active: dict[str, Tensor] = {}
        for totals, vectors in zip(self.outputs, cotangents, strict=True):
            for chunk in vectors.chunks(chunk_size):
                directions, sizes = directions_and_sizes(chunk)
                for block, _, output_grads in recording.canonical(directions, blocks):
                    if (positions := block.active_positions(output_grads)) is not None:
                        active[block.name] = positions | active.get(block.name, positions)
                    if (products := block.output_covariance(_scale(output_grads, sizes))) is not None:
                        totals[block.name].add_(products)
        for block in blocks:
            if (products := block.input_covariance(recording.inputs(block), active.get(block.name))) is not None:
                self.inputs[block.name].add_(products)


def _scale(output_grads: Tensor, sizes: Tensor) -> Tensor:
    """Multiply output gradients [B, C, ...] by sizes [C, B]."""
    ones = [1] * (output_grads.dim() - 2)
    return output_grads * as_type_of(sizes.T, output_grads).reshape(*output_grads.shape[:2], *ones)


def second_moment_sums(recorder: Recorder) -> dict[str, Tensor]:
    """Accumulators of the second pass, by block."""
    return {block.name: recorder.zeros(*block.factor_shapes.second_moments) for block in recorder.blocks}


def add_second_moments(
    totals: Mapping[str, Tensor],
    recording: Recording,
    bases: Mapping[str, Basis],
    cotangents: Cotangents,
    chunk_size: int,
) -> None:
    """Add the squared gradients of one microbatch in the eigenbasis.

    Args:
        totals: Accumulators by block.
        recording: The forward pass.
        bases: Eigenbases by block.
        cotangents: Fisher cotangents.
        chunk_size: Number of cotangents to stack.
    """
    for chunk in cotangents.chunks(chunk_size):
        for block, inputs, output_grads in recording.canonical(chunk, recording.blocks):
            plan = block.plan(inputs, len(chunk))
            block.add_second_moments(totals[block.name], inputs, output_grads, bases.get(block.name), plan)


def clear_rounding_errors(second_moments: Mapping[str, Tensor], known: Collection[str], precision: float) -> None:
    """Set the second moments of blocks whose gradients are rounding errors to zero, in place.

    The gradient of a parameter can be zero by symmetry, for instance that of the key bias in attention. The computed
    gradient is then a rounding error. Damping relative to its curvature would amplify it to a large influence.

    Args:
        second_moments: Sums of squared gradients by name.
        known: Names of blocks whose gradients are rounding errors on the verified examples.
        precision: eps of the model.
    """
    sizes = {name: float(as_double(total).sum()) for name, total in second_moments.items()}
    largest = max(filter(math.isfinite, sizes.values()), default=0.0)
    for name, total in second_moments.items():
        limit = _ROUNDINGS * precision if name in known else torch.finfo(total.dtype).eps
        if sizes[name] <= limit**2 * largest:
            total.zero_()
