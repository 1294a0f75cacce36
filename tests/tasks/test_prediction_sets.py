"""Prediction sets against loops over labels, and their coverage on random data."""

import math

import numpy as np
import pytest

from ifcomp.errors import SettingError
from ifcomp.tasks import prediction_sets
from ifcomp.tasks.prediction_sets import SetRule, choose_penalty, fit_set_rule, label_scores


def random_probabilities(count: int, classes: int, seed: int, sharpness: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Return distributions and labels drawn from them."""
    generator = np.random.default_rng(seed)
    values = np.exp(sharpness * generator.standard_normal((count, classes)))
    values /= values.sum(1, keepdims=True)
    return values, np.array([generator.choice(classes, p=row) for row in values])


def score_by_hand(row: list[float], label: int, penalty: float, free_ranks: int) -> float:
    """Score of one label from the definition; earlier labels come first among equal ones."""
    before = [k for k in range(len(row)) if row[k] > row[label] or (row[k] == row[label] and k < label)]
    rank = len(before) + 1
    return math.fsum(row[k] for k in before) + (penalty * (rank - free_ranks) if rank > free_ranks else 0.0)


@pytest.mark.parametrize(("penalty", "free_ranks"), [(0.0, 1), (0.1, 1), (0.01, 3), (2.0, 2)])
def test_scores_are_those_of_the_definition(penalty: float, free_ranks: int) -> None:
    values = np.concatenate([random_probabilities(40, 6, 0)[0], np.full((1, 6), 1 / 6), np.eye(6)[:2]])
    expected = [[score_by_hand(row, label, penalty, free_ranks) for label in range(6)] for row in values.tolist()]
    np.testing.assert_allclose(label_scores(values, penalty, free_ranks), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("count", "coverage", "rank"),
    [(19, 0.95, 19), (20, 0.95, 20), (99, 0.95, 95), (100, 0.95, 96), (9, 0.9, 9), (99, 0.07, 7), (50, 0.001, 1)],
)
def test_the_threshold_is_the_finite_sample_quantile(count: int, coverage: float, rank: int) -> None:
    rule = SetRule(np.arange(1.0, count + 1), 0.0, 1)
    assert rule.threshold(coverage) == rank


def test_too_few_scores_give_all_labels() -> None:
    values, labels = random_probabilities(18, 4, 1)
    rule = fit_set_rule(values, labels, values, labels)
    assert rule.threshold(0.95) == math.inf
    assert rule.sets(values, 0.95).all()


@pytest.mark.parametrize("coverage", [0.0, 1.0, -1, 2, math.nan, "0.9", None, True])
def test_other_coverages_are_refused(coverage: object) -> None:
    with pytest.raises(SettingError, match="coverage must be a number between 0 and 1"):
        SetRule(np.zeros(30), 0.0, 1).threshold(coverage)


@pytest.mark.parametrize("coverage", [0.1, 0.5, 0.9, 0.99])
def test_sets_are_nested_and_never_empty(coverage: float) -> None:
    values, labels = random_probabilities(400, 7, 2)
    rule = fit_set_rule(values[:200], labels[:200], values[200:], labels[200:])
    sets = rule.sets(values, coverage)
    assert sets[np.arange(400), values.argmax(1)].all()
    for row, members in zip(values, sets, strict=True):
        assert row[members].min() >= row[~members].max(initial=0.0)
    assert (sets <= rule.sets(values, coverage + 0.005)).all()


@pytest.mark.parametrize("coverage", [0.8, 0.95])
def test_mean_coverage_is_nominal_for_any_distribution(coverage: float) -> None:
    """The labels follow other distributions than the given ones: coverage does not need calibration."""
    covered = []
    for seed in range(200):
        values, labels = random_probabilities(260, 5, seed, sharpness=1.0)
        claimed = values**3 / (values**3).sum(1, keepdims=True)
        rule = fit_set_rule(claimed[:60], labels[:60], claimed[60:160], labels[60:160])
        covered.append(rule.sets(claimed[160:], coverage)[np.arange(100), labels[160:]].mean())
    assert coverage - 0.01 <= np.mean(covered) <= coverage + 0.02


def test_equal_inputs_have_equal_sets_although_their_probabilities_differ_by_rounding() -> None:
    """Both labels of one input are equally frequent. Float32 rounds its probabilities differently in each batch."""
    values, labels = np.tile([0.6, 0.4], (40, 1)), np.arange(40) % 2
    rule = fit_set_rule(values, labels, values, labels)
    rounded = np.array([[0.6 + 2e-7, 0.4 - 2e-7], [0.6 - 2e-7, 0.4 + 2e-7], [0.601, 0.399]])
    assert rule.sets(rounded, 0.9).tolist() == [[True, True], [True, True], [True, False]]


def test_penalties_are_compared_on_all_parts_of_large_data() -> None:
    """The first 5,000 examples need no penalty. Those after them are less confident than they should be."""
    values, labels = (
        np.concatenate(parts)
        for parts in zip(random_probabilities(5000, 20, 0), random_probabilities(15000, 20, 1), strict=True)
    )
    values[5000:] = values[5000:] ** 0.3 / (values[5000:] ** 0.3).sum(1, keepdims=True)
    assert choose_penalty(values[:5000], labels[:5000]) == (0.0, 1)
    assert choose_penalty(values, labels)[0] > 0


@pytest.mark.parametrize("sharpness", [0.5, 2.0, 4.0])
def test_the_penalty_with_the_smallest_sets_is_chosen(sharpness: float) -> None:
    values, labels = random_probabilities(300, 20, 3, sharpness)
    values = values**0.3 / (values**0.3).sum(1, keepdims=True)
    sizes = {}
    for choice in [(0.0, 1)] + [(a, b) for b in prediction_sets.FREE_RANKS for a in prediction_sets.PENALTIES]:
        scores = [[score_by_hand(row, label, *choice) for label in range(20)] for row in values.tolist()]
        of_labels = sorted(row[label] for row, label in zip(scores, labels, strict=True))
        threshold = of_labels[math.ceil(301 * 0.95) - 1]
        sizes[choice] = sum(score <= threshold + 1e-12 for row in scores for score in row)
    sizes[0.0, 1] *= 0.98  # a penalty has to be better by two percent
    assert choose_penalty(values, labels) == min(sizes, key=sizes.get)


def test_no_penalty_is_preferred_if_sets_are_equal() -> None:
    assert choose_penalty(np.eye(3)[[0, 1, 2] * 20], np.array([0, 1, 2] * 20)) == (0.0, 1)
