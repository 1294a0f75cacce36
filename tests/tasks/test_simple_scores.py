"""Simple scores against hand calculation, brute force, scipy and scikit-learn."""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.special import logsumexp
from sklearn.metrics import log_loss

from ifcomp.errors import DataError, LabelError
from ifcomp.tasks.simple_scores import TEMPERATURES, energy, fit_temperature, loss, margin, max_softmax

PROBABILITIES = np.array([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5], [0.9, 0.06, 0.04]])
LABELS = np.array([0, 1, 2])


def random_logits(seed: int = 0, count: int = 50, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return 3 * generator.normal(size=(count, classes)), generator.integers(classes, size=count)


def brute_force(logits: np.ndarray) -> list[list[float]]:
    """Probabilities, one example after the other in plain Python."""
    rows = []
    for row in logits.tolist():
        weights = [math.exp(value - max(row)) for value in row]
        rows.append([weight / math.fsum(weights) for weight in weights])
    return rows


# Scores -------------------------------------------------------------------------------------------------------------


def test_scores_by_hand() -> None:
    logits = np.log(PROBABILITIES)
    assert_allclose(loss(logits, LABELS), [-math.log(0.7), -math.log(0.25), -math.log(0.04)])
    assert_allclose(margin(logits, LABELS), [0.2 - 0.7, 0.5 - 0.25, 0.9 - 0.04])
    assert_allclose(max_softmax(logits), [0.3, 0.5, 0.1])
    assert_allclose(energy(logits), [0, 0, 0], atol=1e-15)


def test_scores_are_those_of_brute_force() -> None:
    logits, labels = random_logits()
    rows = list(zip(brute_force(logits), labels.tolist(), strict=True))
    assert_allclose(loss(logits, labels), [-math.log(row[label]) for row, label in rows], rtol=1e-12)
    others = [max(value for k, value in enumerate(row) if k != label) - row[label] for row, label in rows]
    assert_allclose(margin(logits, labels), others, rtol=1e-12)
    assert_allclose(max_softmax(logits), [1 - max(row) for row, _ in rows], rtol=1e-9)
    assert_allclose(energy(logits), [-math.log(math.fsum(map(math.exp, row))) for row in logits.tolist()], rtol=1e-12)


def test_mean_loss_is_the_log_loss_of_scikit_learn() -> None:
    logits, labels = random_logits()
    assert loss(logits, labels).mean() == pytest.approx(log_loss(labels, brute_force(logits), labels=range(5)))


def test_energy_is_the_negative_logsumexp_of_scipy() -> None:
    logits, _ = random_logits()
    assert_allclose(energy(logits), -logsumexp(logits, axis=1), rtol=1e-12)


def test_larger_scores_are_more_suspicious() -> None:
    right, wrong = np.array([[9.0, 0.0, 0.0]]), np.array([[0.0, 9.0, 0.0]])
    assert loss(wrong, [0]) > loss(right, [0])
    assert margin(wrong, [0]) > 0 > margin(right, [0])
    assert max_softmax([[1.0, 0.0, 0.0]]) > max_softmax(right)
    assert energy([[1.0, 0.0, 0.0]]) > energy(right)


def test_confident_predictions_are_still_ordered() -> None:
    """``1 - p`` of 1e-9, 1e-12 and 1e-30: the last two are far below float32, the last below float64."""
    logits = np.log([[1e-9], [1e-12], [1e-30]]) * [[1.0, 0.0]]
    assert_allclose(max_softmax(logits), [1e-9, 1e-12, 1e-30], rtol=1e-6)
    assert_allclose(loss(logits[:2], [1, 1]), [1e-9, 1e-12], rtol=1e-3)


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[1e4, -1e4, 0.0]])
    assert_allclose(loss(logits, [1]), 2e4)
    assert_allclose(margin(logits, [1]), 1.0)
    assert_allclose(energy(logits), -1e4)
    assert max_softmax(logits) == 0


