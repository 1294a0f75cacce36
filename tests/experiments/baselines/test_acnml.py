"""ACNML against explicit steps with dense covariances, against the minimiser, and against influence in the limit."""

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.testing import assert_close

from cases import LAYER_CASES, MODEL_CASES, Case
from comparison import as_type, basis_arguments, fitted, library_block, oracle_blocks
from experiments.baselines.acnml import Acnml, DiagonalCovariance
from experiments.baselines.swag import WeightMoments, swa_model
from ifcomp import IFComp
from ifcomp.curvature.factors import Relative
from ifcomp.errors import ModelError, NonFiniteError, NotFittedError, SettingError
from oracles import Inputs, block_jacobian, ekfac_inverse

CASES = {case.name: case for case in [*LAYER_CASES, *MODEL_CASES]}

#: Covariance times gradients, by parameter name.
Times = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def brute_force(model: nn.Module, inputs: Inputs, times: Times, steps: int) -> Tensor:
    """The published procedure for one example and label after the other, with plain autograd on a copy."""
    size = len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))
    rows = []
    for index in range(size):
        alone = slice(index, index + 1)
        example = inputs[alone] if isinstance(inputs, Tensor) else {k: v[alone] for k, v in inputs.items()}
        classes = len(log_probabilities(model, example))
        rows.append(torch.stack([fitted_probability(model, example, label, times, steps) for label in range(classes)]))
    return torch.stack(rows)


def log_probabilities(model: nn.Module, example: Inputs) -> Tensor:
    output = model(**example) if isinstance(example, dict) else model(example)
    return torch.log_softmax(output if isinstance(output, Tensor) else output.logits, 1)[0]


def fitted_probability(model: nn.Module, example: Inputs, label: int, times: Times, steps: int) -> Tensor:
    moving = copy.deepcopy(model).eval()
    base = {n: p.detach().clone() for n, p in moving.named_parameters() if p.requires_grad}
    for _ in range(steps):
        parameters = [moving.get_parameter(name) for name in base]
        gradients = torch.autograd.grad(-log_probabilities(moving, example)[label], parameters, materialize_grads=True)
        change = times(dict(zip(base, gradients, strict=True)))
        with torch.no_grad():
            for name, value in base.items():
                moving.get_parameter(name).copy_(value - change[name])
    return log_probabilities(moving, example)[label].exp().detach()


def dense_times(case: Case, ifc: IFComp, damping: float, scale: float) -> Times:
    """``scale/n (F + delta)^-1`` as one dense matrix over all trainable parameters, one after the other."""
    shapes = {name: p.shape for name, p in ifc.model.named_parameters() if p.requires_grad}
    sizes = [shape.numel() for shape in shapes.values()]
    indices = torch.arange(sum(sizes)).split(sizes)
    positions = {name: index.view(1, 1, *shapes[name]) for name, index in zip(shapes, indices, strict=True)}
    covariance = torch.zeros(sum(sizes), sum(sizes), dtype=torch.float64)
    for block in oracle_blocks(case):
        fitted_block = library_block(ifc, block)
        order = block_jacobian(positions, block).flatten()
        moments = ifc.factors.blocks[fitted_block.name].second_moments
        inverse = ekfac_inverse(moments, damping, **basis_arguments(ifc, fitted_block))
        covariance[order[:, None], order] = scale / ifc.factors.count * inverse

    def times(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        product = covariance @ torch.cat([gradients[name].flatten() for name in shapes])
        return {name: part.view(shapes[name]) for name, part in zip(shapes, product.split(sizes), strict=True)}

    return times


def trained_path(model: nn.Module, spread: float) -> WeightMoments:
    moments = WeightMoments()
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        moved = copy.deepcopy(model)
        for value in moved.parameters():
            value.detach().add_(spread * torch.randn(value.shape, generator=generator).to(value))
        moments = moments.collect(moved)
    return moments


@pytest.mark.parametrize(
    "name",
    [
        *("linear", "linear_tokens", "conv2d", "conv2d_groups", "conv2d_depthwise", "batchnorm2d", "layernorm"),
        *("embedding", "attention", "tied", "class_token", "lstm", "lenet", "attention_padding"),
    ],
)
def test_ekfac_variant_is_the_published_procedure(name: str) -> None:
    case = CASES[name]
    ifc = fitted(case, size=4)
    inputs = as_type(case.sample(2, seed=5), torch.float64)
    times = dense_times(case, ifc, damping=1e-2, scale=0.5)
    hindsight = Acnml.from_ekfac(ifc, damping=1e-2, scale=0.5, steps=3).hindsight_proba(inputs)
    assert_close(hindsight, brute_force(ifc.model, inputs, times, steps=3), rtol=1e-8, atol=1e-12)


def test_ekfac_variant_with_shared_offsets() -> None:
    case = CASES["conv2d_groups"]
    ifc = fitted(case, size=4, sua=True)
    inputs = as_type(case.sample(2, seed=5), torch.float64)
    times = dense_times(case, ifc, damping=1e-2, scale=0.5)
    hindsight = Acnml.from_ekfac(ifc, damping=1e-2, scale=0.5, steps=2).hindsight_proba(inputs)
    assert_close(hindsight, brute_force(ifc.model, inputs, times, steps=2), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "conv2d_groups", "lenet", "tied", "attention_padding"])
