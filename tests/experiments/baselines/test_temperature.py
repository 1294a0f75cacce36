"""Temperature scaling against a temperature fitted to the logits written out."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from experiments.baselines.temperature import TemperatureScaling
from ifcomp.errors import EmptyDataError, LabelError, SettingError
from ifcomp.tasks.simple_scores import fit_temperature


def test_predictions_are_scaled_by_the_temperature_of_the_logits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
    x, y = torch.randn(60, 3), torch.randint(4, (60,))
    y[:30] = model[0](x[:30]).argmax(1)
    scaled = TemperatureScaling.fit(model, [(x[:25], y[:25]), (x[25:], y[25:])])
    logits = model[0](x).detach().double()
    assert scaled.temperature == pytest.approx(fit_temperature(logits, y), rel=1e-6)
    assert scaled.temperature != pytest.approx(1, rel=0.1)
    assert_close(scaled.predict_proba(x), torch.softmax(logits / scaled.temperature, 1))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_refuses_temperatures_that_mean_nothing(temperature: float) -> None:
    with pytest.raises(SettingError, match="temperature"):
        TemperatureScaling(nn.Linear(2, 2), temperature)


def test_needs_labelled_data() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(EmptyDataError):
        TemperatureScaling.fit(model, [])
    with pytest.raises(LabelError):
        TemperatureScaling.fit(model, [torch.randn(3, 2)])
