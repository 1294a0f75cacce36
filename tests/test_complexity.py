"""Codelengths and the pNML distribution against their formulas in numpy."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cases import CASES
from comparison import dense, fitted
from ifcomp import complexity

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """Random probabilities and influences.

    Attributes:
        p: [B, K].
        influence: [B, K].
        count: n.
    """

    p: Tensor
    influence: Tensor
    count: int = 50

    @property
    def arrays(self) -> tuple[Array, Array]:
        """Probabilities and influences in numpy."""
        return self.p.numpy(), self.influence.numpy()


def scores(size: int = 40, classes: int = 5) -> Scores:
    """Influences from far below to far above n; confident and nearly uniform distributions."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(size, classes)) * rng.choice([0.1, 1.0, 10.0], size=(size, 1))
    p = np.exp(logits - logits.max(1, keepdims=True))
    influence = np.exp(rng.normal(scale=5, size=(size, classes)))
    return Scores(torch.from_numpy(p / p.sum(1, keepdims=True)), torch.from_numpy(influence))


@pytest.mark.parametrize("alpha", [0.0, 0.15, 1.0, 30.0, 1e30])
def test_pnml_distribution(alpha: float) -> None:
    given = scores()
    p, influence = given.arrays
    hindsight = p * (1 + alpha / given.count * influence)
    expected = hindsight / hindsight.sum(1, keepdims=True)
    result = complexity.pnml_distribution(given.p, given.influence, given.count, alpha).numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-12)
    np.testing.assert_allclose(result.sum(1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(
        complexity.hindsight_probabilities(given.p, given.influence, given.count, alpha).numpy(), hindsight, rtol=1e-12
    )
    if alpha == 0:
        np.testing.assert_allclose(result, p, rtol=1e-15)
    if alpha == 1e30:
        weighted = p * influence
        np.testing.assert_allclose(result, weighted / weighted.sum(1, keepdims=True), rtol=1e-12)
        assert (result.argmax(1) != p.argmax(1)).any(), "keep_argmax matters here"


@pytest.mark.parametrize("alpha", [0.0, 0.15, 1.0, 30.0, 1e30])
def test_pnml_distribution_that_keeps_the_argmax(alpha: float) -> None:
    given = scores()
    p, influence = given.arrays
    added = alpha * (p * influence).sum(1, keepdims=True) / given.count
    result = complexity.pnml_distribution(given.p, given.influence, given.count, alpha, keep_argmax=True).numpy()
    np.testing.assert_allclose(result, (p + added / 5) / (1 + added), rtol=1e-12)
    np.testing.assert_allclose(result.sum(1), 1.0, rtol=1e-12)
    if alpha == 0:
        np.testing.assert_allclose(result, p, rtol=1e-15)
    if alpha <= 30.0:  # with larger alpha p is lost to rounding
        np.testing.assert_array_equal(result.argmax(1), p.argmax(1))
    top = p.argmax(1)
    assert (result[np.arange(len(result)), top] == result.max(1)).all()


def test_huge_influences_stay_a_distribution() -> None:
    """Directions with little curvature and little damping have such influences."""
    p, influence = (torch.tensor([row], dtype=torch.float64) for row in ([0.9, 0.1], [1e250, 1e270]))
    for keep in (False, True):
        result = complexity.pnml_distribution(p, influence, 10, 1e30, keep_argmax=keep)
        assert result.isfinite().all()
        assert float(result.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("alpha", [0.0, 0.15, 1.0, 1e30])
def test_codelengths(alpha: float) -> None:
    given = scores()
    p, influence = given.arrays
    labels = np.arange(len(p)) % 5
    rows = np.arange(len(p))
    n = given.count
    expected_influence = (p * influence).sum(1)
    np.testing.assert_allclose(
        complexity.expected_influence(given.p, given.influence).numpy(), expected_influence, rtol=1e-12
    )
    error = -np.log(p[rows, labels])
    computed_error = complexity.codelength(given.p.log(), torch.from_numpy(labels))
    np.testing.assert_allclose(computed_error.numpy(), error, rtol=1e-12)

    expected = torch.from_numpy(expected_influence)
    parametric = complexity.parametric_complexity(expected, n, alpha)
    np.testing.assert_allclose(parametric.numpy(), np.log(1 + alpha / n * expected_influence), rtol=1e-9, atol=1e-15)
    linear = complexity.parametric_complexity(expected, n, alpha, linearized=True)
    np.testing.assert_allclose(linear.numpy(), alpha / n * expected_influence, rtol=1e-12)
    assert (linear >= parametric).all()
    if alpha:
        np.testing.assert_array_equal(linear.argsort(), expected_influence.argsort())
        np.testing.assert_array_equal(parametric.argsort(), expected_influence.argsort())

    label_influence = influence[rows, labels]
    regret = complexity.regret(torch.from_numpy(label_influence), n, alpha)
    np.testing.assert_allclose(regret.numpy(), np.log(1 + alpha / n * label_influence), rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(
        complexity.regret(torch.from_numpy(label_influence), n, alpha, linearized=True).numpy(),
        alpha / n * label_influence,
        rtol=1e-12,
    )

    seen = complexity.stochastic_complexity(computed_error, parametric).numpy()
    np.testing.assert_allclose(seen, error + np.log(1 + alpha / n * expected_influence), rtol=1e-9)
    unseen = complexity.stochastic_complexity(computed_error, parametric, regret).numpy()
    hindsight = p * (1 + alpha / n * influence)
    log_expected = -np.log(hindsight[rows, labels]) + np.log(hindsight.sum(1))
    np.testing.assert_allclose(unseen, log_expected, rtol=1e-9, atol=1e-9)
    if alpha == 0:
        np.testing.assert_allclose(seen, error, rtol=1e-12)
        np.testing.assert_allclose(unseen, error, rtol=1e-12)


def test_small_complexities_do_not_cancel() -> None:
    tiny = torch.tensor([1e-18, 1e-12], dtype=torch.float64)
    for result in (complexity.parametric_complexity(tiny, 100), complexity.regret(tiny, 100)):
        np.testing.assert_allclose(result.numpy(), [1e-20, 1e-14], rtol=1e-12)


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("linearized", [True, False])
def test_predictor_gives_the_formulas(seen: bool, linearized: bool) -> None:
    """Codelengths of the predictor from its influence."""
    case, alpha, labels = CASES["lenet"], 0.4, torch.arange(5) % 4
    ifc, examples = fitted(case, beta=0.3), dense(case, size=5, seed=0)
    p, influence = examples.probability(0.3).numpy(), ifc.influence(examples.inputs).numpy()
    count = ifc.factors.count
    ratio, mean_ratio = alpha / count * influence, alpha / count * (p * influence).sum(1)
    parametric = mean_ratio if linearized else np.log1p(mean_ratio)
    np.testing.assert_allclose(
        ifc.parametric_complexity(examples.inputs, alpha=alpha, linearized=linearized), parametric, rtol=1e-9
    )
    given = (np.arange(5), labels.numpy())
    regret = ratio[given] if linearized else np.log1p(ratio[given])
    error = -np.log(p[given])
    stochastic = error + parametric - (0 if seen else regret)
    result = ifc.stochastic_complexity(examples.inputs, labels, alpha=alpha, linearized=linearized, seen=seen)
    np.testing.assert_allclose(result, stochastic, rtol=1e-9)
    table = ifc.score([(examples.inputs, labels)], alpha=alpha, linearized=linearized, seen=seen).frame
    columns = {
        "parametric_complexity": parametric,
        "stochastic_complexity": stochastic,
        "regret": regret,
        "error": error,
        "influence": influence[given],
        "confidence": p.max(1),
        "prediction": p.argmax(1),
        "label_probability": p[given],
    }
    for name, column in columns.items():
        np.testing.assert_allclose(table[name], column, rtol=1e-9, err_msg=name)
    hindsight = p * (1 + ratio)
    result = ifc.predict_proba(examples.inputs, alpha=alpha, keep_argmax=False).numpy()
    np.testing.assert_allclose(result, hindsight / hindsight.sum(1, keepdims=True), rtol=1e-9)
