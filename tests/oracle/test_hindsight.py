"""Hindsight training against a convex solver, its limits and influence; storage and errors."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import optimize, special
from torch import Tensor, nn

from ifcomp import IFComp
from ifcomp.errors import EmptyDataError, LabelError, ModelError, NonFiniteError, SettingError, StorageError
from ifcomp.oracle import Hindsight, hindsight
from ifcomp.oracle import solve as solve_module

Array = NDArray[np.float64]

CLASSES, FEATURES, COUNT = 3, 4, 30


def seeded(build: Callable[[], nn.Module], scale: float = 1.0) -> nn.Module:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = build().double().eval()
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def logistic(scale: float = 3.0) -> nn.Module:
    return seeded(lambda: nn.Linear(FEATURES, CLASSES), scale)


def perceptron() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, CLASSES)
        ),
        2.0,
    )


def inputs(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TRAIN, X = inputs(COUNT), 1.5 * inputs(2, seed=1)


# Independent solutions ---------------------------------------------------------------------------------------------


def convex_solution(
    model: nn.Linear, train: Tensor, x: Tensor, label: int, beta: float, lam: float, alpha: float
) -> float:
    """``p*_label(x)`` of logistic regression: the objective in numpy, minimised by scipy."""
    start = np.hstack([model.weight.detach().numpy(), model.bias.detach().numpy()[:, None]])
    rows, row = (np.hstack([part.numpy(), np.ones((len(part), 1))]) for part in (train, x[None]))
    base = special.softmax(beta * rows @ start.T, axis=1)

    def value(flat: Array) -> float:
        weights = flat.reshape(start.shape)
        new = special.log_softmax(beta * rows @ weights.T, axis=1)
        loss = -special.log_softmax(beta * row @ weights.T, axis=1)[0, label]
        return float(alpha * loss + special.xlogy(base, base).sum() - (base * new).sum() + lam / 2 * _square(weights))

    def slope(flat: Array) -> Array:
        weights = flat.reshape(start.shape)
        new = special.softmax(beta * rows @ weights.T, axis=1)
        label_residual = special.softmax(beta * row @ weights.T, axis=1) - np.eye(len(start))[[label]]
        return (beta * ((new - base).T @ rows + alpha * label_residual.T @ row) + lam * (weights - start)).ravel()

    def _square(weights: Array) -> float:
        return float(((weights - start) ** 2).sum())

    near = optimize.minimize(value, start.ravel(), jac=slope, method="BFGS", options={"gtol": 1e-9})
    optimum = optimize.root(slope, near.x)  # BFGS may stop at a gradient of 1e-7, because the value is rounded
    assert np.abs(slope(optimum.x)).max() < 1e-7
    return float(special.softmax(beta * row @ optimum.x.reshape(start.shape).T, axis=1)[0, label])


def dense_influence(model: nn.Module, train: Tensor, x: Tensor, beta: float, damping: float) -> Tensor:
    """``IF_beta`` [B, K] with the paper's ``g^T (G_beta + damping)^-1 g``, from Jacobians of the whole model."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def logits(values: dict[str, Tensor], example: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (example[None],))[0]

    def label_gradients(example: Tensor) -> tuple[Tensor, Tensor]:
        jacobian = torch.func.jacrev(logits)(parameters, example)
        flat = torch.cat([part.flatten(1) for part in jacobian.values()], 1)
        p = torch.softmax(beta * logits(parameters, example), 0)
        return p, beta * (p - torch.eye(len(p), dtype=p.dtype)) @ flat

    fisher = 0.0
    for example in train:
        p, gradients = label_gradients(example)
        fisher = fisher + gradients.T @ (p[:, None] * gradients) / len(train)
    inverse = torch.linalg.inv(fisher + damping * torch.eye(len(fisher), dtype=torch.float64))
    query_gradients = [label_gradients(example)[1] for example in x]
    return torch.stack([((gradients @ inverse) * gradients).sum(1) for gradients in query_gradients])


