"""Weights of the pool: against loops over examples, and on members with known properties."""

import numpy as np
import pytest

from ifcomp.evidence.members import MODEL, Member
from ifcomp.evidence.pool import member_priors, mix, pool_weights

CLASSES = 4


def distribution(predicted: np.ndarray, confidence: float, seed: int, classes: int = CLASSES) -> np.ndarray:
    """Distributions [n, K] whose most probable class is the predicted one, with noise."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(len(predicted), classes)) * 0.3
    logits[np.arange(len(predicted)), predicted] += confidence
    exponentials = np.exp(logits)
    return exponentials / exponentials.sum(1, keepdims=True)


def mistaken(truth: np.ndarray, accuracy: float, seed: int, classes: int = CLASSES) -> np.ndarray:
    """The truth, with random mistakes."""
    generator = np.random.default_rng(seed)
    return np.where(generator.random(len(truth)) < accuracy, truth, generator.integers(0, classes, len(truth)))


def noisy_labels(count: int, noise: float, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(count)
    truth = generator.integers(0, classes, count)
    wrong = generator.random(count) < noise
    return truth, np.where(wrong, (truth + generator.integers(1, classes, count)) % classes, truth)


def weigh(
    distributions: list[np.ndarray], labels: np.ndarray, untrained: int = 0, reference: np.ndarray | None = None
) -> np.ndarray:
    names = [f"layer {index}" for index in range(len(distributions) - 1)] + [MODEL]
    members = [
        Member(name, "votes", array, index >= untrained)
        for index, (name, array) in enumerate(zip(names, distributions, strict=True))
    ]
    return pool_weights(members, labels, reference).weight


def slow_weights(
    distributions: list[np.ndarray], labels: np.ndarray, fitted: np.ndarray, start: list[float], priors: list[float]
) -> list[float]:
    """Weights by their definition, example by example."""
    count, weights = len(distributions), start
    frequencies = [np.mean(fitted == label) for label in range(CLASSES)]

    def margin_of(p: np.ndarray, label: int) -> float:
        lift = [value / frequency if frequency else 0.0 for value, frequency in zip(p, frequencies, strict=True)]
        return (lift[label] - max(value for y, value in enumerate(lift) if y != label)) / sum(lift)

    for _ in range(60):
        new = []
        for index in range(count):
            support = against = support_agreed = against_agreed = 0.0
            others = [j for j in range(count) if j != index]
            for row, label in enumerate(labels):
                margin = margin_of(sum(weights[j] * distributions[j][row] for j in others), label)
                agrees = margin_of(distributions[index][row], label) > 0
                if margin > 0:
                    support, support_agreed = support + margin, support_agreed + margin * agrees
                else:
                    against, against_agreed = against - margin, against_agreed - margin * agrees
            s, r = (support_agreed + 1) / (support + 1), against_agreed / (against + 0.03 * len(labels))
            new.append(priors[index] * s * (1 - r) ** 4)
        weights = [(old + value / max(new)) / 2 for old, value in zip(weights, new, strict=True)]
        weights = [value / max(weights) for value in weights]
    return weights


@pytest.mark.parametrize(
    ("untrained", "start", "priors"),
    [
        (0, [1.0, 0.8, 0.6, 0.4, 0.2], [1.0] * 5),
        (1, [1.0] + [0.001] * 4, [1.0] + [0.75] * 4),
        (2, [1.0] * 2 + [0.001] * 3, [1.0] * 5),
    ],
)
def test_weights_equal_the_definition(untrained: int, start: list[float], priors: list[float]) -> None:
    """Members are divided by the class frequencies of the labels that they were fitted on."""
    truth, labels = noisy_labels(80, 0.25)
    arrays = [distribution(mistaken(truth, 0.8, seed), 1.5, seed) for seed in range(3)]
    arrays += [distribution(mistaken(labels, 0.7, 5), 1.0, 5), distribution(labels, 4.0, 6)]
    arrays = [array.astype(np.float32).astype(np.float64) for array in arrays]
    found = weigh(arrays, labels, untrained)
    np.testing.assert_allclose(found, slow_weights(arrays, labels, labels, start, priors), atol=1e-5)
    for sizes in ([70, 20, 10, 5], [70, 0, 20, 10]):
        reference = np.repeat(np.arange(CLASSES), sizes)
        found = weigh(arrays, labels, untrained, reference)
        np.testing.assert_allclose(found, slow_weights(arrays, labels, reference, start, priors), atol=1e-5)


def test_members_that_echo_the_labels_lose_their_weight() -> None:
    truth, labels = noisy_labels(2000, 0.2)
    informative = [distribution(mistaken(truth, 0.85, seed), 2.0, seed) for seed in range(3)]
    echoes = [distribution(labels, 4.0, seed) for seed in (7, 8, 9)]
    weight = weigh([*informative, *echoes], labels)
    assert weight[:3].min() > 0.8
    assert weight[3:].max() < 0.01


def test_the_input_outweighs_a_majority_of_echoes() -> None:
    """Two predictors on the input and one early layer against nine layers that have memorised the labels."""
    truth, labels = noisy_labels(2000, 0.2)
    informative = [distribution(mistaken(truth, 0.8, seed), 2.0, seed) for seed in range(3)]
    echoes = [distribution(labels, 4.0, seed) for seed in range(10, 19)]
    weight = weigh([*informative, *echoes], labels, untrained=2)
    assert weight[:3].min() > 0.5
    assert weight[3:].max() < 0.05


@pytest.mark.parametrize("accuracy", [0.25, 0.0])
def test_members_that_predict_other_labels_are_not_rewarded(accuracy: float) -> None:
    """A random member, and one that contradicts every label, have a small echo, but also little support."""
    truth, labels = noisy_labels(2000, 0.2)
    informative = [distribution(mistaken(truth, 0.85, seed), 2.0, seed) for seed in range(3)]
    predicted = mistaken(truth, 0.0, 5) if accuracy else (labels + 1) % CLASSES
    weight = weigh([*informative, distribution(predicted, 2.0, 7), distribution(labels, 4.0, 8)], labels)
    assert weight[:3].min() > 0.8
    assert weight[3] < 0.4 if accuracy else weight[3] < 0.02


def test_accurate_members_keep_their_weight_on_clean_labels() -> None:
    """On clean labels the only contradictions are mistakes of weak members."""
    truth = noisy_labels(2000, 0.0)[0]
    weak = [distribution(mistaken(truth, 0.8, seed), 1.0, seed) for seed in range(3)]
    accurate = [distribution(truth, 4.0, seed) for seed in (7, 8)]
    weight = weigh([*weak, *accurate], truth)
    assert weight[3:].min() > 0.5


@pytest.mark.parametrize("classes", [10, 50])
def test_few_examples_per_class(classes: int) -> None:
    truth, labels = noisy_labels(15 * classes, 0.2, classes)
    informative = [distribution(mistaken(truth, 0.7, seed, classes), 3.0, seed, classes) for seed in range(3)]
    contrary = distribution((labels + 1) % classes, 3.0, 5, classes)
    weight = weigh([*informative, contrary, distribution(labels, 6.0, 8, classes)], labels)
    assert weight[:3].min() > 0.7
    assert weight[3:].max() < 0.1


@pytest.mark.parametrize("rare", [0.05, 0.3])
def test_uninformative_features_do_not_contradict_rare_classes(rare: float) -> None:
    """Predictors on an input without information predict the frequent class. The layers know the clean labels."""
    generator = np.random.default_rng(0)
    truth = (generator.random(2000) < rare).astype(int)
    blind = [np.array([1 - rare, rare]) + 0.02 * generator.normal(size=(2000, 1)) * [1, -1] for _ in range(2)]
    layers = [distribution(mistaken(truth, 0.98, seed, 2), 3.0, seed, 2) for seed in range(3)]
    weight = weigh([*blind, *layers, distribution(truth, 4.0, 9, 2)], truth, untrained=2)
    assert weight[2:5].min() > 0.5


def test_trained_features_have_at_most_three_times_the_prior_weight_of_untrained_ones() -> None:
    array = np.full((2, 2), 0.5)
    members = [Member("input", "votes", array, is_trained=False)]
    members += [Member(f"layer {index}", "votes", array) for index in range(12)]
    np.testing.assert_allclose(member_priors(members), [1] + [0.25] * 12)
    np.testing.assert_allclose(member_priors(members[:3]), [1, 1, 1])
    np.testing.assert_allclose(member_priors(members[1:]), np.ones(12))


def test_more_than_20000_examples_are_sampled() -> None:
    truth, labels = noisy_labels(30_000, 0.2)
    arrays = [distribution(mistaken(truth, 0.8, seed), 2.0, seed) for seed in range(3)]
    arrays.append(distribution(labels, 4.0, 6))
    members = [Member(str(index), "votes", array) for index, array in enumerate(arrays)]
    first, again, other = (pool_weights(members, labels, seed=seed).weight for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    # The pool contradicts 4,000 labels of a sample, so r has a standard deviation of 0.006 and (1 - r)^4 one of 0.025.
    assert 0 < np.abs(first - other).max() < 0.1


def test_the_mixture_is_the_weighted_mean() -> None:
    arrays = [np.array([[0.2, 0.8]]), np.array([[0.6, 0.4]])]
    np.testing.assert_allclose(mix(arrays, np.array([1.0, 3.0])), [[0.5, 0.5]])
