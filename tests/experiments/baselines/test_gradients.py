"""GraNd, GradNorm and TracIn against per-example gradients from torch.func in float64."""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.testing import assert_close

from cases import LAYER_CASES, MODEL_CASES, Case
from comparison import as_type, dense
from experiments.baselines.gradients import gradnorm, grand, identity_curvature, tracin
from ifcomp.errors import DataError, EmptyDataError, LabelError, SettingError
from oracles import Inputs

CASES = {case.name: case for case in (*LAYER_CASES, *MODEL_CASES)}
NAMES = ["lenet", "conv2d_groups", "conv_twice", "embedding_padding", "layernorm", "groupnorm", "class_token", "tied"]
COUNT = 6


def prepare(name: str) -> tuple[Case, nn.Module, Inputs, Tensor]:
    case = CASES[name]
    model = case.make().double()
    return case, model, as_type(case.sample(COUNT), torch.float64), torch.arange(COUNT) % case.num_classes


def explicit_norms(model: nn.Module, x: Tensor, labels: Tensor) -> np.ndarray:
    """``||d(-log p_y)/d theta||^2`` of every example."""
    parameters = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}

    def loss(weights: dict[str, Tensor], example: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, weights, (example[None],)), label[None])

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        gradients = vmap(grad(loss), (None, 0, 0))(parameters, x, labels)
    return sum(gradient.flatten(1).square().sum(1) for gradient in gradients.values()).numpy()


def all_norms(case: Case, model: nn.Module, x: Tensor) -> np.ndarray:
    labels = [torch.full((COUNT,), label) for label in range(case.num_classes)]
    return np.stack([explicit_norms(model, x, label) for label in labels], 1)


@pytest.mark.parametrize("name", NAMES)
def test_grand_is_the_norm_of_the_gradient(name: str) -> None:
    _, model, x, y = prepare(name)
    data = [(x[:4], y[:4]), (x[4:], y[4:])]
    assert_allclose(grand(model, data), np.sqrt(explicit_norms(model, x, y)), rtol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_gradnorm_is_the_mean_over_all_labels(name: str) -> None:
    case, model, x, _ = prepare(name)
    assert_allclose(gradnorm(model, [x[:4], x[4:]]), all_norms(case, model, x).mean(1), rtol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_influence_with_identity_curvature_is_the_squared_norm(
    case: Case, dtype: torch.dtype, tolerance: float
) -> None:
    """Every layer and label, against Jacobians of one example at a time in float64."""
    exact = dense(case, size=5, seed=0)
    errors = exact.probability(1.0).unsqueeze(1) - torch.eye(case.num_classes, dtype=torch.float64)
    gradients = [torch.einsum("byk,bk...->by...", errors, jacobian) for jacobian in exact.jacobians.values()]
    expected = sum(gradient.flatten(2).square().sum(2) for gradient in gradients)
    inputs = as_type(case.sample(5), dtype)
    norms = identity_curvature(case.make().to(dtype), first_example(inputs)).influence(inputs)
    assert norms.dtype == torch.float64
    assert_close(norms, expected, rtol=tolerance, atol=0)


def first_example(inputs: Inputs) -> Inputs:
    return {key: value[:1] for key, value in inputs.items()} if isinstance(inputs, dict) else inputs[:1]


def test_inputs_by_keyword() -> None:
    case, model, inputs, y = prepare("bert")
    data = [{**inputs, "labels": y}]
    assert_allclose(grand(model, data) ** 2, bert_norms(model, inputs, y), rtol=1e-9)
    assert_allclose(
        gradnorm(model, [inputs]),
        np.mean([bert_norms(model, inputs, torch.full((COUNT,), label)) for label in range(case.num_classes)], 0),
        rtol=1e-9,
    )


def bert_norms(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> list[float]:
    norms = []
    for i in range(COUNT):
        logits = model(**{key: value[i : i + 1] for key, value in inputs.items()}).logits
        loss = functional.cross_entropy(logits, labels[i : i + 1])
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        norms.append(sum(float(gradient.square().sum()) for gradient in gradients if gradient is not None))
    return norms


def test_grand_is_averaged_over_networks() -> None:
    _, model, x, y = prepare("lenet")
    other = changed(model, 0.5)
    expected = (np.sqrt(explicit_norms(model, x, y)) + np.sqrt(explicit_norms(other, x, y))) / 2
    assert_allclose(grand([model, other], [(x, y)]), expected, rtol=1e-9)


def test_tracin_sums_checkpoints_with_their_learning_rates() -> None:
    _, model, x, y = prepare("lenet")
    other = changed(model, 0.5)
    expected = 0.1 * explicit_norms(model, x, y) + 0.02 * explicit_norms(other, x, y)
    assert_allclose(tracin([(model, 0.1), (other, 0.02)], [(x, y)]), expected, rtol=1e-9)


def test_tracin_with_states_loaded_one_after_the_other() -> None:
    _, model, x, y = prepare("lenet")
    states = [(copy.deepcopy(changed(model, factor).state_dict()), factor) for factor in (1.0, 0.7)]

    def checkpoints() -> Iterator[tuple[nn.Module, float]]:
        for state, rate in states:
            model.load_state_dict(state)
            yield model, rate

    expected = sum(rate * explicit_norms(loaded(model, state), x, y) for state, rate in states)
    assert_allclose(tracin(checkpoints(), [(x, y)]), expected, rtol=1e-9)


def changed(model: nn.Module, factor: float) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(factor)
    return other


def loaded(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    return other


def test_gradnorm_ignores_labels() -> None:
    _, model, x, y = prepare("lenet")
    assert_allclose(gradnorm(model, [(x, -1 - y)]), gradnorm(model, [x]))


def test_results_do_not_depend_on_batches_and_leave_the_model_alone() -> None:
    _, model, x, y = prepare("lenet")
    model.train()
    assert_allclose(grand(model, [(x[i : i + 1], y[i : i + 1]) for i in range(COUNT)]), grand(model, [(x, y)]))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bad_data_is_refused() -> None:
    _, model, x, y = prepare("lenet")
    with pytest.raises(EmptyDataError, match="no example"):
        gradnorm(model, [])
    with pytest.raises(LabelError, match="labels are needed"):
        grand(model, [x])
    with pytest.raises(SettingError, match="checkpoint"):
        tracin([], [(x, y)])
    with pytest.raises(SettingError, match="learning rate"):
        tracin([(model, -0.1)], [(x, y)])
    with pytest.raises(DataError, match="iterator"):
        tracin([(model, 0.1)], iter([(x, y)]))
