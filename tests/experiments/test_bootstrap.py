"""Bootstrap intervals: brute force with NumPy, coverage by simulation, and the rule of the verdicts."""

import math

import numpy as np
import pytest
from scipy.stats import norm, pearsonr, t

from experiments.bootstrap import (
    Interval,
    auroc,
    auroc_draws,
    bounded_auroc_difference,
    correlation_draws,
    draw_counts,
    interval,
    mean_draws,
    mean_interval,
)


def brute_auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    """Count all pairs."""
    pairs = [1.0 if out > value else 0.5 if out == value else 0.0 for value in inside for out in outside]
    return float(np.mean(pairs))


def repeated(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Write out a resample."""
    return np.array([value for value, count in zip(values, counts, strict=True) for _ in range(count)])


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(3)


def test_counts() -> None:
    counts = draw_counts(7, 1, 5000)
    assert counts.shape == (5000, 7)
    assert (counts.sum(1) == 7).all()
    assert np.array_equal(counts, draw_counts(7, 1, 5000))
    assert not np.array_equal(counts, draw_counts(7, 2, 5000))
    assert counts.mean(0) == pytest.approx(1, abs=0.06)
    assert counts.var(0) == pytest.approx(6 / 7, abs=0.08)  # binomial: 7 draws with probability 1/7


def test_auroc_of_written_out_resamples(generator: np.random.Generator) -> None:
    inside, outside = generator.integers(0, 6, 9), generator.integers(2, 9, 13)  # with ties
    counts = draw_counts(9, 0, 30), draw_counts(13, 1, 30)
    expected = [
        brute_auroc(repeated(inside, first), repeated(outside, second)) for first, second in zip(*counts, strict=True)
    ]
    assert auroc_draws(inside, outside, *counts) == pytest.approx(expected, abs=1e-12)
    assert auroc(inside, outside) == pytest.approx(brute_auroc(inside, outside), abs=1e-12)


def test_large_samples_are_split_into_parts(generator: np.random.Generator) -> None:
    inside, outside = generator.normal(size=20_000), generator.normal(size=20_000) + 1
    counts = draw_counts(20_000, 0, 250), draw_counts(20_000, 1, 250)  # several chunks
    drawn = auroc_draws(inside, outside, *counts)
    last = auroc_draws(inside, outside, counts[0][-1:], counts[1][-1:])
    assert drawn[-1] == last[0]
    assert drawn.mean() == pytest.approx(norm.cdf(1 / math.sqrt(2)), abs=0.01)


def test_means_of_written_out_resamples(generator: np.random.Generator) -> None:
    table = generator.normal(size=(3, 8))
    seeds, images = draw_counts(3, 0, 20), draw_counts(8, 1, 20)
    expected = []
    for seed_counts, image_counts in zip(seeds, images, strict=True):
        rows = [table[index] for index, count in enumerate(seed_counts) for _ in range(count)]
        expected.append(np.mean([repeated(row, image_counts).mean() for row in rows]))
    assert mean_draws(table, seeds, images) == pytest.approx(expected, abs=1e-12)


def test_correlations_of_written_out_resamples(generator: np.random.Generator) -> None:
    first = generator.normal(size=15)
    second, counts = first + generator.normal(size=15), draw_counts(15, 0, 25)
    expected = [pearsonr(repeated(first, row), repeated(second, row)).statistic for row in counts]
    assert correlation_draws(first, second, counts) == pytest.approx(expected, abs=1e-9)
    assert (correlation_draws(np.ones(15), second, counts) == 0).all()


@pytest.mark.parametrize("size", [20, 40, 2000])
def test_the_percentiles_are_expanded(size: int) -> None:
    draws = np.random.default_rng(0).permutation(100_001) / 100_000
    measured = interval(0.5, draws, size)
    tail = norm.cdf(-math.sqrt(size / (size - 1)) * t(size - 1).isf(0.025))
    assert (measured.low, measured.high) == pytest.approx((tail, 1 - tail), abs=1e-4)
    assert measured.low <= 0.0251


def test_small_samples_have_the_interval_of_student(generator: np.random.Generator) -> None:
    seeds = generator.normal(size=5)
    measured = interval(
        seeds.mean(), mean_draws(seeds[None], np.ones((200_000, 1), int), draw_counts(5, 0, 200_000)), 5
    )
    expected = t(4, seeds.mean(), seeds.std(ddof=1) / math.sqrt(5)).interval(0.95)
    assert (measured.low, measured.high) == pytest.approx(expected, abs=0.01)


def test_one_example_has_no_interval() -> None:
    assert interval(0.5, [0.5], 1) == Interval(0.5, -math.inf, math.inf)
    assert interval(0.5, [0.5], 1).verdict == "undecided"


def coverage(intervals: list[Interval], truth: float) -> float:
    """Return the share of intervals that contain the truth."""
    return float(np.mean([row.low <= truth <= row.high for row in intervals]))


def test_coverage_of_auroc_differences(generator: np.random.Generator) -> None:
    """Two correlated scores of the same images; the difference of their AUROCs is known."""
    measured, size = [], 60
    for index in range(300):
        shared = [generator.normal(size=size) for _ in range(2)]
        scores = [[shared[side] + generator.normal(size=size) + side * shift for side in (0, 1)] for shift in (2, 1)]
        counts = draw_counts(size, 2 * index, 400), draw_counts(size, 2 * index + 1, 400)
        (first, second), estimates = (auroc_draws(*pair, *counts) for pair in scores), [auroc(*pair) for pair in scores]
        measured.append(interval(estimates[0] - estimates[1], first - second, size))
    truth = norm.cdf(2 / 2) - norm.cdf(1 / 2)  # the difference of two scores has standard deviation 2
    assert 0.92 <= coverage(measured, truth) <= 0.98


def test_coverage_with_five_seeds(generator: np.random.Generator) -> None:
    measured = []
    for index in range(300):
        table = generator.normal(size=(5, 1)) + 2 * generator.normal(size=(5, 80))
        measured.append(mean_interval(table, seed=index, resamples=800))
    assert coverage(measured, 0.0) >= 0.93
    plain = [mean_interval(np.repeat(generator.normal(size=(5, 1)), 2, 1), index, 400) for index in range(300)]
    assert 0.92 <= coverage(plain, 0.0) <= 0.98


def test_coverage_without_scores(generator: np.random.Generator) -> None:
    measured = []
    for _ in range(300):
        inside, outside = generator.normal(size=80), generator.normal(size=40)
        first, second = (auroc(inside, outside + shift + generator.normal(size=40)) for shift in (1.0, 0.0))
        measured.append(bounded_auroc_difference(first, second, 80, 40))
    truth = norm.cdf(1 / math.sqrt(3)) - 0.5
    assert coverage(measured, truth) >= 0.95


def test_means_of_several_sets_without_scores() -> None:
    first, second, size = [0.9, 0.7], [0.8, 0.5], 100
    row = bounded_auroc_difference(first, second, 500, size)
    deviations = [np.mean([math.sqrt(a * (1 - a) / size) for a in values]) for values in (first, second)]
    assert row.estimate == pytest.approx(0.15)
    assert (row.high - row.low) / 2 == pytest.approx(t(size - 1).isf(0.025) * sum(deviations))


def test_pairs_are_narrower_than_the_interval_without_scores(generator: np.random.Generator) -> None:
    inside, outside = generator.normal(size=200), generator.normal(size=100) + 1
    noisy = inside + 0.1 * generator.normal(size=200), outside + 0.1 * generator.normal(size=100)
    counts = draw_counts(200, 0), draw_counts(100, 1)
    lead = auroc(inside, outside) - auroc(*noisy)
    paired = interval(lead, auroc_draws(inside, outside, *counts) - auroc_draws(*noisy, *counts), 100)
    wide = bounded_auroc_difference(auroc(inside, outside), auroc(*noisy), 200, 100)
    assert paired.high - paired.low < 0.3 * (wide.high - wide.low)
    assert wide.estimate == pytest.approx(lead)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.1, 0.3, "holds"), (-0.3, -0.1, "does not hold"), (-0.1, 0.3, "undecided"), (0.0, 0.3, "undecided")],
)
def test_verdicts(low: float, high: float, verdict: str) -> None:
    row = Interval((low + high) / 2, low, high)
    assert row.verdict == verdict
    opposite = {"holds": "does not hold", "does not hold": "holds"}
    assert (-row).verdict == opposite.get(verdict, verdict)
    assert row.scaled(100).verdict == verdict
    assert row.shifted(1.0).verdict == "holds"
    assert row.shifted(1.0).low == pytest.approx(low + 1)
