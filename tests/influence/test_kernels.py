"""Both kernels against sums over explicit gradients, on inputs and output gradients that are typed in; the scales of
inverse curvature, and layers that some inputs do not reach.
"""

import pytest
import torch
from ifcomp.curvature.rotation import plan_rotation
from ifcomp.layers.block import KroneckerBlock
from torch import Tensor, nn
from torch.testing import assert_close

from blocks import Recorded, kronecker
from cases import LAYER_CASES, seeded
from comparison import as_type, fitted, oracle_blocks, oracle_influence, oracle_kernel
from ifcomp import IFComp
from ifcomp.blocks.block import Basis
from ifcomp.curvature import rotation
from ifcomp.influence import kernels

B, G, C, R, J, T = 5, 2, 3, 4, 2, 3
BLOCK = kronecker("x", G, R, J)
RANDOM = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RANDOM, dtype=torch.float64)


RECORDED, ROWS, BASIS = Recorded(normal(B, G, J, T)), normal(B, G, C, R, T), Basis(normal(G, J, J), normal(G, R, R))
WEIGHTS = normal(G, R, J).square()

TURNED = torch.einsum("gpo,bgcpt->bgcot", BASIS.outputs, ROWS)
INPUTS = torch.einsum("gkj,bgkt->bgjt", BASIS.inputs, RECORDED.inputs)
GRADIENTS = torch.einsum("bgcot,bgjt->bgcoj", TURNED, INPUTS)
PRODUCTS = torch.einsum("bgcoj,goj,bgdoj->bcd", GRADIENTS, WEIGHTS, GRADIENTS)
FORMS = PRODUCTS.diagonal(dim1=1, dim2=2)


@pytest.mark.parametrize("width", [J, 8])
@pytest.mark.parametrize("slab", [3, 7, 13, 20, 35, 50, 1 << 19])
def test_direct(slab: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of a column up to all: 3 x 8 x 2 numbers are the gradients of one example, and zeros may follow."""
    monkeypatch.setattr(rotation, "SLAB_ENTRIES", slab)
    monkeypatch.setattr(rotation, "_MOST_WIDENED", width / J)
    assert plan_rotation(BLOCK, T, C, ROWS).width == width
    rows = TURNED if plan_rotation(BLOCK, T, C, ROWS).outputs_first else ROWS
    assert_close(kernels.direct_forms(RECORDED, BLOCK, BASIS, WEIGHTS, rows), FORMS)
    rows = TURNED if plan_rotation(BLOCK, T, C, ROWS, together=True).outputs_first else ROWS
    assert_close(kernels.direct_products(RECORDED, BLOCK, BASIS, WEIGHTS, rows), PRODUCTS)


@pytest.mark.parametrize("slab", [12, 24, 40, 250, 1 << 19])
@pytest.mark.parametrize("columns", [3, 5, 8])
def test_direct_sums_of_one_group_are_made_in_parts(columns: int, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of three, five or eight columns: 12 entries in four parts, 32 in eight. Slabs have all of them, or
    some of them with fewer in the last, or those of several examples with fewer in the last.
    """
    monkeypatch.setattr(rotation, "SLAB_ENTRIES", slab)
    basis, weights = Basis(normal(1, columns, columns), normal(1, R, R)), normal(1, R, columns).square()
    recorded, rows = Recorded(normal(B, 1, columns, T)), normal(B, 1, C, R, T)
    turned = torch.einsum("gpo,bgcpt->bgcot", basis.outputs, rows)
    gradients = torch.einsum("bgcot,bgkt,gkj->bgcoj", turned, recorded.inputs, basis.inputs)
    block = kronecker("x", 1, R, columns)
    given = turned if plan_rotation(block, T, C, rows).outputs_first else rows
    expected = torch.einsum("bgcoj,goj->bc", gradients.square(), weights)
    assert_close(kernels.direct_forms(recorded, block, basis, weights, given), expected)


def test_one_position() -> None:
    """Two groups, and no pairs but that of a position with itself."""
    recorded, rows, inputs = Recorded(RECORDED.inputs[..., :1]), TURNED[..., :1], INPUTS[..., 0]
    pairs = kernels.pair_matrix(recorded, BLOCK, BASIS, WEIGHTS)
    assert_close(pairs[..., 0, 0], torch.einsum("goj,bgj,bgj->bgo", WEIGHTS, inputs, inputs))
    gradients = torch.einsum("bgco,bgj->bgcoj", rows[..., 0], inputs)
    products = torch.einsum("bgcoj,goj,bgdoj->bcd", gradients, WEIGHTS, gradients)
    assert_close(kernels.pair_forms(pairs, rows), products.diagonal(dim1=1, dim2=2))
    assert_close(kernels.pair_products(pairs, rows), products)


@pytest.mark.parametrize(("entries", "pieces"), [(1, [1] * 5), (20, [1] * 5), (50, [2, 2, 1]), (1 << 22, [5])])
def test_pairs(entries: int, pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two examples of 2 x 6 x 2 products are 48."""
    rotate, sizes = kernels.rotated_columns, []

    def noted(recording: Recorded, block: KroneckerBlock, basis: Basis, examples: slice) -> Tensor:
        found = rotate(recording, block, basis, examples)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(kernels, "rotated_columns", noted)
    monkeypatch.setattr(kernels, "_PAIR_ENTRIES", entries)
    pairs = kernels.pair_matrix(RECORDED, BLOCK, BASIS, WEIGHTS)
    assert sizes == pieces
    assert_close(pairs, torch.einsum("goj,bgjt,bgju->bgotu", WEIGHTS, INPUTS, INPUTS))
    assert_close(kernels.pair_forms(pairs, TURNED), FORMS)
    assert_close(kernels.pair_products(pairs, TURNED), PRODUCTS)


# Scales and branches -------------------------------------------------------------------------------------------------

CASES = {case.name: case for case in LAYER_CASES}


@pytest.mark.parametrize("name", ["linear_tokens", "layernorm_no_bias", "embedding_positions_flat"])
def test_scales_are_multiplied_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an upper limit of 1e-3 every block's weights are scaled."""
    case = CASES[name]
    ifc, inputs, blocks = fitted(case), as_type(case.sample(5), torch.float64), oracle_blocks(case)
    monkeypatch.setattr("ifcomp.influence.weights._LARGEST", 1e-3)
    assert_close(ifc.influence(inputs), oracle_influence(ifc, ifc.model, blocks, inputs, 1e-3), rtol=1e-9, atol=0)
    expected = oracle_kernel(ifc, ifc.model, blocks, inputs, 1e-3)
    assert_close(ifc.logit_kernel(inputs), expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


class Branch(nn.Module):
    """A layer and a normalisation that only wide inputs go through."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.head = nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.wide(x)) if x.shape[1] == 6 else x)


def test_layers_that_do_not_run_count_nothing() -> None:
    """Narrow inputs see the head alone: ``v^T M v`` from the dense head."""
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ifc = IFComp(seeded(Branch)().double(), fisher="exact", damping=1e-2).fit([x])
    alone = IFComp(ifc.model, fisher="exact", damping=1e-2, layers=["head"]).fit([x])
    narrow = x[:5, :4]
    assert_close(ifc.influence(narrow), alone.influence(narrow), rtol=1e-10, atol=0)
    assert_close(ifc.logit_kernel(narrow), alone.logit_kernel(narrow), rtol=1e-10, atol=0)
    assert (ifc.influence(x[:5]) > alone.influence(x[:5])).all()
