"""Calibration metrics against hand calculation, brute force and scikit-learn."""

import io
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from sklearn.metrics import brier_score_loss, log_loss

from ifcomp.errors import DataError, LabelError, SettingError, StorageError
from ifcomp.tasks.calibration import (
    accuracy,
    brier_score,
    calibration_summary,
    expected_calibration_error,
    negative_log_likelihood,
    plot_reliability,
    pnml_grid,
    reliability_curve,
)

# Sorted by confidence (0.6, 0.7, 0.8, 0.9) the predictions are right, wrong, right, right.
PROBABILITIES = np.array([[0.1, 0.9], [0.6, 0.4], [0.3, 0.7], [0.8, 0.2]])
LABELS = np.array([1, 0, 0, 0])


def random_predictions(seed: int, count: int, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.ones(classes), count)
    labels = np.array([generator.choice(classes, p=row) for row in probabilities])
    return probabilities, labels


def brute_force_mass(probabilities: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """ECE by a loop over examples, for confidences without ties and a number of examples that ``bins`` divides."""
    ordered = sorted(
        (max(row), float(list(row).index(max(row)) == label)) for row, label in zip(probabilities, labels, strict=True)
    )
    size = len(ordered) // bins
    gaps = []
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        gaps.append(abs(sum(first for first, _ in part) / size - sum(second for _, second in part) / size))
    return sum(gaps) / len(gaps)


def brute_force_width(probabilities: np.ndarray, labels: np.ndarray, bins: int) -> float:
    total = 0.0
    for index in range(bins):
        part = [
            (max(row), float(list(row).index(max(row)) == label))
            for row, label in zip(probabilities, labels, strict=True)
            if index / bins < max(row) <= (index + 1) / bins
        ]
        if part:
            gap = abs(sum(first for first, _ in part) / len(part) - sum(second for _, second in part) / len(part))
            total += len(part) / len(labels) * gap
    return total


def brier_of_each_class(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Sum of scikit-learn's binary Brier scores over classes; version 1.6 has no multiclass score."""
    return sum(brier_score_loss(labels == label, column) for label, column in enumerate(probabilities.T))


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


@pytest.mark.parametrize("bins", [1, 2, 5, 20])
def test_calibration_error_equals_brute_force(bins: int) -> None:
    probabilities, labels = random_predictions(bins, 400)
    result = expected_calibration_error(probabilities, labels, bins)
    assert result == pytest.approx(brute_force_mass(probabilities, labels, bins), abs=1e-12)
    result = expected_calibration_error(probabilities, labels, bins, "width")
    assert result == pytest.approx(brute_force_width(probabilities, labels, bins), abs=1e-12)


def test_calibration_error_has_twenty_bins_of_equal_size() -> None:
    """Each of 20 bins has 5 examples; four of five are right at confidence 0.8 and all at 1, so the ECE is 0."""
    probabilities = np.array([[0.8, 0.2]] * 50 + [[1.0, 0.0]] * 50)
    labels = np.array([0, 0, 0, 0, 1] * 10 + [0] * 50)
    assert expected_calibration_error(probabilities, labels) == pytest.approx(0, abs=1e-12)
    labels[labels == 1] = 0
    assert expected_calibration_error(probabilities, labels) == pytest.approx(0.1)  # 0.2 in half of the bins
    assert reliability_curve(probabilities, labels).count.tolist() == [5] * 20


@given(st.integers(0, 1000), st.integers(1, 60), st.integers(1, 30), st.sampled_from(["mass", "width"]))
@settings(max_examples=50, deadline=None)
def test_curves_do_not_depend_on_the_order_even_with_ties(seed: int, count: int, bins: int, spacing: str) -> None:
    generator = np.random.default_rng(seed)
    top = generator.integers(5, 9, count) / 8
    probabilities, labels = np.stack([top, 1 - top], 1), generator.integers(0, 2, count)
    order = generator.permutation(count)
    first = reliability_curve(probabilities, labels, bins, spacing)
    second = reliability_curve(probabilities[order], labels[order], bins, spacing)
    np.testing.assert_allclose(first.confidence, second.confidence, rtol=1e-12)
    np.testing.assert_allclose(first.accuracy, second.accuracy, rtol=1e-12)
    assert (first.count == second.count).all()
    assert first.count.sum() == count
    assert (np.diff(first.confidence) >= -1e-12).all()


@given(st.lists(st.integers(3, 12), min_size=1, max_size=8, unique=True), st.integers(1, 4), st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_perfect_calibration_has_no_error(twelfths: list[int], repeats: int, bins: int) -> None:
    """Exactly the share c of the examples of confidence c is right, so the ECE is 0 for any bins."""
    rows, labels = [], []
    for share in twelfths:
        rows += [[share / 12, *[(1 - share / 12) / 4] * 4]] * 12 * repeats
        labels += ([0] * share + [1] * (12 - share)) * repeats
    for spacing in ("mass", "width"):
        assert expected_calibration_error(rows, labels, bins, spacing) == pytest.approx(0, abs=1e-12)


def test_bins_of_equal_width_contain_their_right_edge() -> None:
    """Confidence 0.5 belongs to the first of two bins, and 1 to the last."""
    curve = reliability_curve([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0]], [1, 0, 0], 2, "width")
    assert curve.count.tolist() == [1, 2]
    assert curve.confidence.tolist() == [0.5, 0.875]
    assert curve.accuracy.tolist() == [0.0, 1.0]
    assert curve.ece == pytest.approx((0.5 + 2 * 0.125) / 3)


def test_metrics_equal_those_of_scikit_learn() -> None:
    probabilities, labels = random_predictions(0, 300, 5)
    classes = list(range(5))
    assert negative_log_likelihood(probabilities, labels) == pytest.approx(
        log_loss(labels, probabilities, labels=classes)
    )
    assert brier_score(probabilities, labels) == pytest.approx(brier_of_each_class(probabilities, labels))


def test_likelihood_brier_and_accuracy_by_hand() -> None:
    expected = -(math.log(0.9) + math.log(0.6) + math.log(0.3) + math.log(0.8)) / 4
    assert negative_log_likelihood(PROBABILITIES, LABELS) == pytest.approx(expected)
    assert brier_score(PROBABILITIES, LABELS) == pytest.approx(2 * (0.1**2 + 0.4**2 + 0.7**2 + 0.2**2) / 4)
    assert accuracy(PROBABILITIES, LABELS) == 0.75


def test_metrics_of_a_certain_prediction() -> None:
    assert negative_log_likelihood([[1.0, 0.0]], [1]) == math.inf
    assert negative_log_likelihood([[1.0, 0.0]], [0]) == 0
    assert brier_score([[1.0, 0.0]], [1]) == 2
    assert brier_score([[1.0, 0.0]], [0]) == 0


def test_the_summary_has_all_metrics() -> None:
    probabilities, labels = random_predictions(1, 50)
    assert calibration_summary(probabilities, labels) == {
        "accuracy": accuracy(probabilities, labels),
        "confidence": float(probabilities.max(1).mean()),
        "nll": negative_log_likelihood(probabilities, labels),
        "brier": brier_score(probabilities, labels),
        "ece": expected_calibration_error(probabilities, labels, 20, "mass"),
        "ece_width": expected_calibration_error(probabilities, labels, 20, "width"),
    }


def test_tensors_are_accepted() -> None:
    probabilities, labels = torch.tensor(PROBABILITIES), torch.tensor(LABELS)
    assert expected_calibration_error(probabilities, labels, 2) == pytest.approx(0.15)


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
    for metric in (
        expected_calibration_error,
        negative_log_likelihood,
        brier_score,
        accuracy,
        reliability_curve,
        calibration_summary,
    ):
        with pytest.raises(error):
            metric(probabilities, labels)


def test_unusable_settings_are_refused() -> None:
    for bins in (0, -1, 2.0, True):
        with pytest.raises(SettingError, match="bins"):
            expected_calibration_error(PROBABILITIES, LABELS, bins=bins)
    with pytest.raises(SettingError, match="spacing"):
        reliability_curve(PROBABILITIES, LABELS, 2, "equal")


def test_curves_are_drawn_into_axes() -> None:
    axes = Figure().add_subplot()
    curve = reliability_curve(PROBABILITIES, LABELS, 2)
    plot_reliability({"softmax": curve}, axes)
    diagonal, line = axes.lines
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    np.testing.assert_allclose(line.get_xydata(), [[0.65, 0.5], [0.85, 1.0]])
    assert line.get_label() == "softmax: ECE 0.150"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("confidence", "accuracy")


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_curves_are_written_to_files(ending: str, start: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"curve.{ending}"
    plot_reliability({"softmax": reliability_curve(PROBABILITIES, LABELS)}, path)
    assert path.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [path]


def test_unusable_plots_are_refused(tmp_path: Path) -> None:
    curves = {"softmax": reliability_curve(PROBABILITIES, LABELS)}
    with pytest.raises(SettingError, match="png"):
        plot_reliability(curves, tmp_path / "curve.xyz")
    with pytest.raises(StorageError, match="nowhere"):
        plot_reliability(curves, tmp_path / "nowhere" / "curve.png")
    with pytest.raises(DataError, match="at least one curve"):
        plot_reliability({}, io.BytesIO())
    assert not list(tmp_path.iterdir())


def test_the_grid_equals_the_formula_for_every_alpha_and_both_forms() -> None:
    probabilities, labels = random_predictions(4, 60)
    influence = np.random.default_rng(5).exponential(100, (60, 4))
    frame = pnml_grid(probabilities, influence, labels, 50, [0, 0.3])
    assert list(frame.columns) == ["alpha", "keep_argmax", "nll", "ece", "accuracy", "brier"]
    assert frame["alpha"].tolist() == [0, 0, 0.3, 0.3]
    assert frame["keep_argmax"].tolist() == [False, True, False, True]
    hindsight = probabilities * (1 + 0.3 / 50 * influence)
    added = 0.3 / 50 * (probabilities * influence).sum(1, keepdims=True)
    expected = [probabilities, probabilities]
    expected += [hindsight / hindsight.sum(1, keepdims=True), (probabilities + added / 4) / (1 + added)]
    for row, values in zip(frame.itertuples(), expected, strict=True):
        assert row.nll == pytest.approx(log_loss(labels, values))
        assert row.ece == pytest.approx(brute_force_mass(values, labels, 20))
        assert row.accuracy == (values.argmax(1) == labels).mean()
        assert row.brier == pytest.approx(brier_of_each_class(values, labels))


def test_unusable_grids_are_refused() -> None:
    with pytest.raises(DataError, match="influence must have shape"):
        pnml_grid(PROBABILITIES, [[1.0, 2.0]], LABELS, 10, [1.0])
    with pytest.raises(DataError, match="influence must be at least 0"):
        pnml_grid(PROBABILITIES, -PROBABILITIES, LABELS, 10, [1.0])
    with pytest.raises(SettingError, match="alpha"):
        pnml_grid(PROBABILITIES, PROBABILITIES, LABELS, 10, [-1.0])
