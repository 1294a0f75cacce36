"""The identity as output basis of a last layer with many classes."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from cases import LAYER_CASES, MODEL_CASES, Case
from comparison import as_type, fitted, oracle_blocks, oracle_influence, oracle_kernel
from ifcomp import IFComp
from ifcomp.curvature.sizes import factor_bytes
from ifcomp.errors import FingerprintError, SettingError

CASES = {case.name: case for case in [*LAYER_CASES, *MODEL_CASES]}

#: Networks whose last layer has one or several positions, or is recorded by function.
CHOSEN = [CASES[name] for name in ("lenet", "vision_transformer", "linear_tokens", "linear_subclass", "conv2d_stride")]


def last_block(ifc: IFComp) -> str:
    """Name of the last block with an eigenbasis."""
    assert ifc._recorder is not None
    return [layer.name for layer in ifc._recorder.inventory.layers if layer.has_weight and layer.block.has_eigenbasis][
        -1
    ]


@pytest.mark.parametrize("case", CHOSEN, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_influence_and_kernel_equal_the_oracle(case: Case, dtype: torch.dtype) -> None:
    ifc = fitted(case, dtype, max_output_basis=1)
    assert ifc.factors is not None
    last = last_block(ifc)
    for name, block in ifc.factors.blocks.items():
        assert (block.basis is not None and block.basis.outputs is None) == (name == last)
    inputs = as_type(case.sample(5), dtype)
    expected = oracle_influence(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3)
    rtol = 1e-9 if dtype == torch.float64 else 1e-4
    assert_close(ifc.influence(inputs), expected, rtol=rtol, atol=0)
    kernel = oracle_kernel(ifc, ifc.model, oracle_blocks(case), inputs, 1e-3)
    assert_close(ifc.logit_kernel(inputs), kernel, rtol=rtol, atol=rtol * float(kernel.abs().max()))


def test_second_moments_are_those_of_unrotated_outputs() -> None:
    """The last layer has inputs a and output gradients p - e_y: Lambda is the mean of (p - e_y)_o^2 (a^T Q_A)_j^2."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 5)).double(), torch.randn(9, 4).double()
    ifc = IFComp(model, fisher="exact", max_output_basis=4).fit([x])
    assert ifc.factors is not None
    factors = ifc.factors.blocks["2"]
    assert factors.basis is not None
    assert factors.basis.inputs is not None
    with torch.no_grad():
        features = torch.cat([model[:2](x), torch.ones(9, 1).double()], 1) @ factors.basis.inputs[0]
        p = model(x).softmax(1)
    expected = torch.zeros(5, 4).double()
    for row, probability in zip(features, p, strict=True):
        for label in range(5):
            residual = probability - torch.eye(5).double()[label]
            expected += probability[label] * torch.outer(residual.square(), row.square()) / 9
    assert_close(factors.second_moments[0], expected, rtol=1e-9, atol=1e-14)


def test_coverage_names_the_identity() -> None:
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 7))
    wide, narrow = (IFComp(model, max_output_basis=maximum).coverage.rows for maximum in (6, 7))
    assert [row.treatment for row in wide] == ["EKFAC", "EKFAC (identity output basis)"]  # only the last layer
    assert [row.treatment for row in narrow] == ["EKFAC", "EKFAC"]


def test_the_default_is_4096_classes_and_memory_is_linear_beyond() -> None:
    blocks = {}
    for classes in (4_096, 4_097, 40_000):
        ifc = IFComp(nn.Linear(3, classes))
        blocks[classes] = ifc._inventory.blocks
    assert blocks[4_096][0].treatment == "EKFAC"
    assert factor_bytes(blocks[4_096], 4) == 4 * (4_096 * 4 + 16 + 4_096**2)
    for classes in (4_097, 40_000):
        assert blocks[classes][0].treatment == "EKFAC (identity output basis)"
        assert factor_bytes(blocks[classes], 4) == 4 * (classes * 4 + 16)


def test_a_weight_that_is_recorded_without_its_bias_keeps_the_identity() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.body(x).tanh(), self.head.weight) + 2 * self.head.bias

    torch.manual_seed(0)
    ifc = IFComp(Head().double(), max_output_basis=5).fit([torch.randn(8, 4).double()])
    assert ifc.factors is not None
    basis = ifc.factors.blocks["head"].basis
    assert basis is not None
    assert basis.outputs is None


def test_save_and_load(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 6)), torch.randn(20, 4)
    ifc = IFComp(model, max_output_basis=5).fit([x])
    ifc.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", model)
    assert torch.equal(loaded.influence(x), ifc.influence(x))
    assert str(loaded.coverage) == str(ifc.coverage)
    assert ifc.factors is not None
    made = IFComp.from_factors(model, ifc.factors, max_output_basis=5)
    assert torch.equal(made.influence(x), ifc.influence(x))
    with pytest.raises(FingerprintError, match="max_output_basis="):
        IFComp.from_factors(model, ifc.factors)


@pytest.mark.parametrize("value", [True, 2.5, "many"])
def test_the_maximum_is_a_whole_number(value: object) -> None:
    with pytest.raises(SettingError, match="max_output_basis must be a whole number"):
        IFComp(nn.Linear(2, 3), max_output_basis=value)  # type: ignore[arg-type]
