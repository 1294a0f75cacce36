"""Products of the inverse curvature with gradients against dense matrices, for every kind of layer."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from cases import LAYER_CASES, MODEL_CASES, TRANSPOSED_CASES, Case
from comparison import assert_same, basis_arguments, fitted, library_block, oracle_blocks
from experiments.baselines.ekfac import EkfacCovariance
from ifcomp import IFComp, Relative
from ifcomp.errors import ModelError, SettingError
from oracles import OracleBlock, block_jacobian, ekfac_inverse

DAMPING = 1e-2


def random_gradients(ifc: IFComp, *leading: int) -> dict[str, Tensor]:
    """Random tensors in the shapes of the trainable parameters."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(*leading, *value.shape, generator=generator, dtype=torch.float64)
        for name, value in ifc.model.named_parameters()
        if value.requires_grad
    }


def canonical(case: Case, values: dict[str, Tensor]) -> list[Tensor]:
    """Values by parameter as one vector for each block of the case, in the oracle's layout."""
    single = {name: value[None, None] for name, value in values.items()}
    return [block_jacobian(single, block).flatten() for block in oracle_blocks(case)]


def dense_inverse(ifc: IFComp, block: OracleBlock) -> Tensor:
    """``(F + delta)^-1`` of a block as a dense matrix."""
    fitted_block = library_block(ifc, block)
    moments = ifc.factors.blocks[fitted_block.name].second_moments
    return ekfac_inverse(moments, DAMPING, **basis_arguments(ifc, fitted_block))


#: The baseline does not support the transposed weights of Conv1D and transposed convolutions.
CASES = [
    case for case in [*LAYER_CASES, *MODEL_CASES] if case not in TRANSPOSED_CASES and case.name != "transformers_conv1d"
]


@pytest.mark.parametrize(
    ("case", "sua"),
    [*((case, False) for case in CASES), *((case, True) for case in CASES if "conv" in case.name)],
    ids=str,
)
def test_product_is_that_of_the_dense_inverse(case: Case, sua: bool) -> None:
    ifc = fitted(case, size=4, sua=sua)
    gradients = random_gradients(ifc)
    covariance = EkfacCovariance(ifc, DAMPING, scale=3.0)
    products = covariance.multiply(gradients)
    assert covariance.names == products.keys()
    vectors = zip(oracle_blocks(case), canonical(case, gradients), strict=True)
    expected = [3.0 * dense_inverse(ifc, block) @ vector for block, vector in vectors]
    for product, truth in zip(canonical(case, products), expected, strict=True):
        assert_same(product, truth)


@pytest.mark.parametrize("name", ["conv2d_groups", "lenet", "class_token", "embedding"])
def test_product_runs_under_vmap(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    ifc = fitted(case, size=4)
    covariance = EkfacCovariance(ifc, Relative(0.1), scale=1.0)
    gradients = random_gradients(ifc, 3)
    products = vmap(covariance.multiply)(gradients)
    for index in range(3):
        alone = covariance.multiply({name: value[index] for name, value in gradients.items()})
        for name, value in alone.items():
            assert_same(products[name][index], value)


def test_parameters_outside_of_the_fit_get_zero() -> None:
    case = next(case for case in MODEL_CASES if case.name == "lenet")
    ifc = fitted(case, size=4, layers="last")
    covariance = EkfacCovariance(ifc, DAMPING, scale=1.0)
    assert covariance.names == {"11.weight", "11.bias"}
    products = covariance.multiply(random_gradients(ifc))
    assert {name for name, value in products.items() if value.any()} == covariance.names


def test_a_block_whose_name_is_not_a_layer_is_refused() -> None:
    ifc = fitted(next(case for case in LAYER_CASES if case.name == "linear"), size=4)
    renamed = {f"other.{name}": block for name, block in ifc.factors.blocks.items()}
    ifc.factors = replace(ifc.factors, blocks=renamed)
    with pytest.raises(ModelError, match=r"block 'other\."):
        EkfacCovariance(ifc, DAMPING, scale=1.0)


def test_directions_without_curvature_need_damping() -> None:
    ifc = fitted(next(case for case in MODEL_CASES if case.name == "lenet"), size=4)
    zero = {name: replace(block, second_moments=0 * block.second_moments) for name, block in ifc.factors.blocks.items()}
    ifc.factors = replace(ifc.factors, blocks=zero)
    with pytest.raises(SettingError, match="above 0"):
        EkfacCovariance(ifc, 0.0, scale=1.0)
