"""Fitted factors, damping and settings, with numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ifcomp.blocks.block import Basis
from ifcomp.curvature.factors import (
    BlockFactors,
    Factors,
    FitSettings,
    Relative,
    check_damping,
    check_finite,
    inverse_curvature,
)
from ifcomp.errors import NonFiniteError, SettingError


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def factors(**moments: Tensor) -> Factors:
    """Diagonal blocks with these second moments."""
    return Factors({name: BlockFactors(value) for name, value in moments.items()}, 3, 2, FitSettings())


def test_inverse_curvature() -> None:
    moments = torch.tensor([4.0, 1.0, 0.0])
    assert_close(inverse_curvature(moments, 1.0), double(0.2, 0.5, 1.0))
    assert inverse_curvature(moments, 0.0).tolist() == [0.25, 1.0, 0.0]
    assert inverse_curvature(torch.zeros(2), 0.0).tolist() == [0.0, 0.0]
    assert inverse_curvature(torch.zeros(0), 0.0).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rounding_errors_of_gradients_are_not_curvature(dtype: torch.dtype) -> None:
    threshold = (128 * torch.finfo(dtype).eps) ** 2
    moments = torch.tensor([1.0, 0.5 * threshold, 2 * threshold], dtype=dtype)
    assert_close(inverse_curvature(moments, 0.0), double(1.0, 0.0, 0.5 / threshold))


def test_damping_and_effective_parameters() -> None:
    fitted = factors(a=torch.tensor([4.0, 2.0]), b=torch.tensor([1.0]))
    assert (fitted.damping_of("a", 2), fitted.damping_of("a", Relative(0.5))) == (2.0, 1.5)
    assert fitted.effective_parameters(2.0) == pytest.approx(4 / 6 + 2 / 4 + 1 / 3)
    assert fitted.effective_parameters(Relative(1.0)) == pytest.approx(4 / 7 + 2 / 5 + 1 / 2)
    assert fitted.effective_parameters(0.0) == 3.0


def test_factors_have_shapes_and_types_and_can_be_moved() -> None:
    rotation = torch.tensor([[[0.6, -0.8], [0.8, 0.6]]], dtype=torch.float64)
    blocks = {
        "a": BlockFactors(torch.ones(1, 2, 2), Basis(rotation, rotation)),
        "b": BlockFactors(torch.ones(1, 2, 5), Basis(None, rotation)),
        "c": BlockFactors(torch.ones(3)),
    }
    assert blocks["a"].shapes == ((1, 2, 2), (1, 2, 2), (1, 2, 2))
    assert blocks["b"].shapes == ((1, 2, 5), None, (1, 2, 2))
    assert blocks["c"].shapes == ((3,), None, None)
    assert blocks["a"].dtypes == blocks["b"].dtypes == {torch.float32, torch.float64}
    assert blocks["c"].dtypes == {torch.float32}
    moved = Factors(blocks, 3, 2, FitSettings(seed=4)).to(torch.device("meta"))
    assert (moved.count, moved.num_classes, moved.settings) == (3, 2, FitSettings(seed=4))
    assert {name: block.shapes for name, block in moved.blocks.items()} == {
        name: block.shapes for name, block in blocks.items()
    }
    for block in moved.blocks.values():
        tensors = [block.second_moments, *((block.basis.inputs, block.basis.outputs) if block.basis else ())]
        assert {tensor.device.type for tensor in tensors if tensor is not None} == {"meta"}


def test_overflow_names_the_layers() -> None:
    check_finite(factors(a=torch.ones(2)))
    overflowed = factors(a=torch.tensor([1.0, math.inf]), b=torch.ones(2), c=torch.tensor([math.nan]))
    with pytest.raises(NonFiniteError, match=r"squared gradients of a, c overflow.*model\.double\(\).*layers="):
        check_finite(overflowed)


@pytest.mark.parametrize("wrong", [-1, -1e-9, math.nan, math.inf, True, "1", None])
def test_invalid_numbers_are_refused(wrong: object) -> None:
    message = f"must be a finite number of at least 0 or Relative(number), but is {wrong!r}."
    for damping in (wrong, Relative(wrong)):
        with pytest.raises(SettingError) as caught:
            check_damping(damping)
        assert str(caught.value) == f"damping {message}"
    with pytest.raises(SettingError) as caught:
        FitSettings(beta=wrong)
    assert str(caught.value) == f"beta must be a finite number of at least 0, but is {wrong!r}."


def test_valid_settings() -> None:
    assert check_damping(0) == 0
    assert check_damping(Relative(0.5)) == Relative(0.5)
    assert FitSettings() == FitSettings(1.0, "sampled", 1, 0)


@pytest.mark.parametrize(
    ("name", "value"), [("fisher", "true"), ("label_samples", 0), ("label_samples", 1.5), ("seed", 0.5)]
)
def test_invalid_settings_are_refused(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=rf"^{name} must be .*, but is {value!r}\.$"):
        FitSettings(**{name: value})


def test_automatic_beta_is_refused_with_advice() -> None:
    with pytest.raises(SettingError, match=r"beta='auto' needs held-out data.*IFComp\.calibrate\(held_out\)"):
        FitSettings(beta="auto")