def test_tensors_and_float32_are_accepted() -> None:
    logits, labels = random_logits()
    tensor = torch.tensor(logits, dtype=torch.float32)
    for scores, expected in (
        (loss(tensor, torch.tensor(labels)), loss(logits, labels)),
        (margin(tensor, torch.tensor(labels)), margin(logits, labels)),
        (max_softmax(tensor), max_softmax(logits)),
        (energy(tensor), energy(logits)),
    ):
        assert scores.dtype == np.float64
        assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


def test_inputs_are_not_changed() -> None:
    logits, labels = random_logits()
    kept = logits.copy(), labels.copy()
    margin(logits, labels)
    max_softmax(logits)
    fit_temperature(logits, labels)
    np.testing.assert_array_equal(logits, kept[0])
    np.testing.assert_array_equal(labels, kept[1])


# Temperature --------------------------------------------------------------------------------------------------------


def sampled(count: int, classes: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and labels that are drawn from them at a temperature."""
    generator = np.random.default_rng(0)
    logits = 4 * generator.normal(size=(count, classes))
    return logits, np.array([generator.choice(classes, p=row) for row in brute_force(logits / temperature)])


def nll(logits: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    return log_loss(labels, brute_force(logits / temperature), labels=range(logits.shape[1]))


@pytest.mark.parametrize(("difference", "right"), [(3.0, 9), (0.2, 6), (50.0, 8)])
def test_temperature_of_two_labels_has_a_closed_form(difference: float, right: int) -> None:
    """At the best temperature the probability of the larger logit is the share of examples where it is right."""
    logits = np.tile([difference, 0.0], (10, 1))
    labels = (np.arange(10) >= right).astype(int)
    share = right / 10
    assert fit_temperature(logits, labels) == pytest.approx(difference / math.log(share / (1 - share)), rel=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_no_temperature_of_a_fine_grid_is_better(temperature: float) -> None:
    logits, labels = sampled(400, 5, temperature)
    fitted = fit_temperature(logits, labels)
    grid = np.geomspace(temperature / 2, 2 * temperature, 601)  # neighbours differ by 0.23 %
    smallest, best = min((nll(logits, labels, value), value) for value in grid)
    assert nll(logits, labels, fitted) <= smallest + 1e-14
    assert fitted == pytest.approx(best, rel=2.5e-3)


def test_the_temperature_that_labels_were_drawn_at_is_recovered() -> None:
    logits, labels = sampled(40_000, 4, 1.7)
    assert fit_temperature(logits, labels) == pytest.approx(1.7, rel=0.03)


def test_temperature_scales_with_the_logits_and_ignores_constants() -> None:
    logits, labels = sampled(300, 3, 1.5)
    fitted = fit_temperature(logits, labels)
    assert fit_temperature(20 * logits, labels) == pytest.approx(20 * fitted, rel=1e-9)
    shifts = 1e3 * np.random.default_rng(1).normal(size=(300, 1))
    assert fit_temperature(logits + shifts, labels) == pytest.approx(fitted, rel=1e-9)


def test_temperatures_outside_of_the_range_give_the_nearer_bound() -> None:
    logits, labels = sampled(300, 3, 1.5)
    assert fit_temperature(logits, logits.argmax(1)) == TEMPERATURES[0]  # every label has the largest logit
    assert fit_temperature(logits, logits.argmin(1)) == TEMPERATURES[1]  # uniform probabilities are best
    assert fit_temperature(1e4 * logits, labels) == TEMPERATURES[1]


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits", [[], [1.0, 2.0], [[1.0], [2.0]], np.zeros((0, 3))], ids=str)
def test_logits_of_another_shape_are_refused(logits: object) -> None:
    with pytest.raises(DataError, match=r"\[N, K\]"):
        energy(logits)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(DataError, match="finite"):
        max_softmax([[0.0, value]])


@pytest.mark.parametrize("labels", [[0, 1], [0.0, 1.0, 2.0], [0, 1, 3], [-1, 0, 1]], ids=str)
@pytest.mark.parametrize("score", [loss, margin, fit_temperature])
def test_labels_that_do_not_belong_to_the_logits_are_refused(score: object, labels: list[float]) -> None:
    with pytest.raises(LabelError, match="labels must be"):
        score(np.log(PROBABILITIES), labels)
