"""Properties of all predictive baselines: form, independence of the batch, and a model that is not modified."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from experiments.baselines.acnml import Acnml
from experiments.baselines.dropout import MonteCarloDropout
from experiments.baselines.ensemble import DeepEnsemble
from experiments.baselines.interface import Predictive, derived_seed
from experiments.baselines.laplace import LastLayerLaplace
from experiments.baselines.swag import Swag, WeightMoments, swa_model
from experiments.baselines.temperature import TemperatureScaling
from ifcomp import IFComp
from ifcomp.errors import EmptyDataError, NonFiniteError

CLASSES = 3


class Network(nn.Module):
    """Convolution, BatchNorm, dropout. Works on its input in place, and has others without a batch axis."""

    in_place = True

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, pixels: Tensor, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:
        if pixels.shape[1] != 2:
            raise TypeError("not an image of two channels")
        features = torch.relu_(self.norm(self.conv(pixels.mul_(2) if self.in_place else 2 * pixels))).mean((2, 3))
        logits = scale * self.head(self.drop(features))
        return logits if shift is None else logits + shift


def images(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data() -> list[tuple[Tensor, Tensor]]:
    labels = torch.arange(24) % CLASSES
    return list(zip(images(24).split(8), labels.split(8), strict=True))


def network() -> nn.Module:
    """In mixed modes, with a frozen parameter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Network().double()
    model.norm.running_mean.copy_(torch.linspace(-1, 1, 4))
    model.train()
    model.head.eval()
    model.conv.bias.requires_grad_(False)
    return model


def moments(model: nn.Module) -> WeightMoments:
    moved = copy.deepcopy(model)
    for parameter in moved.parameters():
        parameter.detach().mul_(1.1)
    return WeightMoments().collect(model).collect(moved)


def swag_acnml(model: nn.Module) -> Predictive:
    """A posterior around the weights of the model."""
    mean = {name: value.detach().double() for name, value in model.named_parameters()}
    return Acnml.from_swag(model, WeightMoments(2, mean, moments(model).variance))


def fit(model: nn.Module) -> IFComp:
    return IFComp(model, fisher="exact").fit(data())


BASELINES: dict[str, Callable[[nn.Module], Predictive]] = {
    "IFComp": fit,
    "TemperatureScaling": lambda model: TemperatureScaling.fit(model, data()),
    "MonteCarloDropout": lambda model: MonteCarloDropout(model, samples=3),
    "DeepEnsemble": lambda model: DeepEnsemble([model, copy.deepcopy(model)]),
    "Swag": lambda model: Swag(model, moments(model), data(), samples=3),
    "Acnml.from_swag": swag_acnml,
    "Acnml.from_ekfac": lambda model: Acnml.from_ekfac(fit(model)),
    "LastLayerLaplace": lambda model: LastLayerLaplace(model, data()),
}


def look(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a baseline must leave alone."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return {
        "modes": [module.training for module in model.modules()],
        "tensors": {name: (value.detach().clone(), value.data_ptr(), value.requires_grad) for name, value in tensors},
        "gradients": [parameter.grad for parameter in model.parameters()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = look(model)
    for name, (value, *rest) in before.pop("tensors").items():
        current, *others = after["tensors"][name]
        assert torch.equal(current, value), name
        assert others == rest, name
    after.pop("tensors")
    assert after == before


@pytest.mark.parametrize("make", BASELINES.values(), ids=BASELINES.keys())
def test_gives_distributions_whatever_the_batch(make: Callable[[nn.Module], Predictive]) -> None:
    predictive, x = make(network()), images(7, seed=1)
    probability = predictive.predict_proba(x)
    assert probability.dtype == torch.float64
    assert probability.shape == (7, CLASSES)
    assert not probability.requires_grad
    assert (probability >= 0).all()
    assert_close(probability.sum(1), torch.ones(7).double(), rtol=0, atol=1e-12)
    alone = torch.cat([predictive.predict_proba(x[i : i + 1]) for i in range(7)])
    assert_close(probability, alone, rtol=1e-9, atol=0)
    assert torch.equal(probability, predictive.predict_proba(x))


@pytest.mark.parametrize("make", BASELINES.values(), ids=BASELINES.keys())
def test_takes_dicts(make: Callable[[nn.Module], Predictive]) -> None:
    predictive, x = make(network()), images(4, seed=1)
    plain = predictive.predict_proba(x)
    inputs = {"pixels": x, "labels": torch.zeros(4).long()}
    assert_close(predictive.predict_proba(inputs), plain, rtol=1e-9, atol=0)
    assert not torch.allclose(predictive.predict_proba({**inputs, "scale": 3.0}), plain)
    shift = torch.tensor([1.0, 2.0, 0.0]).double()  # one entry per label, not per example
    shifted = predictive.predict_proba({**inputs, "shift": shift})
    expected = [predictive.predict_proba({"pixels": x[i : i + 2], "shift": shift}) for i in (0, 2)]
    assert_close(shifted, torch.cat(expected), rtol=1e-9, atol=0)
    assert not torch.allclose(shifted, plain)


@pytest.mark.parametrize("make", BASELINES.values(), ids=BASELINES.keys())
def test_models_that_work_on_their_input_in_place(make: Callable[[nn.Module], Predictive]) -> None:
    harmless = network()
    harmless.in_place = False
    x, before = images(4, seed=1), images(4, seed=1)
    assert_close(make(network()).predict_proba(x), make(harmless).predict_proba(x), rtol=1e-9, atol=0)
    assert torch.equal(x, before)


@pytest.mark.parametrize("make", BASELINES.values(), ids=BASELINES.keys())
def test_leaves_the_model_and_the_random_state_as_they_were(make: Callable[[nn.Module], Predictive]) -> None:
    model = network()
    before, state = look(model), torch.random.get_rng_state()
    predictive = make(model)
    predictive.predict_proba(images(3))
    assert_untouched(model, dict(before))
    with pytest.raises(TypeError, match="two channels"):
        predictive.predict_proba(images(3)[:, :1])
    assert_untouched(model, before)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("make", BASELINES.values(), ids=BASELINES.keys())
def test_refuses_inputs_that_are_empty_or_not_finite(make: Callable[[nn.Module], Predictive]) -> None:
    predictive = make(network())
    with pytest.raises(EmptyDataError):
        predictive.predict_proba(images(0))
    with pytest.raises(NonFiniteError, match="example 1"):
        predictive.predict_proba(images(2).index_fill(0, torch.tensor(1), torch.nan))


def test_swa_leaves_the_model_as_it_was() -> None:
    model = network()
    before = look(model)
    swa_model(model, moments(model), data())
    assert_untouched(model, before)


def test_derived_seeds_differ() -> None:
    seeds = {derived_seed(seed, index) for seed in (-1, 0, 1, 2**40) for index in range(50)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
