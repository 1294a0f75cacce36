"""Leave-one-out predictions of ridge regression against refits without the example."""

import numpy as np
import pytest
import torch

from ifcomp.evidence.readout import Readout, find_spectrum, fit_readout, minimise_on_grid

CLASSES = 3


def problem(count: int, size: int, *, duplicates: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Features [n, d] with a mean, some correlated, and labels that depend on them."""
    generator = np.random.default_rng(count + size)
    features = generator.normal(size=(count, size)) @ generator.normal(size=(size, size)) + 3
    labels = (features[:, :CLASSES] + 2 * generator.normal(size=(count, CLASSES))).argmax(1)
    if duplicates:
        features[1::2] = features[::2][: len(features[1::2])]
    return features, labels


def one_hot(labels: np.ndarray) -> np.ndarray:
    return np.eye(CLASSES)[labels]


def ridge_regression(features: np.ndarray, labels: np.ndarray, ridge: float, query: np.ndarray) -> np.ndarray:
    """Predictions [m, K] of a ridge regression whose intercept is not penalised, from its normal equations."""
    design = np.column_stack([np.ones(len(features)), features])
    penalty = ridge * np.eye(design.shape[1])
    penalty[0, 0] = 0
    coefficients = np.linalg.solve(design.T @ design + penalty, design.T @ one_hot(labels))
    return np.column_stack([np.ones(len(query)), query]) @ coefficients


def refits(features: np.ndarray, labels: np.ndarray, ridge: float) -> np.ndarray:
    """Prediction of every example by a regression on the others."""
    rows = []
    for index in range(len(labels)):
        rest = np.arange(len(labels)) != index
        rows.append(ridge_regression(features[rest], labels[rest], ridge, features[index : index + 1])[0])
    return np.array(rows)


def softmax(values: np.ndarray) -> np.ndarray:
    exponentials = np.exp(values - values.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def fit(features: np.ndarray, labels: np.ndarray) -> tuple[Readout, np.ndarray]:
    """The fitted readout and the rotated features."""
    spectrum, rotated = find_spectrum(features), features.copy()
    spectrum.rotate(rotated)
    return fit_readout(rotated, torch.tensor(labels), CLASSES, spectrum), rotated


def with_ridge(readout: Readout, ridge: float) -> Readout:
    return Readout(readout.spectrum, readout.frequencies, readout.moments, ridge, readout.scale)


@pytest.mark.parametrize("ridge", [0.01, 1.0, 300.0])
@pytest.mark.parametrize(("count", "size"), [(40, 5), (12, 20), (21, 20)])
@pytest.mark.parametrize("duplicates", [False, True])
def test_leave_one_out_predictions_equal_refits(count: int, size: int, ridge: float, duplicates: bool) -> None:
    features, labels = problem(count, size, duplicates=duplicates)
    readout, rotated = fit(features, labels)
    found = with_ridge(readout, ridge).predictions(torch.tensor(rotated), torch.tensor(labels)).numpy()
    np.testing.assert_allclose(found, refits(features, labels, ridge), rtol=1e-6, atol=1e-8)


def test_probabilities_are_the_softmax_of_scaled_refits() -> None:
    features, labels = problem(40, 5)
    readout, rotated = fit(features, labels)
    expected = softmax(readout.scale * refits(features, labels, readout.ridge))
    np.testing.assert_allclose(readout.probabilities(rotated, torch.tensor(labels)), expected, rtol=1e-9)


def test_other_examples_are_predicted_by_the_regression_on_all() -> None:
    features, labels = problem(40, 5)
    readout, _ = fit(features, labels)
    others = problem(17, 5)[0]
    expected = softmax(readout.scale * ridge_regression(features, labels, readout.ridge, others))
    readout.spectrum.rotate(others)
    np.testing.assert_allclose(readout.probabilities(others), expected, rtol=1e-9)


@pytest.mark.parametrize(("count", "size"), [(40, 5), (12, 20), (9000, 3)])
def test_the_spectrum_equals_that_of_numpy(count: int, size: int) -> None:
    features = problem(count, size)[0]
    spectrum = find_spectrum(features)
    centred = features - features.mean(0)
    values = np.zeros(size)
    singular = np.linalg.svd(centred, compute_uv=False)
    values[: len(singular)] = singular**2
    vectors = spectrum.vectors.numpy()
    assert spectrum.count == count
    np.testing.assert_allclose(spectrum.mean, features.mean(0), rtol=1e-12)
    np.testing.assert_allclose(spectrum.values, values, rtol=1e-9, atol=1e-9 * values.max())
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(size), atol=1e-12)
    np.testing.assert_allclose(centred.T @ centred @ vectors, vectors * values, atol=1e-8 * values.max())
    rotated = features.copy()
    spectrum.rotate(rotated)
    np.testing.assert_allclose(rotated, centred @ vectors, atol=1e-9 * np.abs(centred).max())


def test_features_in_float32_are_decomposed_in_float64() -> None:
    features = (problem(500, 4)[0] + 1000).astype(np.float32)
    exact = find_spectrum(features.astype(np.float64))
    np.testing.assert_allclose(find_spectrum(features).values, exact.values, rtol=1e-12)


def best_of_wide_grids(features: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Ridge and scale of the smallest error and codelength of refits, over grids with four more points on each side."""
    targets = one_hot(labels)
    ridges = [len(labels) * 10.0**power for power in range(-9, 5)]
    errors = [np.square(refits(features, labels, ridge) - targets).mean() for ridge in ridges]
    ridge = ridges[int(np.argmin(errors))]
    scales = [2.0**power for power in range(-5, 10)]
    predictions = refits(features, labels, ridge)
    lengths = [-np.log((softmax(scale * predictions) * targets).sum(1)).mean() for scale in scales]
    return ridge, scales[int(np.argmin(lengths))]


@pytest.mark.parametrize(("count", "size"), [(40, 5), (30, 40), (200, 3)])
def test_ridge_and_scale_minimise_leave_one_out_error_and_codelength(count: int, size: int) -> None:
    features, labels = problem(count, size)
    ridge, scale = best_of_wide_grids(features, labels)
    readout = fit(features, labels)[0]
    assert readout.ridge == pytest.approx(ridge)
    assert readout.scale == scale


def test_labels_without_relation_to_the_features_extend_both_grids() -> None:
    """The best ridge is beyond n: predictions are the class frequencies. Separable labels need a large scale."""
    generator = np.random.default_rng(1)
    features, labels = generator.normal(size=(60, 30)), generator.integers(0, CLASSES, 60)
    assert fit(features, labels)[0].ridge > 60
    separable = np.repeat(np.eye(CLASSES), 30, 0) + 1e-3 * generator.normal(size=(90, CLASSES))
    assert fit(separable, np.repeat(np.arange(CLASSES), 30))[0].scale > 32


@pytest.mark.parametrize(
    ("best", "expected"),
    [(3.0, 4.0), (0.3, 0.25), (60.0, 64.0), (1e-9, 2.0**-4), (1e9, 2.0**7), (1.0, 1.0), (8.0, 8.0)],
)
def test_a_grid_grows_at_its_edge_by_at_most_four_points(best: float, expected: float) -> None:
    """The distance to the best point is measured in logarithms."""
    grid = (1.0, 2.0, 4.0, 8.0)
    assert minimise_on_grid(lambda point: abs(np.log(point / best)), grid) == expected


def test_an_isolated_example_is_predicted_by_the_class_frequencies() -> None:
    """Without a ridge its leverage is 1: only rounding would decide its prediction."""
    features = np.zeros((10, 1))
    features[0] = 1.0
    labels = np.array([0] + [1, 2] * 4 + [1])
    readout, rotated = fit(features, labels)
    found = with_ridge(readout, 1e-14).predictions(torch.tensor(rotated), torch.tensor(labels))
    np.testing.assert_allclose(found[0], [0, 5 / 9, 4 / 9], rtol=1e-12)  # of the other examples
    assert found.isfinite().all()


@pytest.mark.parametrize(("count", "size", "classes"), [(100, 300, 10), (200, 400, 50)])
def test_features_in_float32_have_the_ridge_of_float64(count: int, size: int, classes: int) -> None:
    """With more features than examples small ridges interpolate the labels. In float32 their leverages are rounded."""
    generator = np.random.default_rng(0)
    labels = np.arange(count) % classes
    features = generator.normal(size=(count, size)) + 0.7 * generator.normal(size=(classes, size))[labels]
    found = {}
    for dtype in (np.float32, np.float64):
        rotated = features.astype(dtype)
        spectrum = find_spectrum(rotated)
        spectrum.rotate(rotated)
        readout = fit_readout(rotated, torch.tensor(labels), classes, spectrum)
        found[dtype] = readout.ridge, (readout.probabilities(rotated, torch.tensor(labels)).argmax(1) == labels).mean()
    assert found[np.float32][0] == pytest.approx(found[np.float64][0])
    assert found[np.float32][1] == pytest.approx(found[np.float64][1], abs=0.02)
    assert found[np.float64][1] > 3 / classes


def test_ridges_that_interpolate_are_not_chosen() -> None:
    """Labels without relation to the features: any prediction better than chance repeats the label."""
    generator = np.random.default_rng(0)
    features, labels = generator.normal(size=(30, 200)).astype(np.float32), generator.integers(0, CLASSES, 30)
    readout, rotated = fit(features, labels)
    assert not readout.interpolates(torch.tensor(rotated).double()).any()
    assert (readout.probabilities(rotated, torch.tensor(labels)).argmax(1) == labels).mean() < 0.6