# Values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "lam", "alpha"), [(1.0, 0.7, 1.0), (0.5, 0.1, 1.0), (2.0, 3.0, 4.0)])
def test_logistic_regression_agrees_with_a_convex_solver(beta: float, lam: float, alpha: float) -> None:
    model = logistic()
    result = hindsight(model, [TRAIN], X, beta=beta, lam=lam, alpha=alpha, tolerance=1e-10)
    expected = [[convex_solution(model, TRAIN, x, y, beta, lam, alpha) for y in range(CLASSES)] for x in X]
    torch.testing.assert_close(result.probability, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(result.base, torch.softmax(beta * model(X), 1).detach())
    assert result.converged.all()
    assert result.gradient.max() < 1e-3
    assert result.regret.min() > 0.01


def test_omitted_training_examples_change_the_result_by_at_most_the_tolerance() -> None:
    model, train = logistic(scale=20.0), inputs(400, seed=2)
    result = hindsight(model, [train], X, lam=1.0, tolerance=0.01)
    expected = [[convex_solution(model, train, x, y, 1.0, 1.0, 1.0) for y in range(CLASSES)] for x in X]
    assert result.converged.all()
    assert result.regret.max() > 1
    expected = torch.tensor(expected, dtype=torch.float64).log()
    torch.testing.assert_close(result.log_probability, expected, rtol=0, atol=0.02)


def test_examples_that_become_uncertain_join_the_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 50 examples equal to x are certain at first; training without them would flip their predictions."""
    model = nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-4.0], [4.0]]))
    uncertain, certain = torch.full((5, 1), 0.01), torch.full((50, 1), 2.0)
    train, x = torch.cat([uncertain, certain]).double(), torch.tensor([[2.0]], dtype=torch.float64)
    sizes: list[int] = []
    run = solve_module._Descent.run
    monkeypatch.setattr(
        solve_module._Descent,
        "run",
        lambda self, *args: (
            sizes.append(sum(microbatch.size for microbatch, _ in self.working_set)) or run(self, *args)
        ),
    )
    result = hindsight(model, [train], x, lam=0.01, labels=[0], tolerance=1e-6)
    assert sizes[0] == 5
    assert sizes[-1] == 55
    expected = _scalar_solution(train[:, 0].numpy(), 2.0, 0.01)
    torch.testing.assert_close(float(result.log_probability[0, 0]), expected, rtol=1e-5, atol=0)


def _scalar_solution(train: Array, x: float, lam: float) -> float:
    """``log p*_0(x)`` of the logits ``-w t, w t`` with ``w = 4`` at the start: by symmetry a scalar problem."""
    base = special.expit(8 * train)

    def value(w: float) -> float:
        new = special.expit(2 * w * train)
        kl = special.rel_entr(base, new) + special.rel_entr(1 - base, special.expit(-2 * w * train))
        return float(-special.log_expit(-2 * w * x) + kl.sum() + lam * (w - 4) ** 2)

    return float(special.log_expit(-2 * optimize.minimize_scalar(value, (3, 4), options={"xtol": 1e-12}).x * x))


def first_order(model: nn.Module, beta: float, lam: float) -> Tensor:
    """Limit of regret over alpha/n as alpha goes to 0, which influence predicts, [B, K]."""
    slopes = []
    for alpha in (2e-3, 1e-3):
        result = hindsight(model, [TRAIN], X, beta=beta, lam=lam, alpha=alpha, tolerance=1e-13)
        assert result.converged.all()
        slopes.append(result.regret / alpha * COUNT)
    return 2 * slopes[1] - slopes[0]


@pytest.mark.parametrize("make", [logistic, perceptron])
@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_to_first_order_regret_is_influence_with_damping_lambda_over_n(
    make: Callable[[], nn.Module], beta: float
) -> None:
    influence = dense_influence(make(), TRAIN, X, beta, 0.3 / COUNT)
    torch.testing.assert_close(first_order(make(), beta, 0.3), influence, rtol=1e-3, atol=0)


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_lambda_is_the_damping_of_ifcomp_times_n_and_beta_squared(beta: float) -> None:
    """With zero weights all examples have the same distribution, so EKFAC is exact."""
    model = logistic(scale=0.0)
    ifc = IFComp(model, beta, fisher="exact", damping=0.3 / (COUNT * beta**2)).fit([TRAIN])
    torch.testing.assert_close(first_order(model, beta, 0.3), ifc.influence(X), rtol=1e-3, atol=0)


def test_a_large_lambda_keeps_the_model() -> None:
    result = hindsight(perceptron(), [TRAIN], X, lam=1e9)
    torch.testing.assert_close(result.probability, result.base, rtol=1e-6, atol=0)
    torch.testing.assert_close(result.pnml, result.base, rtol=1e-6, atol=0)
    torch.testing.assert_close(result.parametric_complexity, torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-6)


def test_a_small_lambda_memorises_every_label_if_there_is_little_training_data() -> None:
    result = hindsight(logistic(), [TRAIN[:2]], X, lam=1e-4, tolerance=1e-4)
    assert result.converged.all()
    assert result.probability.min() > 0.99
    torch.testing.assert_close(result.parametric_complexity.exp(), torch.full((2,), 3.0).double(), rtol=0, atol=0.03)


def test_derived_quantities() -> None:
    hindsight_p = torch.tensor([[0.5, 0.9], [1.0, 0.25]], dtype=torch.float64)
    base = torch.tensor([[0.25, 0.75], [0.9, 0.1]], dtype=torch.float64)
    zeros = torch.zeros(2, 2)
    result = Hindsight(hindsight_p.log(), base.log(), zeros, zeros, zeros, zeros)
    torch.testing.assert_close(result.probability, hindsight_p)
    torch.testing.assert_close(result.pnml, torch.tensor([[5 / 14, 9 / 14], [0.8, 0.2]], dtype=torch.float64))
    torch.testing.assert_close(result.parametric_complexity, torch.tensor([1.4, 1.25], dtype=torch.float64).log())
    torch.testing.assert_close(result.regret[:, 0], torch.tensor([2.0, 1 / 0.9], dtype=torch.float64).log())


# Training ----------------------------------------------------------------------------------------------------------


def test_pairs_do_not_depend_on_each_other_or_on_the_batches_of_the_data() -> None:
    model, options = logistic(), {"lam": 0.5, "tolerance": 1e-9}
    together = hindsight(model, [TRAIN], X, **options)
    for index in range(2):
        alone = hindsight(model, [TRAIN], X[index : index + 1], labels=[2], **options)
        assert alone.log_probability[0, 2] == together.log_probability[index, 2]
        assert alone.log_probability[0, :2].isnan().all()
        assert not alone.converged[0, :2].any()
        torch.testing.assert_close(alone.base, together.base[index : index + 1])
    split = hindsight(model, list(TRAIN.split(7)), X, **options)
    torch.testing.assert_close(split.log_probability, together.log_probability, rtol=1e-7, atol=0)


def test_all_forms_of_data_give_the_same_result() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = logistic()

        def forward(self, features: Tensor, scale: Tensor) -> Tensor:
            return self.inner(features) * scale

    one = torch.tensor(1.0, dtype=torch.float64)
    named = [{"features": part, "scale": one, "labels": torch.zeros(len(part))} for part in TRAIN.split(8)]
    plain = hindsight(logistic(), [(TRAIN, torch.zeros(COUNT))], (X,), lam=0.5, tolerance=1e-9)
    result = hindsight(Named(), named, {"features": X, "scale": one}, lam=0.5, tolerance=1e-9)
    torch.testing.assert_close(result.log_probability, plain.log_probability, rtol=1e-7, atol=0)


def test_the_preconditioner_changes_only_the_iterations() -> None:
    model, options = perceptron(), {"lam": 0.5, "tolerance": 1e-10, "labels": [0, 2]}
    ours = hindsight(model, [TRAIN], X[:1], **options)
    weights = torch.linspace(0.5, 1.5, sum(value.numel() for value in model.parameters()), dtype=torch.float64)
    other = hindsight(model, [TRAIN], X[:1], preconditioner=lambda vector: weights * vector, **options)
    assert other.converged[0, [0, 2]].all()
    assert (other.iterations != ours.iterations).any()
    torch.testing.assert_close(other.log_probability, ours.log_probability, rtol=1e-6, atol=0, equal_nan=True)


def test_a_kinked_network_converges_to_within_the_tolerance() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 20), nn.ReLU(), nn.Linear(20, CLASSES)), 3.0)
    rough = hindsight(model, [TRAIN], X[:1], lam=0.5)
    fine = hindsight(model, [TRAIN], X[:1], lam=0.5, tolerance=1e-6)
    assert rough.converged.all()
    assert fine.regret.max() > 1
    torch.testing.assert_close(rough.log_probability, fine.log_probability, rtol=0, atol=0.1)
    assert rough.iterations.sum() < fine.iterations.sum()


def test_frozen_parameters_do_not_move() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()).double().requires_grad_(False)
    head = logistic()
    whole = hindsight(nn.Sequential(model, head), [TRAIN], X, lam=0.5, tolerance=1e-10)
    part = hindsight(head, [model(TRAIN)], model(X), lam=0.5, tolerance=1e-10)
    torch.testing.assert_close(whole.log_probability, part.log_probability, rtol=1e-7, atol=0)
    with pytest.raises(ModelError, match="no trainable parameter"):
        hindsight(model, [TRAIN], X, lam=0.5)


def test_the_model_is_used_in_eval_mode_and_not_modified() -> None:
    model, options = perceptron(), {"lam": 0.5, "labels": [1]}
    expected = hindsight(model, [TRAIN], X, **options).log_probability[:, 1]
    model.train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        result = hindsight(model, [TRAIN], X, **options).log_probability[:, 1]
    with torch.inference_mode():
        again = hindsight(model, [TRAIN], X, **options).log_probability[:, 1]
    assert torch.equal(result, expected)
    assert torch.equal(again, expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, False, True, True, True]
    assert all(value.requires_grad and value.grad is None for value in model.parameters())


def test_pairs_that_do_not_converge_are_reported() -> None:
    result = hindsight(perceptron(), [TRAIN], X, lam=0.5, tolerance=1e-9, max_iterations=2)
    assert not result.converged.any()
    assert (result.iterations == 2).all()
    assert result.criterion.min() > 1e-9
    assert result.gradient.min() > 1e-6


# Results on disk ---------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Labels of the pairs that are trained rather than read from the file."""
    labels: list[int] = []
    run = solve_module._Descent.run

    def recorded_run(self: solve_module._Descent, *args: object) -> Array:
        if not labels or self.label != labels[-1]:
            labels.append(self.label)
        return run(self, *args)

    monkeypatch.setattr(solve_module._Descent, "run", recorded_run)
    return labels


def test_an_interrupted_run_resumes(tmp_path: Path, trained: list[int]) -> None:
    model, path = perceptron(), tmp_path / "pairs.jsonl"
    options = {"lam": 0.5, "tolerance": 1e-6}

    def interrupting(vector: Tensor) -> Tensor:
        if trained[-1:] == [2]:
            raise KeyboardInterrupt
        return vector

    with pytest.raises(KeyboardInterrupt):
        hindsight(model, [TRAIN], X[:1], preconditioner=interrupting, results=path, **options)
    assert len(path.read_text().splitlines()) == 2
    trained.clear()
    result = hindsight(model, [TRAIN], X[:1], preconditioner=lambda vector: vector, results=path, **options)
    assert trained == [2]
    expected = hindsight(model, [TRAIN], X[:1], preconditioner=lambda vector: vector, **options)
    for name in ("log_probability", "iterations", "converged", "criterion", "gradient"):
        assert torch.equal(getattr(result, name), getattr(expected, name))


def test_stored_pairs_are_reused_only_for_the_same_problem(tmp_path: Path, trained: list[int]) -> None:
    path = tmp_path / "pairs.jsonl"
    changed = perceptron()
    with torch.no_grad():
        changed[4].bias[0] += 1e-9
    frozen = perceptron()
    frozen[0].weight.requires_grad_(False)
    problems = [
        (perceptron(), TRAIN, X[:1], {}),
        (changed, TRAIN, X[:1], {}),
        (frozen, TRAIN, X[:1], {}),
        (perceptron(), TRAIN.flip(0), X[:1], {}),
        (perceptron(), TRAIN, X[1:], {}),
        *((perceptron(), TRAIN, X[:1], {name: 0.7}) for name in ("lam", "alpha", "beta", "tolerance")),
    ]
    for num_trained in (1, 0):
        for model, train, x, options in problems:
            trained.clear()
            hindsight(model, [train], x, labels=[1], results=path, **{"lam": 0.5, **options})
            assert len(trained) == num_trained
    assert len(path.read_text().splitlines()) == len(problems)


def test_pairs_that_did_not_converge_are_trained_again_with_more_iterations(tmp_path: Path, trained: list[int]) -> None:
    path, options = tmp_path / "pairs.jsonl", {"lam": 0.5, "labels": [1], "results": tmp_path / "pairs.jsonl"}
    for max_iterations, num_trained, converged in (
        (2, 1, False),
        (2, 0, False),
        (500, 1, True),
        (500, 0, True),
        (2, 0, True),
    ):
        trained.clear()
        result = hindsight(perceptron(), [TRAIN], X[:1], max_iterations=max_iterations, tolerance=1e-6, **options)
        assert (len(trained), bool(result.converged[0, 1])) == (num_trained, converged)
    assert len(path.read_text().splitlines()) == 1


def test_unusable_files_are_refused_before_training(tmp_path: Path, trained: list[int]) -> None:
    other = tmp_path / "other.jsonl"
    for text in ("not json\n", "[1]\n", '{"key": "a", "label": 1}\n'):
        other.write_text(text)
        with pytest.raises(StorageError, match="Line 1"):
            hindsight(logistic(), [TRAIN], X, lam=0.5, results=other)
        assert other.read_text() == text
    with pytest.raises(StorageError, match="Choose a folder"):
        hindsight(logistic(), [TRAIN], X, lam=0.5, results=tmp_path / "nowhere" / "pairs.jsonl")
    assert not trained


# Errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["beta", "lam", "alpha", "tolerance", "max_iterations"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1"])
def test_settings_must_be_positive(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=name):
        hindsight(logistic(), [TRAIN], X, **{"lam": 0.5, name: value})


@pytest.mark.parametrize("labels", [[3], [-1], [], [1, 1]])
def test_labels_must_be_classes(labels: list[int]) -> None:
    with pytest.raises(LabelError, match=r"0 \.\.\. 2"):
        hindsight(logistic(), [TRAIN], X, lam=0.5, labels=labels)


def test_data_must_be_non_empty_and_finite() -> None:
    with pytest.raises(EmptyDataError, match="training data"):
        hindsight(logistic(), [], X, lam=0.5)
    with pytest.raises(EmptyDataError, match="no example"):
        hindsight(logistic(), [TRAIN], X[:0], lam=0.5)
    with pytest.raises(NonFiniteError):
        hindsight(logistic(), [TRAIN], X * math.nan, lam=0.5)
    with pytest.raises(NonFiniteError):
        hindsight(logistic(), [TRAIN / 0], X, lam=0.5)


def test_a_preconditioner_must_be_a_symmetric_map() -> None:
    with pytest.raises(SettingError, match="same length"):
        hindsight(logistic(), [TRAIN], X, lam=0.5, preconditioner=lambda vector: vector[:-1])
    with pytest.raises(SettingError, match="symmetric"):
        hindsight(logistic(), [TRAIN], X, lam=0.5, preconditioner=lambda vector: vector.roll(1))
