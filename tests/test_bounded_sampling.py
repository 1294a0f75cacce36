"""Bounded complexity from a sample of labels: bias, standard error, control variate and independence of the batch."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ifcomp import IFComp
from ifcomp.bounded import SAMPLED_LABELS, evaluate_bounded
from ifcomp.complexity import (
    approximate_hindsight,
    expected_influence,
    label_chances,
    sampled_excess,
    sampled_expected_influence,
)
from ifcomp.curvature.labels import draw_labels, label_residuals
from ifcomp.label_samples import label_passes, sample_size
from ifcomp.scoring import Microbatch, evaluate
from ifcomp.tasks.ood import OOD_DAMPING

WEIGHT = 0.04  # added probability over mean influence


def hindsight_sum(log_probability: np.ndarray, influence: np.ndarray) -> float:
    """``S = sum_y sigmoid(h_y)`` of one example from a root finder, label by label."""
    total = 0.0
    for label, (log, own) in enumerate(zip(log_probability, influence, strict=True)):
        log_rest = float(np.logaddexp.reduce(np.delete(log_probability, label)))
        odds, pull = float(log) - log_rest, WEIGHT * float(own) / math.exp(2 * log_rest)

        def excess(value: float, pull: float = pull, odds: float = odds) -> float:
            return value - odds - pull / (1 + math.exp(min(value, 700)))

        total += 1 / (1 + math.exp(-brentq(excess, odds - 1, odds + pull + 1, xtol=1e-13)))
    return total


def example(classes: int = 7, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, influence and its approximation of one example, each [K]."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(classes, generator=generator, dtype=torch.float64)
    influence = 100 * torch.rand(classes, generator=generator, dtype=torch.float64)
    control = influence * (0.5 + torch.rand(classes, generator=generator, dtype=torch.float64))
    return logits.log_softmax(0), influence, control


def all_samples(chances: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Every possible sample of the labels with chances [K], after the top label, and its probability."""
    others = chances.nonzero().flatten().tolist()
    top = int(chances.argmin())
    labels = torch.tensor([[top, *chosen] for chosen in product(others, repeat=samples)])
    return labels, chances[labels[:, 1:]].prod(1)


