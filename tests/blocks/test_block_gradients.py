"""Per-example gradients and second moments of single blocks equal the dense oracle."""

import pytest
import torch

from cases import REPRESENTATIVE_CASES, Case
from comparison import assert_same, basis_arguments, dense, fitted, library_block, oracle_blocks
from oracles import rotation_matrix
from recorded_blocks import plans, recorded_blocks

SIZE = 4


@pytest.mark.parametrize("sua", [False, True], ids=["", "shared offsets"])
@pytest.mark.parametrize("case", REPRESENTATIVE_CASES, ids=str)
def test_gradients_equal_the_oracle(case: Case, sua: bool) -> None:
    """In parameter space, and in the eigenbasis."""
    ifc = fitted(case, sua=sua)
    examples = dense(case, SIZE)
    expected = {library_block(ifc, block).name: examples.gradients(block, 1.0) for block in oracle_blocks(case)}
    for block, inputs, output_grads in recorded_blocks(ifc, case, SIZE):
        gradients = expected[block.name]
        rotation = rotation_matrix(gradients.shape[2:], **basis_arguments(ifc, block))
        gradients = gradients.flatten(2)
        assert_same(block.gradients(inputs, output_grads), gradients, floor=1e-12)
        rotated = block.gradients(inputs, output_grads, ifc.factors.blocks[block.name].basis)
        assert_same(rotated, gradients @ rotation, floor=1e-12)


@pytest.mark.parametrize("sua", [False, True], ids=["", "shared offsets"])
@pytest.mark.parametrize("case", REPRESENTATIVE_CASES, ids=str)
def test_second_moments_equal_the_oracle_under_every_plan(case: Case, sua: bool) -> None:
    ifc = fitted(case, sua=sua)
    examples = dense(case, SIZE)
    expected = {library_block(ifc, block).name: examples.gradients(block, 1.0) for block in oracle_blocks(case)}
    for block, inputs, output_grads in recorded_blocks(ifc, case, SIZE):
        gradients, arguments = expected[block.name], basis_arguments(ifc, block)
        rotation = rotation_matrix(gradients.shape[2:], **arguments)
        squares = (gradients.flatten(2) @ rotation).square().sum((0, 1)).view(block.factor_shapes.second_moments)
        for plan in plans(block.plan(inputs, output_grads.shape[1]), shared=arguments["offsets"] > 1):
            total = torch.ones_like(squares)
            block.add_second_moments(total, inputs, output_grads, ifc.factors.blocks[block.name].basis, plan)
            assert_same(total, 1 + squares)
