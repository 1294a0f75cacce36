"""The temperature against closed forms and a fine grid."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from experiments.baselines.temperature import TemperatureScaling
from ifcomp.errors import EmptyDataError, LabelError, SettingError


def drawn(size: int, classes: int, temperature: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and labels that follow them at a temperature."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(size, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(logits / temperature, 1), 1, generator=generator).squeeze(1)
    return logits, labels


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """As fitted on top of logits that are the inputs themselves."""
    return TemperatureScaling.fit(lambda x: x, [(logits, labels)]).temperature


def nll(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> float:
    return float(nn.functional.cross_entropy(logits / temperature, labels))


@pytest.mark.parametrize(("margin", "right"), [(3.0, 9), (0.2, 6), (50.0, 8)])
def test_two_labels_with_one_margin_have_a_closed_form(margin: float, right: int) -> None:
    """At the best temperature the probability of the larger logit is the share of examples where it is right."""
    logits = torch.tensor([[margin, 0.0]]).repeat(10, 1)
    labels = (torch.arange(10) >= right).long()
    share = right / 10
    assert fit_temperature(logits, labels) == pytest.approx(margin / math.log(share / (1 - share)), rel=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_no_temperature_of_a_fine_grid_is_better(temperature: float) -> None:
    logits, labels = drawn(400, 5, temperature)
    found = fit_temperature(logits, labels)
    best = min((nll(logits, labels, t), t) for t in torch.logspace(-2, 2, 4001, dtype=torch.float64).tolist())
    assert nll(logits, labels, found) <= best[0] + 1e-14
    assert found == pytest.approx(best[1], rel=2e-3)  # neighbours on the grid differ by 0.23 %


def test_the_temperature_of_many_labels_is_found() -> None:
    logits, labels = drawn(40_000, 4, 1.7)
    assert fit_temperature(logits, labels) == pytest.approx(1.7, rel=0.03)


def test_units_of_the_logits_go_into_the_temperature_alone() -> None:
    logits, labels = drawn(300, 3, 1.5)
    found = fit_temperature(logits, labels)
    assert fit_temperature(20 * logits, labels) == pytest.approx(20 * found, rel=1e-9)
    assert fit_temperature(logits + 1e3 * torch.randn(300, 1), labels) == pytest.approx(found, rel=1e-9)


def test_works_on_top_of_a_model_and_of_any_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    x, y = torch.randn(60, 3), torch.randint(4, (60,))
    y[:30] = model[0](x[:30]).argmax(1)
    data = [(x[:25], y[:25]), (x[25:], y[25:])]
    of_model = TemperatureScaling.fit(model, data)
    of_function = TemperatureScaling.fit(lambda x: model[0](x), data)
    assert of_model.temperature == pytest.approx(of_function.temperature, rel=1e-12)
    assert of_model.temperature == pytest.approx(fit_temperature(model[0](x), y), rel=1e-12)
    expected = torch.softmax(model[0](x).double() / of_model.temperature, 1)
    assert_close(of_model.predict_proba(x), expected)
    assert_close(of_function.predict_proba(x), expected)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_refuses_temperatures_that_mean_nothing(temperature: float) -> None:
    with pytest.raises(SettingError, match="temperature"):
        TemperatureScaling(nn.Linear(2, 2), temperature)


def test_extreme_logits_give_the_nearest_temperature_of_the_range() -> None:
    logits = torch.randn(20, 3)
    assert fit_temperature(logits, logits.argmax(1)) == pytest.approx(0.02)  # every label has the largest logit
    assert fit_temperature(logits, logits.argmin(1)) == pytest.approx(50)  # uniform probabilities are best
    logits, labels = drawn(300, 3, 1.5)
    assert fit_temperature(1e4 * logits, labels) == pytest.approx(50)


def test_needs_labelled_data() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(EmptyDataError):
        TemperatureScaling.fit(model, [])
    with pytest.raises(LabelError):
        TemperatureScaling.fit(model, [torch.randn(3, 2)])