def samples_of(
    log_probability: Tensor, influence: Tensor, control: Tensor, samples: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``S - 1`` and its standard error for every possible sample of labels, and the probability of each sample."""
    approximate = approximate_hindsight(log_probability[None], control[None], 0.5, 0.5 * WEIGHT)
    chances = label_chances((approximate * (1 - approximate)).sqrt(), log_probability.argmax()[None], 0.5)
    labels, probability = all_samples(chances[0], samples)
    rows = (each.expand(len(labels), -1) for each in (log_probability, approximate, chances))
    logs, approximations, drawn_with = rows
    excess, error = sampled_excess(logs, labels, influence[labels], approximations, drawn_with, 0.5, 0.5 * WEIGHT)
    return excess, error, probability


@pytest.mark.parametrize("control", ["near", "zero", "wrong"])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_the_expected_influence_is_unbiased_over_all_samples(samples: int, control: str) -> None:
    for seed in range(3):
        log_probability, influence, near = example(seed=seed)
        approximate = {"near": near, "zero": 0 * near, "wrong": 0.1 * near.flip(0)}[control]
        p = log_probability.exp()
        chances = label_chances((p * approximate)[None], p.argmax()[None], 0.1)
        labels, probability = all_samples(chances[0], samples)
        rows = (each.expand(len(labels), -1) for each in (p, approximate, chances))
        estimates = sampled_expected_influence(next(rows), labels, influence[labels], *rows)
        expected = expected_influence(p[None], influence[None])
        assert float((probability * estimates).sum()) == pytest.approx(float(expected), rel=1e-10)
        assert float(estimates.std()) > 1e-4


@pytest.mark.parametrize("control", ["near", "zero", "wrong"])
@pytest.mark.parametrize("samples", [2, 3, 4])
def test_the_sum_is_unbiased_over_all_samples(samples: int, control: str) -> None:
    for seed in range(3):
        log_probability, influence, near = example(seed=seed)
        approximate = {"near": near, "zero": 0 * near, "wrong": near.flip(0) * 7}[control]
        excess, _, chances = samples_of(log_probability, influence, approximate, samples)
        expected = hindsight_sum(log_probability.numpy(), influence.numpy())
        assert float(chances.sum()) == pytest.approx(1, rel=1e-12)
        assert float(1 + (chances * excess).sum()) == pytest.approx(expected, rel=1e-10)
        assert float(excess.std()) > 1e-4


@pytest.mark.parametrize("samples", [2, 4])
def test_the_squared_standard_error_is_the_variance_over_all_samples(samples: int) -> None:
    excess, error, chances = samples_of(*example(), samples)
    mean = (chances * excess).sum()
    variance = (chances * (excess - mean).square()).sum()
    assert float((chances * error.square()).sum()) == pytest.approx(float(variance), rel=1e-10)


def test_an_exact_control_variate_leaves_no_error() -> None:
    log_probability, influence, _ = example()
    excess, error, _ = samples_of(log_probability, influence, influence, 2)
    expected = hindsight_sum(log_probability.numpy(), influence.numpy()) - 1
    torch.testing.assert_close(excess, torch.full_like(excess, expected), rtol=1e-9, atol=0)
    assert float(error.max()) < 1e-12


def test_the_bias_of_the_logarithm_is_as_documented() -> None:
    log_probability, influence, control = example()
    excess, error, chances = samples_of(log_probability, influence, control, 4)
    exact = math.log(hindsight_sum(log_probability.numpy(), influence.numpy()))
    bias = float((chances * excess.log1p()).sum()) - exact
    documented = -float((chances * error.square()).sum() / (2 * (1 + (chances * excess).sum()) ** 2))
    assert bias < 0
    assert bias == pytest.approx(documented, rel=0.1)


def test_labels_are_drawn_by_size_and_uniformly() -> None:
    chances = label_chances(torch.tensor([[9.0, 5.0, 3.0, 0.0, 0.0]], dtype=torch.float64), torch.tensor([0]), 0.1)
    expected = torch.tensor([[0, 0.9 * 5 / 8 + 0.025, 0.9 * 3 / 8 + 0.025, 0.025, 0.025]], dtype=torch.float64)
    torch.testing.assert_close(chances, expected, rtol=1e-12, atol=1e-12)
    equal = label_chances(torch.zeros(1, 5, dtype=torch.float64), torch.tensor([3]), 0.1)
    torch.testing.assert_close(equal, torch.tensor([[0.25, 0.25, 0.25, 0, 0.25]], dtype=torch.float64))


def test_labels_are_drawn_with_their_chances() -> None:
    chances = torch.tensor([[0.0, 0.6, 0.3, 0.1], [0.25, 0.25, 0.5, 0.0]], dtype=torch.float64)
    draws = torch.stack([draw_labels(chances, 2, seed) for seed in range(2_000)])  # [seeds, B, 2]
    for row, expected in enumerate(chances):
        for draw in range(2):
            counts = torch.bincount(draws[:, row, draw], minlength=4) / 2_000
            assert bool(((counts - expected).abs() <= 5 * (expected * (1 - expected) / 2_000).sqrt()).all())
        both = draws[:, row, 0] * 4 + draws[:, row, 1]
        expected_both = torch.outer(expected, expected).flatten()
        counts = torch.bincount(both, minlength=16) / 2_000
        assert bool(((counts - expected_both).abs() <= 5 * (expected_both / 2_000).sqrt()).all())


def test_draws_depend_on_the_chances_and_the_seed_only() -> None:
    chances = torch.rand(4, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = draw_labels(chances, 16, 0)
    assert torch.equal(draw_labels(chances[2:3], 16, 0)[0], labels[2])
    assert torch.equal(draw_labels(chances * (1 + 1e-9 * torch.rand(4, 100).double()), 16, 0), labels)
    assert not torch.equal(draw_labels(chances, 16, 1), labels)


def trained(classes: int = 40, dtype: torch.dtype = torch.float64) -> tuple[IFComp, Tensor]:
    """A fitted network with many classes, and inputs with confident and uncertain predictions."""
    torch.manual_seed(0)
    centres = torch.randn(classes, 8)
    y = torch.arange(10 * classes) % classes
    x = centres[y] + 0.3 * torch.randn(len(y), 8)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, classes))
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    inputs = torch.cat([x[:20], torch.randn(20, 8), 6 * torch.randn(20, 8)])
    return IFComp(model.to(dtype), damping=1e-4).fit([x.to(dtype)]), inputs.to(dtype)


def over_seeds(ifc: IFComp, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Estimates and their errors, each [seeds, B]. The seed of the fit sets the sample; factors are the same."""
    evaluation = ifc._evaluation(ifc._batch(x), None)
    found = []
    for seed in range(count):
        factors = replace(evaluation.factors, settings=replace(ifc.settings, seed=seed))
        found.append(evaluate_bounded(replace(evaluation, factors=factors), [ifc._batch(x)], SAMPLED_LABELS))
    return torch.stack([each.value for each in found]), torch.stack([each.error for each in found])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("maximum", [4096, 30])
def test_influence_of_the_last_layer_equals_that_of_a_fit_of_it(maximum: int, dtype: torch.dtype) -> None:
    """The forms of the last block for every label, against explicit residuals and the factors."""
    ifc, x = trained(dtype=dtype)
    ifc = IFComp(ifc.model, damping=1e-4, max_output_basis=maximum).fit([x])
    assert ifc.factors is not None
    block = ifc.factors.blocks["2"]
    assert block.basis is not None
    assert block.basis.inputs is not None
    assert (block.basis.outputs is None) == (maximum == 30)
    with torch.no_grad():
        features = torch.cat([ifc.model[:2](x), torch.ones(len(x), 1).to(dtype)], 1).double()
        p = ifc.model(x).double().softmax(1)
    outputs = torch.eye(40).double() if block.basis.outputs is None else block.basis.outputs[0].double()
    expected = torch.zeros(len(x), 40).double()
    for label in range(40):
        residual = p.clone()
        residual[:, label] = 0
        residual[:, label] = -residual.sum(1)
        gradients = torch.einsum("bo,op,bj,jq->bpq", residual, outputs, features, block.basis.inputs[0].double())
        expected[:, label] = (gradients.square() / (block.second_moments[0].double() + 1e-4)).sum((1, 2))
    actual = last_layer_influence(ifc, x)
    torch.testing.assert_close(actual, expected, rtol=1e-8 if dtype == torch.float64 else 1e-3, atol=0)


def last_layer_influence(ifc: IFComp, x: Tensor) -> Tensor:
    """Influence of every label from the last layer alone, [B, K]."""
    batch = ifc._batch(x)

    def step(microbatch: Microbatch) -> Tensor:
        top = microbatch.probability.argmax(1)
        return microbatch.evaluator.last_layer(label_residuals(microbatch.probability, top), top)

    return torch.cat(list(evaluate(ifc._evaluation(batch, None), [batch], 1, step)))


def test_without_a_last_layer_of_one_output_per_class_its_influence_is_zero() -> None:
    """The last covered layer has 24 outputs, or several positions."""
    ifc, x = trained()
    body = IFComp(ifc.model, layers=["0"], damping=1e-4).fit([x])
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv1d(1, 40, 3), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten()).double()
    pooled = IFComp(convolution, damping=1e-4).fit([x.unsqueeze(1)])
    for predictor, inputs in ((body, x), (pooled, x.unsqueeze(1))):
        assert not last_layer_influence(predictor, inputs).any()
        exact = predictor.bounded_complexity(inputs, exact=True)
        estimates, errors = over_seeds(predictor, inputs, 20)
        ratios = (estimates - exact) / errors
        assert float((ratios.abs() > 3).double().mean()) < 0.2
        assert float(errors.mean()) < 0.4 * float(exact.mean())