def test_swag_variant_is_the_published_procedure(name: str) -> None:
    case = CASES[name]
    model = case.make().double()
    inputs = as_type(case.sample(2, seed=5), torch.float64)
    moments = trained_path(model, spread=0.3)
    model = swa_model(model, moments, [as_type(case.sample(6, seed=6), torch.float64)])

    def times(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: 0.5 * moments.variance[name] * gradient for name, gradient in gradients.items()}

    hindsight = Acnml.from_swag(model, moments).hindsight_proba(inputs)
    assert_close(hindsight, brute_force(model, inputs, times, steps=5), rtol=1e-8, atol=1e-12)


def test_defaults_are_those_of_the_published_code() -> None:
    case = CASES["linear"]
    ifc = fitted(case)
    inputs = as_type(case.sample(3, seed=5), torch.float64)
    times = dense_times(case, ifc, damping=1e-12, scale=1e-4)
    predictive = Acnml.from_ekfac(ifc, damping=1e-12)
    assert (predictive.steps, predictive.relaxation) == (5, 1.0)
    assert_close(
        predictive.hindsight_proba(inputs), brute_force(ifc.model, inputs, times, steps=5), rtol=1e-7, atol=1e-12
    )


def test_many_small_steps_reach_the_minimiser_of_logistic_regression() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    x = torch.randn(2, 3).double()
    variance = {name: torch.rand(value.shape).double() + 0.1 for name, value in model.named_parameters()}
    hindsight = Acnml(model, DiagonalCovariance(variance), steps=400, relaxation=0.1).hindsight_proba(x)
    base = np.concatenate([model.weight.detach().numpy().ravel(), model.bias.detach().numpy()])
    precision = 1 / np.concatenate([variance["weight"].numpy().ravel(), variance["bias"].numpy()])

    def log_p(theta: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        logits = theta[:12].reshape(4, 3) @ inputs + theta[12:]
        return logits - np.logaddexp.reduce(logits)

    for index, inputs in enumerate(x.numpy()):
        for label in range(4):

            def objective(theta: np.ndarray, inputs: np.ndarray = inputs, label: int = label) -> float:
                return float(-log_p(theta, inputs)[label] + 0.5 * (precision * (theta - base) ** 2).sum())

            best = minimize(objective, base, method="BFGS", options={"gtol": 1e-7})
            assert float(hindsight[index, label]) == pytest.approx(np.exp(log_p(best.x, inputs)[label]), rel=1e-6)


def test_relaxed_and_restarted_steps_share_their_fixed_point() -> None:
    ifc = fitted(CASES["linear"])
    inputs = as_type(CASES["linear"].sample(2, seed=5), torch.float64)
    options = {"scale": 0.02, "damping": Relative(1.0)}
    restarted = Acnml.from_ekfac(ifc, steps=60, **options).hindsight_proba(inputs)
    relaxed = Acnml.from_ekfac(ifc, steps=150, relaxation=0.3, **options).hindsight_proba(inputs)
    assert_close(relaxed, restarted, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("name", ["conv2d_groups", "lenet", "attention_padding"])
def test_gain_of_a_narrow_posterior_is_the_influence(name: str) -> None:
    """``p_new / p - 1 -> scale/n IF`` as the scale goes to zero."""
    case = CASES[name]
    ifc = fitted(case)
    inputs = as_type(case.sample(3, seed=5), torch.float64)
    scale = 1e-6
    plain, narrow = (Acnml.from_ekfac(ifc, damping=0.1, scale=s, steps=1).hindsight_proba(inputs) for s in (0.0, scale))
    gain = (narrow / plain - 1) * ifc.factors.count / scale
    assert_close(gain, ifc.influence(inputs, damping=0.1), rtol=1e-3, atol=1e-6)


def test_without_a_posterior_it_is_the_model() -> None:
    ifc = fitted(CASES["lenet"])
    inputs = as_type(CASES["lenet"].sample(3), torch.float64)
    expected = torch.softmax(ifc.model(inputs), 1).detach()
    assert_close(Acnml.from_ekfac(ifc, scale=0.0).predict_proba(inputs), expected, rtol=1e-12, atol=0)


def test_hindsight_is_normalised_and_spreads_over_labels() -> None:
    ifc = fitted(CASES["lenet"])
    inputs = as_type(CASES["lenet"].sample(3), torch.float64)
    predictive = Acnml.from_ekfac(ifc, scale=1e-3, damping=Relative(0.1))
    hindsight = predictive.hindsight_proba(inputs)
    assert (hindsight > torch.softmax(ifc.model(inputs), 1)).all()  # fitting a label makes it more probable
    assert_close(predictive.predict_proba(inputs), hindsight / hindsight.sum(1, keepdim=True))


@pytest.mark.parametrize("pairs", [1, 3])
def test_the_number_of_pairs_fitted_together_makes_no_difference(pairs: int) -> None:
    ifc = fitted(CASES["lenet"])
    inputs = as_type(CASES["lenet"].sample(4), torch.float64)
    predictive = Acnml.from_ekfac(ifc)
    weights = sum(8 * value.numel() for value in ifc.model.parameters())
    limited = replace(predictive, memory=6 * pairs * weights)
    assert limited._pairs_at_once() == pairs < predictive._pairs_at_once()
    assert_close(limited.predict_proba(inputs), predictive.predict_proba(inputs), rtol=1e-12, atol=0)


def test_chosen_labels_are_columns() -> None:
    ifc = fitted(CASES["lenet"])
    inputs = as_type(CASES["lenet"].sample(3), torch.float64)
    predictive = Acnml.from_ekfac(ifc)
    expected = predictive.hindsight_proba(inputs)[:, [2, 0]]
    assert_close(predictive.hindsight_proba(inputs, labels=[2, 0]), expected, rtol=1e-12, atol=0)


def test_only_fitted_layers_move() -> None:
    case = CASES["lenet"]
    ifc = fitted(case, layers="last")
    inputs = as_type(case.sample(2, seed=5), torch.float64)
    trunk, head = ifc.model[:-1], copy.deepcopy(ifc.model[-1])
    fit_of_head = IFComp(head, fisher="exact").fit([trunk(as_type(case.sample(7, seed=1), torch.float64)).detach()])
    probability = Acnml.from_ekfac(ifc, damping=Relative(0.1)).predict_proba(inputs)
    expected = Acnml.from_ekfac(fit_of_head, damping=Relative(0.1)).predict_proba(trunk(inputs).detach())
    assert_close(probability, expected, rtol=1e-9, atol=0)


def test_invalid_settings_are_refused() -> None:
    case = CASES["linear"]
    ifc, tempered = fitted(case), fitted(case, beta=0.5)
    with pytest.raises(NotFittedError, match="fit"):
        Acnml.from_ekfac(IFComp(ifc.model))
    with pytest.raises(SettingError, match="beta"):
        Acnml.from_ekfac(tempered)
    with pytest.raises(SettingError, match="relaxation"):
        Acnml.from_ekfac(ifc, relaxation=1.5)
    with pytest.raises(SettingError, match="steps"):
        Acnml.from_ekfac(ifc, steps=0)
    with pytest.raises(SettingError, match="scale"):
        Acnml.from_ekfac(ifc, scale=-1.0)
    with pytest.raises(ModelError, match="swa_model"):
        Acnml.from_swag(ifc.model, trained_path(ifc.model, 0.1))


def test_divergence_is_reported() -> None:
    model = CASES["linear"].make()
    covariance = DiagonalCovariance({name: torch.full_like(p.detach(), 1e30) for name, p in model.named_parameters()})
    with pytest.raises(NonFiniteError, match=r"example 0 .*diverges"):
        Acnml(model, covariance).predict_proba(CASES["linear"].sample(2))
