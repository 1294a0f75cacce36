"""Slabs of rotated gradients."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ifcomp.blocks.block import Basis
from ifcomp.blocks.kronecker import KroneckerBlock
from ifcomp.blocks.kronecker_forms import gradient_slabs, slices
from ifcomp.blocks.kronecker_inputs import KroneckerInputs, KroneckerShape, Patches
from ifcomp.blocks.kronecker_plan import KroneckerPlan

BATCH, COTANGENTS, OUTPUTS, INPUTS, POSITIONS = 5, 3, 4, 6, 7


def setup(groups: int) -> tuple[KroneckerInputs, Tensor, Basis, Tensor]:
    """Random inputs, output gradients and bases, and all rotated gradients [B, G, C, O, J]."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    features, output_grads = (
        random(BATCH, groups, INPUTS, POSITIONS),
        random(BATCH, COTANGENTS, groups, OUTPUTS, POSITIONS),
    )
    basis = Basis(random(groups, INPUTS, INPUTS), random(groups, OUTPUTS, OUTPUTS))
    shape = KroneckerShape(groups, OUTPUTS, basis_size=INPUTS, offsets=1, has_bias=False)
    calls = [Patches(features.unsqueeze(1), lambda channels: channels)]
    inputs = KroneckerInputs(calls, shape, BATCH, POSITIONS, torch.float64, torch.device("cpu"))
    gradients = torch.einsum("gpo,bcgpt,bgkt,gkj->bgcoj", basis.outputs, output_grads, features, basis.inputs)
    return inputs, output_grads, basis, gradients


@pytest.mark.parametrize(("examples", "columns"), [(1, 1), (2, 4), (9, 9)])
@pytest.mark.parametrize("outputs_first", [True, False])
@pytest.mark.parametrize("inputs_first", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_slabs_are_all_rotated_gradients(
    groups: int, inputs_first: bool, outputs_first: bool, examples: int, columns: int
) -> None:
    inputs, output_grads, basis, expected = setup(groups)
    columns = columns if inputs_first else INPUTS
    plan = KroneckerPlan("direct", inputs_first, outputs_first, examples, columns)
    gradients = torch.full_like(expected, torch.nan)
    for rows, places, slab in gradient_slabs(inputs, output_grads, basis, plan):
        part = gradients[rows, ..., places]
        assert part.isnan().all(), "a gradient is formed twice"
        assert slab.shape == part.shape
        assert len(slab) <= examples
        assert slab.shape[-1] <= columns
        part.copy_(slab)
    assert_close(gradients, expected)


def test_gradients_larger_than_a_slab_are_complete() -> None:
    """One example with 600 cotangents takes several slabs of columns."""
    generator = torch.Generator().manual_seed(0)
    features, output_grads = (torch.randn(*shape, generator=generator) for shape in ((2, 1, 64, 2), (2, 600, 1, 64, 2)))
    identity = torch.eye(64).unsqueeze(0)
    block = KroneckerBlock("x", "linear", ("weight",), 64 * 64, KroneckerShape(1, 64, 64, offsets=1, has_bias=False))
    calls = [Patches(features.unsqueeze(1), lambda channels: channels)]
    inputs = KroneckerInputs(calls, block.shape, 2, 2, torch.float32, torch.device("cpu"))
    plan = block.plan(inputs, 600)
    assert (plan.examples, plan.columns < 64) == (1, True)
    gradients = block.gradients(inputs, output_grads, Basis(identity, identity))
    assert_close(gradients, block.gradients(inputs, output_grads))


def test_slices_cover_a_range() -> None:
    assert slices(5, 2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert slices(4, 9) == [slice(0, 4)]
    assert slices(0, 3) == []