def test_samples_are_the_default_beyond_32_classes() -> None:
    assert [sample_size(classes, 16) for classes in (2, 32, 33, 1_000)] == [None, None, 16, 16]
    assert sample_size(1_000, 16, exact=True) is None
    assert (label_passes(1_000, 16), label_passes(10, None)) == (17, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_predictor_estimates_beyond_32_classes(dtype: torch.dtype) -> None:
    ifc, x = trained(dtype=dtype)
    estimate, error = ifc.bounded_complexity(x, return_error=True)
    exact, zero = ifc.bounded_complexity(x, exact=True, return_error=True)
    assert torch.equal(ifc.bounded_complexity(x), estimate)
    np.testing.assert_allclose(exact, ifc.score([x]).column("bounded_complexity"), rtol=1e-5, atol=1e-10)
    assert not zero.any()
    assert (error > 0).all()
    assert not torch.allclose(estimate, exact, rtol=1e-3)
    assert float((estimate - exact).abs().mean()) < 0.1 * float(exact.std())


def test_estimates_follow_beta() -> None:
    ifc, x = trained()
    ifc = IFComp(ifc.model, beta=0.2, damping=1e-4).fit([x])
    (estimate, error), exact = ifc.bounded_complexity(x, return_error=True), ifc.bounded_complexity(x, exact=True)
    np.testing.assert_allclose(exact, ifc.score([x]).column("bounded_complexity"), rtol=1e-9)
    assert float(((estimate - exact) / error).abs().median()) < 2


def test_few_classes_are_exact() -> None:
    ifc, x = trained(classes=32)
    value, error = ifc.bounded_complexity(x, return_error=True)
    assert not error.any()
    assert torch.equal(value, ifc.bounded_complexity(x, exact=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_example_has_the_same_value_in_every_batch(dtype: torch.dtype) -> None:
    ifc, x = trained(dtype=dtype)
    together = torch.stack(ifc.bounded_complexity(x, return_error=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    shuffled = torch.stack(ifc.bounded_complexity(x[order], return_error=True))
    alone = torch.cat([torch.stack(ifc.bounded_complexity(row, return_error=True)) for row in x.split(7)], 1)
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(shuffled, together[:, order], **tolerance)
    torch.testing.assert_close(alone, together, **tolerance)


def test_estimates_scatter_around_the_exact_sum_by_their_error() -> None:
    ifc, x = trained()
    exact = ifc.bounded_complexity(x, exact=True)
    values, errors = over_seeds(ifc, x, 60)
    sums = values.exp()
    spread = sums.std(0) / math.sqrt(60)
    assert float(((sums.mean(0) - exact.exp()) / spread).abs().max()) < 5
    ratio = (errors * sums).square().mean(0) / sums.var(0)
    assert 0.7 < float(ratio.median()) < 1.4
    outside = ((values - exact) / errors).abs() > 3
    assert float(outside.double().mean()) < 0.08  # 0.25 for labels that are drawn uniformly


def test_the_control_variate_reduces_the_error() -> None:
    """Without it, the error is that of the hindsight probabilities themselves."""
    ifc, x = trained()
    value, error = ifc.bounded_complexity(x, return_error=True)
    mean_influence = ifc._evaluation(ifc._batch(x), None).effective_parameters
    log_probability, influence = ifc.model(x).detach().log_softmax(1), ifc.influence(x)
    top = log_probability.argmax(1)
    without = log_probability.exp()
    chances = label_chances(torch.ones_like(without), top, 1.0)
    labels = torch.cat([top.unsqueeze(1), draw_labels(chances, SAMPLED_LABELS, 0)], 1)
    _, plain = sampled_excess(log_probability, labels, influence.gather(1, labels), without, chances, mean_influence)
    assert float((error * value.exp() / plain).median()) < 0.5


def pairs_of_digits(first: int, stop: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two digits of scikit-learn side by side, and their classes 0 ... 99."""
    generator = torch.Generator().manual_seed(seed)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    left, right = (torch.randint(first, stop, (count,), generator=generator) for _ in range(2))
    return torch.cat([images[left], images[right]], 1), 10 * labels[left] + labels[right]


@pytest.mark.second_tier
def test_the_standard_error_is_honest_on_ood_inputs() -> None:
    """The share beyond three standard errors is 0.13 if only a tenth of the labels is drawn uniformly."""
    torch.manual_seed(0)
    x, y = pairs_of_digits(0, 1300, 6000, 0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 100))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for rows in (rows for _ in range(15) for rows in torch.randperm(6000).split(100)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    ifc = IFComp(model, damping=OOD_DAMPING).fit(list(zip(x.split(500), y.split(500), strict=True)), progress=False)
    inputs = pairs_of_digits(1300, 1797, 60, 1)[0][:, torch.randperm(128)]
    values, errors = over_seeds(ifc, inputs, 20)
    outside = ((values - ifc.bounded_complexity(inputs, exact=True)) / errors).abs() > 3
    assert float(outside.double().mean()) < 0.05
