"""Thresholds, flags and metrics against hand calculation and brute force."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from ifcomp import IFComp, ScoreTable
from ifcomp.errors import DataError, SettingError
from ifcomp.tasks.ood import (
    OOD_COLUMN,
    OOD_DAMPING,
    PARAMETRIC_COLUMN,
    OODMetrics,
    flag_ood,
    ood_metrics,
    ood_threshold,
)
from tasks.digits import images_and_labels, train_network
from tasks.tables import table_of

SCORES = st.lists(st.floats(-10, 10), min_size=1, max_size=50)


def test_thresholds_by_hand() -> None:
    scores = np.arange(1.0, 21.0)  # 5 % each
    assert ood_threshold(scores) == 19
    assert ood_threshold(scores, 0.05) == 1
    assert ood_threshold(scores, 0.051) == 2
    assert ood_threshold(scores, 1) == 20


@given(SCORES, st.floats(0.01, 1))
@settings(max_examples=100, deadline=None)
def test_the_threshold_is_the_smallest_that_accepts_the_share(scores: list[float], tpr: float) -> None:
    threshold = ood_threshold(scores, tpr)
    accepted = [score <= threshold for score in scores]
    assert sum(accepted) / len(scores) >= tpr
    assert threshold in scores
    assert sum(score < threshold for score in scores) / len(scores) < tpr


@given(SCORES, SCORES)
@settings(max_examples=50, deadline=None)
def test_metrics_equal_brute_force_over_pairs_and_thresholds(inside: list[float], outside: list[float]) -> None:
    pairs = [(out > in_) + 0.5 * (out == in_) for out in outside for in_ in inside]
    result = ood_metrics(inside, outside)
    assert result.auroc == pytest.approx(sum(pairs) / len(pairs))
    assert result.aupr_out == pytest.approx(brute_force_precision(outside, inside))
    assert result.aupr_in == pytest.approx(brute_force_precision([-x for x in inside], [-x for x in outside]))
    candidates = [s for s in inside if sum(x <= s for x in inside) >= 0.95 * len(inside)]
    assert result.fpr95 == sum(x <= min(candidates) for x in outside) / len(outside)


def brute_force_precision(positive: list[float], negative: list[float]) -> float:
    """Average precision: precision at every score, weighted by the gain in recall."""
    total = 0.0
    for level in set(positive):
        kept = sum(x >= level for x in positive)
        total += kept / (kept + sum(x >= level for x in negative)) * positive.count(level) / len(positive)
    return total


def test_metrics_equal_those_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    inside, outside = generator.normal(0, 1, 1000), generator.normal(1.5, 1, 700)
    result = ood_metrics(inside, outside)
    scores, is_out = np.concatenate([inside, outside]), np.arange(1700) >= 1000
    assert result.auroc == pytest.approx(roc_auc_score(is_out, scores))
    assert result.aupr_out == pytest.approx(average_precision_score(is_out, scores))
    assert result.aupr_in == pytest.approx(average_precision_score(~is_out, -scores))
    false, true, _ = roc_curve(~is_out, -scores, drop_intermediate=False)
    assert result.fpr95 == pytest.approx(false[true >= 0.95][0])


def test_larger_is_more_out_of_distribution() -> None:
    assert ood_metrics([1, 2, 3], [4, 5]) == OODMetrics(auroc=1, aupr_in=1, aupr_out=1, fpr95=0)
    assert ood_metrics([1, 2, 3], [0, 0]).auroc == 0
    assert ood_metrics([1, 2, 3], [0, 0]).fpr95 == 1
    assert ood_metrics([1, 2], [math.inf, 3]).auroc == 1


def test_flags_by_hand() -> None:
    result = flag_ood(table_of([0.1, 3.0, 0.5, 3.0]), 0.5)
    assert result["index"].tolist() == [1, 3, 2, 0]
    assert result["is_ood"].tolist() == [True, True, False, False]
    assert result["bounded_complexity"].tolist() == [3.0, 3.0, 0.5, 0.1]
    expected = ["index", "prediction", "confidence", "expected_influence", "parametric_complexity"]
    assert list(result.columns) == [*expected, "bounded_complexity", "surprise", "is_ood"]


def test_flags_by_another_column() -> None:
    table = table_of([0.1, 3.0, 0.5, 3.0])
    assert flag_ood(table, 1.5, PARAMETRIC_COLUMN)["is_ood"].tolist() == [True, True, False, False]
    probed = ScoreTable(table.frame.drop(columns="bounded_complexity"), table.settings)
    assert flag_ood(probed, 1.5, PARAMETRIC_COLUMN)["is_ood"].sum() == 2
    with pytest.raises(DataError, match="Score without probes"):
        flag_ood(probed, 1.5)


def test_flags_accept_exactly_the_share_of_the_threshold() -> None:
    scores = np.random.default_rng(1).exponential(size=200)
    result = flag_ood(table_of(scores, [0] * 200), ood_threshold(scores, 0.9))
    assert result["is_ood"].sum() == 20


def test_unusable_scores_and_settings_are_refused() -> None:
    for tpr in (0.0, 1.1, math.nan):
        with pytest.raises(SettingError, match="tpr"):
            ood_threshold([1.0], tpr)
    with pytest.raises(SettingError, match="NaN"):
        flag_ood(table_of([1.0]), math.nan)
    for scores in ([], [[1.0]], [math.nan]):
        with pytest.raises(DataError):
            ood_threshold(scores)
        with pytest.raises(DataError, match="out_scores"):
            ood_metrics([1.0], scores)


def test_inverted_digits_are_flagged_and_other_digits_are_not() -> None:
    """The threshold comes from held-out digits; the flags are for other digits and their inverted images."""
    images, labels = images_and_labels()
    ifc = IFComp(train_network(images[:800], labels[:800]), fisher="exact", damping=OOD_DAMPING)
    ifc.fit([images[:800]])
    threshold = ood_threshold(ifc.bounded_complexity(images[800:1300]), 0.95)
    result = flag_ood(ifc.score([images[1300:], 1 - images[1300:]]), threshold)
    inverted = result["index"] >= len(images) - 1300
    assert result["is_ood"][~inverted].mean() < 0.12
    assert result["is_ood"][inverted].mean() > 0.9
    assert ood_metrics(result[OOD_COLUMN][~inverted], result[OOD_COLUMN][inverted]).auroc > 0.95
