"""Metrics against values computed by hand."""

import math

import numpy as np
import pytest
import torch

from ifcomp.errors import DataError, LabelError, SettingError
from ifcomp.tasks.metrics import accuracy, auroc, expected_calibration_error, negative_log_likelihood

# Confidence 0.6, 0.7, 0.8, 0.9 in another order; right, wrong, right, right.
PROBABILITIES = np.array([[0.1, 0.9], [0.6, 0.4], [0.3, 0.7], [0.8, 0.2]])
LABELS = np.array([1, 0, 0, 0])


@pytest.mark.parametrize(
    ("bins", "expected"),
    [
        (1, abs(0.75 - 0.75)),
        (2, (abs(0.65 - 0.5) + abs(0.85 - 1.0)) / 2),
        (3, (2 * abs(0.65 - 0.5) + 0.2 + 0.1) / 4),  # the first bin has two examples
        (4, (0.4 + 0.7 + 0.2 + 0.1) / 4),
        (20, (0.4 + 0.7 + 0.2 + 0.1) / 4),  # as many bins as examples
    ],
)
def test_calibration_error_by_hand(bins: int, expected: float) -> None:
    assert expected_calibration_error(PROBABILITIES, LABELS, bins) == pytest.approx(expected, abs=1e-12)


def test_calibration_error_has_twenty_bins_of_equal_size() -> None:
    """100 examples in 20 bins of 5: four of five are right at confidence 0.8, all at 1, so the error is 0."""
    probabilities = np.array([[0.8, 0.2]] * 50 + [[1.0, 0.0]] * 50)
    labels = np.array([0, 0, 0, 0, 1] * 10 + [0] * 50)
    assert expected_calibration_error(probabilities, labels) == pytest.approx(0, abs=1e-12)
    labels[labels == 1] = 0
    assert expected_calibration_error(probabilities, labels) == pytest.approx(0.1)  # 0.2 in half of the bins


def test_calibration_error_does_not_depend_on_the_order() -> None:
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.ones(4), 203)
    labels = generator.integers(0, 4, 203)
    order = generator.permutation(203)
    expected = expected_calibration_error(probabilities, labels)
    assert expected_calibration_error(probabilities[order], labels[order]) == pytest.approx(expected)


def test_likelihood_and_accuracy_by_hand() -> None:
    expected = -(math.log(0.9) + math.log(0.6) + math.log(0.3) + math.log(0.8)) / 4
    assert negative_log_likelihood(PROBABILITIES, LABELS) == pytest.approx(expected)
    assert accuracy(PROBABILITIES, LABELS) == 0.75


def test_likelihood_of_the_impossible_is_infinite() -> None:
    assert negative_log_likelihood([[1.0, 0.0]], [1]) == math.inf
    assert negative_log_likelihood([[1.0, 0.0]], [0]) == 0


def test_tensors_are_taken_too() -> None:
    probabilities, labels = torch.tensor(PROBABILITIES), torch.tensor(LABELS)
    assert expected_calibration_error(probabilities, labels, 2) == pytest.approx(0.15)
    assert auroc(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([False, False, True])) == 1


def test_auroc_by_hand() -> None:
    """Of the four pairs three are in order and one is a tie."""
    assert auroc([1.0, 2.0, 2.0, 3.0], [False, False, True, True]) == pytest.approx(3.5 / 4)


@pytest.mark.parametrize(
    ("probabilities", "labels", "error"),
    [
        ([0.5, 0.5], [0], DataError),
        (np.zeros((0, 2)), np.zeros(0, dtype=int), DataError),
        ([[2.0, -1.0]], [0], DataError),
        ([[3.0, 4.0]], [0], DataError),
        ([[math.nan, 1.0]], [0], DataError),
        ([[0.5, 0.5]], [0, 1], LabelError),
        ([[0.5, 0.5]], [0.0], LabelError),
        ([[0.5, 0.5]], [2], LabelError),
        ([[0.5, 0.5]], [-1], LabelError),
    ],
)
def test_unusable_input_is_refused(probabilities: object, labels: object, error: type[Exception]) -> None:
    for metric in (expected_calibration_error, negative_log_likelihood, accuracy):
        with pytest.raises(error):
            metric(probabilities, labels)


def test_unusable_settings_and_scores_are_refused() -> None:
    with pytest.raises(SettingError, match="bins"):
        expected_calibration_error(PROBABILITIES, LABELS, bins=0)
    with pytest.raises(DataError, match="one kind"):
        auroc([1.0, 2.0], [True, True])
    with pytest.raises(DataError, match="one shape"):
        auroc([1.0, 2.0], [True])
