"""Influence and logit kernel equal the dense oracle, for every layer kind and for whole models."""

import pytest
import torch
from torch.testing import assert_close

from cases import LAYER_CASES, MODEL_CASES, PACKED_CASES, REPRESENTATIVE_CASES, Case
from comparison import as_type, fitted, oracle_blocks, oracle_influence, oracle_kernel


@pytest.mark.parametrize("case", [*LAYER_CASES, *PACKED_CASES, *MODEL_CASES], ids=str)
def test_influence_is_exact(case: Case) -> None:
    ifc = fitted(case)
    inputs = as_type(case.sample(5), torch.float64)
    expected = oracle_influence(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3)
    assert_close(ifc.influence(inputs), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("case", REPRESENTATIVE_CASES, ids=str)
def test_influence_is_exact_at_another_temperature(case: Case) -> None:
    ifc = fitted(case, beta=0.3)
    inputs = as_type(case.sample(5), torch.float64)
    expected = oracle_influence(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3)
    assert_close(ifc.influence(inputs), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("case", REPRESENTATIVE_CASES, ids=str)
def test_influence_is_exact_in_single_precision(case: Case) -> None:
    ifc = fitted(case, torch.float32)
    inputs = case.sample(5)
    expected = oracle_influence(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3)
    assert_close(ifc.influence(inputs), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("case", REPRESENTATIVE_CASES, ids=str)
def test_logit_kernel_is_exact(case: Case) -> None:
    ifc = fitted(case)
    inputs = as_type(case.sample(5), torch.float64)
    expected = oracle_kernel(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3)
    assert_close(ifc.logit_kernel(inputs), expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("case", [case for case in LAYER_CASES if case.name.startswith("conv")], ids=str)
def test_shared_offsets_are_exact(case: Case) -> None:
    ifc = fitted(case, sua=True)
    inputs = as_type(case.sample(5), torch.float64)
    expected = oracle_influence(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3)
    assert_close(ifc.influence(inputs), expected, rtol=1e-9, atol=0)
