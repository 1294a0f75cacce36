"""MC dropout against all masks written out, and against single examples run by plain torch."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from experiments.baselines.dropout import MonteCarloDropout
from experiments.baselines.interface import derived_seed
from ifcomp.errors import ModelError, SettingError


def network(rate: float = 0.4) -> nn.Module:
    """Dropout of pixels, channels and features around BatchNorm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Dropout(rate), nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(rate)),
        *(nn.Flatten(), nn.Linear(16, 8), nn.AlphaDropout(rate), nn.Linear(8, 3)),
    )
    model[2].running_mean.normal_()
    return model.double()


def test_many_samples_reach_the_mean_over_all_masks() -> None:
    torch.manual_seed(1)
    rate, linear = 0.3, nn.Linear(3, 2).double()
    linear.weight.detach().mul_(8)
    x = torch.randn(4, 3, dtype=torch.float64)
    mean, square = torch.zeros(4, 2).double(), torch.zeros(4, 2).double()
    for mask in itertools.product([0, 1], repeat=3):
        weight = rate ** (3 - sum(mask)) * (1 - rate) ** sum(mask)
        p = torch.softmax(linear(x * torch.tensor(mask) / (1 - rate)), 1).detach()
        mean, square = mean + weight * p, square + weight * p**2
    samples = 500
    probability = MonteCarloDropout(nn.Sequential(nn.Dropout(rate), linear), samples).predict_proba(x)
    deviation = ((square - mean**2) / samples).sqrt()
    assert ((probability - mean).abs() < 4 * deviation).all()
    plain = torch.softmax(linear(x), 1)
    assert ((plain - mean).abs() > 8 * deviation).any()  # the mean is not what dropping nothing gives


def test_is_the_mean_over_networks_that_every_example_goes_through_alone() -> None:
    model, x = network(), torch.randn(5, 2, 3, 3).double()
    probability = MonteCarloDropout(model, samples=6, seed=3).predict_proba(x)
    model.eval()
    for module in model:
        module.train("Dropout" in type(module).__name__)
    rows = []
    for example in x:
        sampled = []
        for index in range(6):
            torch.manual_seed(derived_seed(3, index))
            sampled.append(torch.softmax(model(example[None])[0], 0))
        rows.append(torch.stack(sampled).mean(0))
    assert_close(probability, torch.stack(rows).detach(), rtol=1e-12, atol=0)


def test_seeds_decide() -> None:
    model, x = network(), torch.randn(4, 2, 3, 3).double()
    first = MonteCarloDropout(model, 3, seed=0).predict_proba(x)
    assert torch.equal(first, MonteCarloDropout(model, 3, seed=0).predict_proba(x))
    assert not torch.allclose(first, MonteCarloDropout(model, 3, seed=1).predict_proba(x), rtol=1e-3)


def test_models_that_vmap_cannot_run() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.drop, self.head = nn.LSTM(3, 4, batch_first=True), nn.Dropout(0.5), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.drop(self.lstm(x)[0][:, -1]))

    torch.manual_seed(0)
    model, x = Recurrent().double(), torch.randn(3, 5, 3).double()
    predictive = MonteCarloDropout(model, 4)
    alone = torch.cat([predictive.predict_proba(x[i : i + 1]) for i in range(3)])
    assert_close(predictive.predict_proba(x), alone, rtol=1e-12, atol=0)


def test_transformer_layers_drop_too() -> None:
    """In eval mode and without gradients torch would take a fused path without the dropout modules."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).eval()
    x = torch.randn(2, 3, 4)
    one, other = (MonteCarloDropout(model, 1, seed=seed).predict_proba(x) for seed in (0, 1))
    assert (one - other).abs().max() > 1e-3
    assert torch.backends.mha.get_fastpath_enabled()


def test_refuses_a_model_without_active_dropout() -> None:
    with pytest.raises(ModelError, match="dropout"):
        MonteCarloDropout(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="dropout"):
        MonteCarloDropout(network(rate=0.0))
    with pytest.raises(SettingError, match="samples"):
        MonteCarloDropout(network(), samples=0)
