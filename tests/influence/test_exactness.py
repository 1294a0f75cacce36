"""Influence and logit kernel equal the dense oracle, for every layer kind and for whole models."""

import pytest
import torch
from torch.testing import assert_close

from cases import LAYER_CASES, MODEL_CASES, Case
from comparison import as_type, fitted, oracle_blocks, oracle_influence, oracle_kernel
from ifcomp.influence import choice

ALL_CASES = [*LAYER_CASES, *MODEL_CASES]
BETAS = [1.0, 0.3]


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_influence_is_exact_in_double(case: Case, beta: float) -> None:
    ifc = fitted(case, beta=beta)
    inputs = as_type(case.sample(5), torch.float64)
    expected = oracle_influence(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3)
    assert_close(ifc.influence(inputs), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_influence_is_exact_in_single(case: Case) -> None:
    ifc = fitted(case, torch.float32)
    inputs = case.sample(5)
    expected = oracle_influence(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3)
    assert_close(ifc.influence(inputs), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kernel", ["direct", "pairs"])
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_both_kernels_are_exact(case: Case, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ifc = fitted(case)
    monkeypatch.setattr("ifcomp.influence.forms.choose_kernel", lambda *_: kernel)
    inputs = as_type(case.sample(5), torch.float64)
    blocks = oracle_blocks(case)
    assert_close(ifc.influence(inputs), oracle_influence(ifc, ifc.model, blocks, inputs, 1e-3), rtol=1e-9, atol=0)
    expected = oracle_kernel(ifc, ifc.model, blocks, inputs, 1e-3)
    assert_close(ifc.logit_kernel(inputs), expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_shared_offsets_are_exact(case: Case) -> None:
    ifc = fitted(case, sua=True)
    inputs = as_type(case.sample(5), torch.float64)
    expected = oracle_influence(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3)
    assert_close(ifc.influence(inputs), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("unfolded", [1, 30_000], ids=["inputs one by one", "inputs of some examples"])
def test_small_slabs_give_the_same(unfolded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one gradient split over slabs, as in very wide layers."""
    case = next(case for case in MODEL_CASES if case.name == "lenet")
    ifc = fitted(case)
    inputs = as_type(case.sample(5), torch.float64)
    expected = oracle_influence(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3)
    monkeypatch.setattr("ifcomp.curvature.rotation.SLAB_ENTRIES", 40)
    monkeypatch.setattr("ifcomp.curvature.rotation.COLUMN_ENTRIES", unfolded)
    monkeypatch.setattr("ifcomp.influence.forms.choose_kernel", lambda *_: "direct")
    assert_close(ifc.influence(inputs), expected, rtol=1e-9, atol=0)


def test_choice_keeps_pairs_away_from_ill_conditioned_blocks() -> None:
    case = next(case for case in MODEL_CASES if case.name == "lenet")
    block = next(block for block in fitted(case)._session.kronecker if block.name)
    assert choice.choose_kernel(block, 1, 10, condition=1e30) == "pairs"
    assert choice.choose_kernel(block, 2, 1000, condition=1.0) == "pairs"
    assert choice.choose_kernel(block, 2, 1000, condition=1e30) == "direct"
    assert choice.choose_kernel(block, 10_000, 2, condition=1.0) == "direct"
