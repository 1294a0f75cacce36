"""Quadratic and bilinear forms of single blocks equal the dense oracle under every plan."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from cases import REPRESENTATIVE_CASES, Case
from comparison import basis_arguments, dense, fitted, library_block, oracle_blocks
from ifcomp.blocks.kronecker_inputs import KroneckerShape
from ifcomp.blocks.kronecker_plan import make_plan
from ifcomp.curvature.factors import inverse_curvature
from oracles import ekfac_influence, ekfac_inverse
from recorded_blocks import plans, recorded_blocks

DAMPING = 1e-3
SIZE = 4


@pytest.mark.parametrize("sua", [False, True], ids=["", "shared offsets"])
@pytest.mark.parametrize("case", REPRESENTATIVE_CASES, ids=str)
def test_forms_equal_the_oracle(case: Case, sua: bool) -> None:
    ifc = fitted(case, sua=sua)
    assert ifc.factors is not None
    examples = dense(case, SIZE)
    expected = {library_block(ifc, block).name: examples.gradients(block, 1.0) for block in oracle_blocks(case)}
    for block, inputs, output_grads in recorded_blocks(ifc, case, SIZE):
        factors, arguments = ifc.factors.blocks[block.name], basis_arguments(ifc, block)
        moments, gradients = factors.second_moments, expected[block.name].flatten(2)
        inverse = ekfac_inverse(moments, DAMPING, **arguments)
        bilinear = torch.einsum("bcp,pq,bdq->bcd", gradients, inverse, gradients)
        bases = arguments.pop("input_basis"), arguments.pop("output_basis")
        quadratic = ekfac_influence(expected[block.name], *bases, moments, DAMPING, **arguments)
        weights = inverse_curvature(moments, DAMPING)
        default = block.plan(inputs, output_grads.shape[1], 10, condition=1.0)
        for plan in plans(default, shared=arguments["offsets"] > 1):
            form = block.form(inputs, factors.basis, weights, plan)
            assert_close(form.quadratic(output_grads), quadratic, rtol=1e-9, atol=1e-13 * float(quadratic.max()))
            assert_close(form.bilinear(output_grads), bilinear, rtol=1e-9, atol=1e-12 * float(bilinear.abs().max()))


SHAPE = KroneckerShape(groups=1, out_features=8, basis_size=27, offsets=1, has_bias=True)


def test_pairs_is_chosen_at_one_position() -> None:
    assert make_plan(SHAPE, 1, 10, 10, condition=1e30).kernel == "pairs"


def test_pairs_is_chosen_if_it_is_cheaper_and_well_conditioned() -> None:
    assert make_plan(SHAPE, 2, 16, 1000, condition=1.0).kernel == "pairs"
    assert make_plan(SHAPE, 2, 16, 1000, condition=1e30).kernel == "direct"
    assert make_plan(SHAPE, 10_000, 2, 2, condition=1.0).kernel == "direct"


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, groups=4), replace(SHAPE, out_features=512, basis_size=4608)])
@pytest.mark.parametrize(("positions", "chunk_size"), [(1, 1), (16, 10), (1024, 1), (1024, 16)])
def test_slabs_have_a_largest_size(shape: KroneckerShape, positions: int, chunk_size: int) -> None:
    plan = make_plan(shape, positions, chunk_size, chunk_size, 1.0, slab_entries=10**6)
    entries = shape.groups * chunk_size * shape.out_features * plan.columns
    assert entries <= 10**6 or not plan.rotate_inputs_first or plan.columns == 1
    assert plan.examples == 1 or plan.examples * entries <= 10**6
    assert plan.columns == shape.in_features or plan.rotate_inputs_first
