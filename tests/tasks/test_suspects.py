"""The noise rate of confident learning against the package cleanlab, and the choice of suspects."""

import numpy as np
import pytest

from ifcomp.tasks.suspects import estimate_noise_rate, label_table, most_suspicious

cleanlab_count = pytest.importorskip("cleanlab.count", reason="cleanlab is not installed")


def probabilities_and_labels(
    count: int, classes: int, sharpness: float, noise: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of noisy logits of the true class, and labels of which a share is another class."""
    generator = np.random.default_rng(seed)
    truth = generator.integers(0, classes, count)
    logits = generator.normal(size=(count, classes)) + sharpness * np.eye(classes)[truth]
    logits += generator.normal(size=classes)  # classes of different difficulty
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    labels = np.where(generator.random(count) < noise, generator.integers(0, classes, count), truth)
    return exponentials / exponentials.sum(1, keepdims=True), labels


def noise_rate_of_cleanlab(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Share of other classes among the confident examples per given class, averaged over the examples.

    The joint distribution of cleanlab is rounded to counts, and counts at least one right label per class.
    """
    thresholds = cleanlab_count.get_confident_thresholds(labels, probabilities)
    is_confident = [any(row >= thresholds - 1e-6) for row in probabilities]
    _, others = cleanlab_count.compute_confident_joint(labels, probabilities, return_indices_of_off_diagonals=True)
    total = 0.0
    for label, size in zip(*np.unique(labels, return_counts=True), strict=True):
        confident = sum(found for found, given in zip(is_confident, labels, strict=True) if given == label)
        total += size * sum(labels[others] == label) / max(confident, 1)
    return float(total / len(labels))


def assert_equals_cleanlab(probabilities: np.ndarray, labels: np.ndarray) -> None:
    found = estimate_noise_rate(probabilities, labels)
    assert found == pytest.approx(noise_rate_of_cleanlab(probabilities, labels), abs=1e-12)


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.5])
@pytest.mark.parametrize(
    ("count", "classes", "sharpness"), [(300, 2, 0.0), (300, 2, 1.0), (500, 4, 4.0), (2000, 10, 4.0)]
)
def test_the_noise_rate_equals_that_of_cleanlab(count: int, classes: int, sharpness: float, noise: float) -> None:
    assert_equals_cleanlab(*probabilities_and_labels(count, classes, sharpness, noise, seed=count + classes))


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.5])
@pytest.mark.parametrize(("count", "classes", "sharpness"), [(500, 4, 0.0), (2000, 10, 0.0), (2000, 10, 1.0)])
def test_vague_probabilities_of_many_classes(count: int, classes: int, sharpness: float, noise: float) -> None:
    assert_equals_cleanlab(*probabilities_and_labels(count, classes, sharpness, noise, seed=count + classes))


def test_classes_without_examples_are_no_suggestions() -> None:
    probabilities, labels = probabilities_and_labels(400, 6, 2.0, 0.2, seed=1)
    labels[(labels == 2) | (labels == 5)] = 0
    assert_equals_cleanlab(probabilities, labels)


def test_probabilities_on_a_grid_are_tied() -> None:
    """Votes of neighbours have few values, so probabilities equal thresholds and each other."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 300)
    counts = np.array([generator.multinomial(4, 0.2 + 0.4 * np.eye(3)[label]) for label in labels])
    probabilities = counts / 4
    assert_equals_cleanlab(probabilities, labels)


def test_equal_probabilities_of_a_class_reach_their_mean() -> None:
    """The mean of equal numbers may be larger than these by rounding."""
    labels = np.repeat([0, 1], [7, 5])
    probabilities = np.where((labels == 0)[:, None], [0.7, 0.3], [0.9, 0.1])
    assert np.mean([0.1] * 5) != 0.1 or np.mean([0.7] * 7) != 0.7
    assert_equals_cleanlab(probabilities, labels)


def test_the_noise_rate_of_no_examples_is_0() -> None:
    assert estimate_noise_rate(np.zeros((0, 3)), np.zeros(0, dtype=int)) == 0


def test_suspects_have_the_largest_positive_scores() -> None:
    scores = np.array([0.5, 3.0, np.nan, -1.0, 2.0, 0.0, 2.0])
    assert most_suspicious(scores, 0).tolist() == [False] * 7
    assert np.flatnonzero(most_suspicious(scores, 2)).tolist() == [1, 4]  # of equal scores the first
    assert np.flatnonzero(most_suspicious(scores, 7)).tolist() == [0, 1, 4, 6]


def test_the_number_of_suspects_follows_from_the_noise_rate_of_scored_labels() -> None:
    probabilities, labels = probabilities_and_labels(1000, 4, 4.0, 0.2, seed=3)
    is_scored = np.arange(1000) < 800
    frame, noise_rate = label_table(probabilities, labels, is_scored)
    assert noise_rate == pytest.approx(noise_rate_of_cleanlab(probabilities[:800], labels[:800]), abs=1e-12)
    assert frame["is_suspect"].sum() == min(round(800 * noise_rate), (frame["score"] > 0).sum())
    assert frame["score"][:800].notna().all()
    assert frame["score"][800:].isna().all()
    chosen = frame["is_suspect"]
    assert frame["score"][chosen].min() >= frame["score"][:800][~chosen[:800]].max()
