"""Thresholds, joined scores, tables and metrics against hand calculation and brute force."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from ifcomp.errors import DataError, SettingError
from ifcomp.tasks.ood import (
    DEFAULT_MEMBERS,
    MEMBERS,
    OODMetrics,
    check_members,
    join_scores,
    member_weights,
    ood_metrics,
    ood_threshold,
    tail_surprisal,
)
from ifcomp.tasks.ood_rule import IDENTITY, OODRule
from ifcomp.tasks.ood_table import OODTable, compare_scores, compared_scores
from tasks.surprisal import slow_surprisal

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


@given(SCORES, st.lists(st.integers(-10, 10).map(float), min_size=1, max_size=50))
@settings(max_examples=100, deadline=None)
def test_surprisal_equals_counts_and_an_exponential_tail(values: list[float], held_out: list[float]) -> None:
    expected = [slow_surprisal(value, held_out) for value in values]
    np.testing.assert_allclose(tail_surprisal(values, held_out), expected, rtol=1e-12)


@given(SCORES, SCORES)
@settings(max_examples=100, deadline=None)
def test_surprisal_is_positive_and_keeps_the_order(values: list[float], held_out: list[float]) -> None:
    ordered = tail_surprisal(sorted(values), held_out)
    assert (ordered > 0).all()
    assert (np.diff(ordered) >= -1e-12).all()


@given(st.lists(st.integers(-10, 10).map(float), min_size=2, max_size=50))
@settings(max_examples=100, deadline=None)
def test_held_out_values_are_compared_with_the_others(scores: list[float]) -> None:
    others = [scores[:index] + scores[index + 1 :] for index in range(len(scores))]
    expected = [slow_surprisal(score, rest) for score, rest in zip(scores, others, strict=True)]
    np.testing.assert_allclose(tail_surprisal(scores, None), expected, rtol=1e-9)


def test_a_single_held_out_value_is_compared_with_none() -> None:
    np.testing.assert_allclose(tail_surprisal([3.0], None), [math.log(2)])


def test_a_joined_score_accepts_nearly_as_many_new_inputs_as_one_member() -> None:
    """If held-out inputs were compared with themselves, 20 of them would accept 86 % of new inputs instead of 92 %."""
    generator, accepted = np.random.default_rng(0), []
    for _ in range(1000):
        held_out, new = ({name: generator.normal(size=size) for name in DEFAULT_MEMBERS} for size in (20, 200))
        rule = OODRule(dict.fromkeys(DEFAULT_MEMBERS, 1.0), held_out, 0.95, SETTINGS)
        accepted.append((rule.join(new) <= rule.threshold).mean())
    assert 0.9 < np.mean(accepted) < 0.95


def test_surprisal_by_hand() -> None:
    held_out = np.arange(1.0, 12)  # the 90 % quantile is 10, the only larger value exceeds it by 1
    expected = [-math.log(11.5 / 12), -math.log(6 / 12), -math.log(1.5 / 12) + 1, -math.log(1.5 / 12) + 90]
    np.testing.assert_allclose(tail_surprisal([0, 6, 11, 100], held_out), expected)
    np.testing.assert_allclose(tail_surprisal([-1, 0, 7], np.zeros(9)), [-math.log(0.95), math.log(2), math.log(20)])
    assert tail_surprisal([math.inf], held_out) == math.inf


def test_surprisal_of_new_values_is_calibrated_for_an_exponential_distribution() -> None:
    generator = np.random.default_rng(0)
    surprisal = tail_surprisal(generator.exponential(3.0, 100_000), generator.exponential(3.0, 20_000))
    for p in (0.5, 0.1, 0.01, 0.001):
        assert (surprisal > -math.log(p)).mean() == pytest.approx(p, rel=0.1)


def test_joined_scores_by_hand_and_a_single_member_in_its_own_unit() -> None:
    values = {"complexity": [1.0, 5.0], "energy": [-3.0, -3.0], "neighbours": [0.1, 0.2]}
    held_out = {"complexity": [0.0, 2.0, 4.0], "energy": [-5.0, -3.0, -1.0], "neighbours": [0.0, 0.0, 0.0]}
    # shares of larger held-out values, with half of equal ones, plus one half, of four; 5 is 1.5 mean excesses above 2
    low, high = 0.2 * 4 / 2.5 + 4 / 2 + 4 / 0.5, 0.2 * math.exp(1.5) * 4 / 1.5 + 4 / 2 + 4 / 0.5
    weights = {"complexity": 0.2, "energy": 1.0, "neighbours": 1.0}
    np.testing.assert_allclose(join_scores(values, held_out, weights), np.log([low / 2.2, high / 2.2]))
    np.testing.assert_array_equal(join_scores(values, held_out, {"energy": 1.0}), [-3.0, -3.0])


def test_an_inverted_member_does_not_cancel_the_others() -> None:
    held_out = {name: np.arange(1000.0) for name in ("complexity", "energy")}
    weights = dict.fromkeys(held_out, 1.0)
    join = join_scores({"complexity": [1e3, 500.0], "energy": [-1.0, 500.0]}, held_out, weights)
    assert join[0] > 4 * join[1]


def test_the_weight_of_complexity_is_that_of_the_rank_correlation_of_scipy() -> None:
    generator = np.random.default_rng(0)
    softmax = generator.uniform(size=300).round(2)  # with ties
    for noise in (0.1, 1.0, 30.0):
        held_out = {"complexity": np.exp(softmax + noise * generator.normal(size=300)), "energy": softmax}
        weights = member_weights(held_out, softmax, ("complexity", "energy"))
        rho = spearmanr(held_out["complexity"], softmax).statistic
        assert weights == {"complexity": pytest.approx(1 - rho**2), "energy": 1.0}
    assert member_weights(held_out, softmax, ("energy",)) == {"energy": 1.0}


def test_the_weight_of_complexity_is_small_if_it_repeats_max_softmax_and_1_if_it_is_constant() -> None:
    softmax = np.arange(30.0)
    assert member_weights({"complexity": softmax**2}, softmax, ("complexity",)) == {"complexity": 1e-6}
    assert member_weights({"complexity": np.zeros(30)}, softmax, ("complexity",)) == {"complexity": 1.0}


def test_members_are_checked() -> None:
    assert check_members(None) == DEFAULT_MEMBERS
    assert check_members("energy") == ("energy",)
    assert check_members(["neighbours", "complexity"]) == ("complexity", "neighbours")
    for wrong in ("softmax", [], ["energy", "energy"], ("energy", "loss")):
        with pytest.raises(SettingError, match="'complexity', 'energy', 'neighbours'"):
            check_members(wrong)


SETTINGS = {**dict.fromkeys(IDENTITY, 1), "left_out": {}}


def rule_of(members: tuple[str, ...] = ("complexity", "energy"), tpr: float = 0.9, count: int = 10) -> OODRule:
    held_out = {name: np.arange(float(count)) for name in members}
    return OODRule(dict.fromkeys(members, 0.5), held_out, tpr, SETTINGS)


def test_the_rule_accepts_its_share_and_survives_json() -> None:
    rule = rule_of()
    assert (rule.held_out_scores <= rule.threshold).mean() == 0.9
    again = OODRule.from_json(rule.to_json())
    assert (again.threshold, again.tpr, again.weights, again.size) == (rule.threshold, 0.9, rule.weights, 10)
    assert again.settings == rule.settings
    rule.check_fit({**SETTINGS, "other": 3})
    with pytest.raises(SettingError, match="another model or fit: fit 1, not 'b'"):
        rule.check_fit({**SETTINGS, "fit": "b"})


@pytest.mark.parametrize(
    "changes",
    [
        {"tpr": 0},
        {"tpr": True},
        {"tpr": "0.9"},
        {"settings": None},
        {"weights": None},
        {"weights": {"energy": 1.0, "complexity": 0}},
        {"weights": {"energy": 1.0, "complexity": True}},
        {"held_out": {}},
        {"held_out": {"loss": [1.0]}},
        {"held_out": {"energy": []}},
        {"held_out": {"energy": ["1"]}},
        {"held_out": {"energy": [math.inf]}},
        {"held_out": {"energy": [math.nan]}},
        {"held_out": {"energy": [1.0], "complexity": [1.0, 2.0]}},
    ],
)
def test_a_damaged_rule_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError, DataError)):
        OODRule.from_json({**rule_of().to_json(), **changes})
    with pytest.raises(TypeError):
        OODRule.from_json([])


def frame_of(complexity: list[float], energy: list[float], softmax: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"complexity": complexity, "energy": energy, "max_softmax": softmax})


def test_comparison_names_the_best_score() -> None:
    rule = rule_of()
    inside, outside = frame_of([1, 2], [1, 2], [0.1, 0.2]), frame_of([8, 9], [0, 1.5], [0.15, 0.3])
    comparison = compare_scores(compared_scores(rule, inside), compared_scores(rule, outside))
    assert comparison["score"].tolist() == ["joined", "complexity", "energy", "max softmax"]
    assert comparison["auroc"].tolist() == [1.0, 1.0, 0.25, 0.75]
    scores = rule.join(inside)
    frame = pd.DataFrame({"index": [0, 1], "prediction": [3, 4], "confidence": [0.9, 0.8], "score": scores})
    frame = frame.assign(complexity=[1, 2], energy=[1, 2], is_ood=[False, True])
    table = OODTable(frame, rule, comparison, rule.join(outside))
    assert table.best == "joined"  # equal to complexity
    assert table.flagged["index"].tolist() == [1]
    assert "best score: joined, AUROC in percent: joined 100.0, complexity 100.0, energy 25.0" in repr(table)
    assert "max softmax 75.0" in table.headline
    assert "<table" in table._repr_html_()
    assert table.descriptions.keys() == set(frame.columns)
    assert len(table.plot().axes[0].patches) == 3


def test_a_table_without_known_ood_data(tmp_path: Path) -> None:
    rule = rule_of(("energy",))
    frame = pd.DataFrame({"index": [0, 1, 2], "score": [1.0, 9.5, 20.0], "is_ood": [False, True, True]})
    table = OODTable(frame, rule)
    assert repr(table) == "OODTable(2 of 3 inputs flagged, energy above 8)"
    assert table.best is None
    assert table.ranked["index"].tolist() == [2, 1, 0]
    assert table.headline.startswith("2 of 3 inputs are flagged")
    table.to_csv(tmp_path / "ood.csv")
    assert pd.read_csv(tmp_path / "ood.csv")["score"].tolist() == [1.0, 9.5, 20.0]
    tied = OODTable(pd.DataFrame({"score": [5.0, 5.0, 6.0], "energy": [1.0, 2.0, 0.0]}), rule)
    assert tied.ranked["energy"].tolist() == [0.0, 2.0, 1.0]
    comparison = compare_scores({"energy": [0.0], "max softmax": [0.5]}, {"energy": [1.0], "max softmax": [0.5]})
    advised = OODTable(frame, rule, comparison, np.array([1.0]))
    assert advised.headline.endswith("The best score is energy. score='energy' uses it alone.")
    assert MEMBERS.keys() >= set(rule.members)


def test_unusable_scores_and_settings_are_refused() -> None:
    for tpr in (0.0, 1.1, math.nan):
        with pytest.raises(SettingError, match="tpr"):
            ood_threshold([1.0], tpr)
    for scores in ([], [[1.0]], [math.nan]):
        with pytest.raises(DataError):
            ood_threshold(scores)
        with pytest.raises(DataError, match="out_scores"):
            ood_metrics([1.0], scores)
