"""Moments against numpy, SWA against torch's averaging, and SWAG against draws written out by hand."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.testing import assert_close

from experiments.baselines.ensemble import DeepEnsemble
from experiments.baselines.interface import derived_seed
from experiments.baselines.swag import Swag, WeightMoments, swa_model
from ifcomp.errors import DataError, ModelError, NotFittedError, SettingError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()


def path(model: nn.Module, length: int = 4, offset: float = 0.0) -> list[nn.Module]:
    """Copies of a model with noise in the weights."""
    generator = torch.Generator().manual_seed(1)
    models = [copy.deepcopy(model) for _ in range(length)]
    for moved in models:
        for value in moved.parameters():
            value.detach().add_(offset + torch.randn(value.shape, generator=generator).to(value))
    return models


def collected(models: list[nn.Module]) -> WeightMoments:
    moments = WeightMoments()
    for model in models:
        moments = moments.collect(model)
    return moments


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    return [(part, torch.zeros(len(part)).long()) for part in x.split(8)]


def test_moments_are_those_of_numpy() -> None:
    models = path(network())
    moments = collected(models)
    assert moments.count == 4
    for name, _ in models[0].named_parameters():
        stacked = np.stack([model.get_parameter(name).detach().numpy() for model in models])
        assert_close(moments.mean[name].numpy(), stacked.mean(0), rtol=1e-12, atol=1e-15)
        assert_close(moments.variance[name].numpy(), stacked.var(0), rtol=1e-12, atol=1e-15)


def test_variance_survives_weights_far_from_zero() -> None:
    """A mean of squares minus a squared mean would leave nothing of a variance of 1 around 1e9."""
    variance = collected(path(network(), offset=1e9)).variance["0.weight"]
    near = collected(path(network())).variance["0.weight"]
    assert_close(variance, near, rtol=1e-5, atol=1e-6)


def test_collecting_leaves_what_was_there_alone() -> None:
    model = network()
    first = WeightMoments().collect(model)
    before = first.mean["0.weight"].clone()
    first.collect(path(model)[0])
    model[0].weight.detach().zero_()
    assert first.count == 1
    assert torch.equal(first.mean["0.weight"], before)


def test_swa_is_what_torch_averages() -> None:
    models, data = path(network()), batches()
    averaged = AveragedModel(models[0])
    for model in models:
        averaged.update_parameters(model)
    update_bn(data, averaged)
    ours = swa_model(models[0], collected(models), data)
    expected = averaged.module.state_dict()
    assert expected.keys() == ours.state_dict().keys()
    for name, value in ours.state_dict().items():
        assert_close(value, expected[name], rtol=1e-12, atol=1e-14)
    assert not any(module.training for module in ours.modules())


def test_samples_have_the_collected_moments() -> None:
    moments = collected(path(network()))
    draws = torch.stack([moments.sample(seed)["3.bias"] for seed in range(4000)])
    mean, variance = moments.mean["3.bias"], moments.variance["3.bias"]
    assert ((draws.mean(0) - mean).abs() < 4 * (variance / 4000).sqrt()).all()
    assert ((draws.var(0) / variance - 1).abs() < 4 * (2 / 4000) ** 0.5).all()


def test_swag_is_the_mean_over_networks_with_their_own_statistics() -> None:
    models, data = path(network()), batches()
    moments, x = collected(models), torch.randn(5, 3).double()
    probability = Swag(models[0], moments, data, samples=3, seed=7).predict_proba(x)
    rows = []
    for index in range(3):
        weights = moments.sample(derived_seed(7, index))
        hidden = [part @ weights["0.weight"].T for part, _ in data]
        mean = torch.stack([part.mean(0) for part in hidden]).mean(0)
        variance = torch.stack([part.var(0) for part in hidden]).mean(0)
        h = (x @ weights["0.weight"].T - mean) / (variance + 1e-5).sqrt()
        h = torch.relu(h * weights["1.weight"] + weights["1.bias"])
        rows.append(torch.softmax(h @ weights["3.weight"].T + weights["3.bias"], 1))
    assert_close(probability, torch.stack(rows).mean(0), rtol=1e-10, atol=1e-14)


def test_without_variance_swag_is_swa() -> None:
    model, data = path(network())[0], batches()
    moments, x = collected([model, model]), torch.randn(4, 3).double()
    swa = DeepEnsemble([swa_model(model, moments, data)])
    assert_close(Swag(model, moments, data, samples=2).predict_proba(x), swa.predict_proba(x), rtol=1e-12, atol=0)


def test_dicts_and_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
            self.second.weight = self.first.weight

        def forward(self, values: Tensor) -> Tensor:
            return self.second(self.norm(self.first(values)))

    torch.manual_seed(0)
    model = Tied().double()
    moments = collected(path(model))
    data = [{"values": x, "labels": y} for x, y in batches()]
    swa = swa_model(model, moments, data)
    assert swa.second.weight is swa.first.weight
    assert swa.norm.running_mean.abs().max() > 0
    swag = Swag(model, moments, data, samples=2)
    assert_close(swag.predict_proba(data[0]).sum(1), torch.ones(8).double())


def test_refuses_what_does_not_go_together() -> None:
    model = network()
    moments = collected(path(model))
    with pytest.raises(DataError, match="BatchNorm"):
        Swag(model, moments)
    with pytest.raises(DataError, match="BatchNorm"):
        swa_model(model, moments)
    with pytest.raises(NotFittedError, match="collect"):
        Swag(model, WeightMoments(), batches())
    with pytest.raises(ModelError, match=r"0\.weight"):
        moments.collect(nn.Sequential(nn.Linear(2, 3)))
    with pytest.raises(SettingError, match="samples"):
        Swag(model, moments, batches(), samples=0)
