"""Choice of temperature and alpha against explicit loops, and the result that is stored."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize_scalar
from sklearn.metrics import log_loss

from ifcomp.errors import DataError, SettingError
from ifcomp.tasks.calibration_fit import (
    ADDED_PROBABILITIES,
    FOLDS,
    HeldOut,
    calibrated_distribution,
    choose_form,
    choose_weight,
    cross_validate,
    fit_calibration,
    split_halves,
)
from ifcomp.tasks.calibration_result import DESCRIPTIONS, Calibration
from ifcomp.tasks.simple_scores import fit_temperature

COUNT, MEAN_INFLUENCE = 500, 12.0
SETTINGS = {"beta": 1.0, "damping": "Relative(multiple=0.1)", "model": "m", "fit": "f", "tuning_examples": 200}


def held_out(count: int = 400, sharpness: float = 2.0, seed: int = 0, confused: float = 0.2) -> HeldOut:
    """Overconfident logits whose E[IF] is large where labels are random."""
    generator = np.random.default_rng(seed)
    logits = 3 * generator.standard_normal((count, 4))
    labels = np.array([generator.choice(4, p=np.exp(row) / np.exp(row).sum()) for row in logits])
    is_confused = generator.random(count) < confused
    labels[is_confused] = generator.integers(0, 4, is_confused.sum())
    expected = generator.gamma(2.0, 5.0, count) * np.where(is_confused, 10.0, 1.0)
    return HeldOut(sharpness * logits, labels, expected)


def result(**options: Any) -> Calibration:
    data = held_out(**options)
    tuning, conformal = (data.select(index) for index in split_halves(len(data.labels), 3))
    temperature = fit_temperature(tuning.logits, tuning.labels)
    return fit_calibration(tuning, conformal, temperature, COUNT, MEAN_INFLUENCE, SETTINGS)


def probability_by_hand(logits: list[float], expected: float, temperature: float, weight: float) -> list[float]:
    largest = max(logits)
    powers = [math.exp((value - largest) / temperature) for value in logits]
    added = weight * expected
    return [(power / math.fsum(powers) + added / len(logits)) / (1 + added) for power in powers]


def nll_by_hand(data: HeldOut, temperature: float, weight: float) -> float:
    losses = [
        -math.log(probability_by_hand(logits, expected, temperature, weight)[label])
        for logits, label, expected in zip(
            data.logits.tolist(), data.labels.tolist(), data.expected.tolist(), strict=True
        )
    ]
    return math.fsum(losses) / len(losses)


@pytest.mark.parametrize(("temperature", "weight"), [(1.0, 0.0), (0.5, 0.01), (3.0, 1e4)])
def test_the_distribution_is_that_of_the_formula(temperature: float, weight: float) -> None:
    data = held_out(20)
    expected = [
        probability_by_hand(row, influence, temperature, weight)
        for row, influence in zip(data.logits.tolist(), data.expected.tolist(), strict=True)
    ]
    found = calibrated_distribution(data.logits, data.expected, temperature, weight)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_the_weight_with_the_smallest_nll_is_chosen(temperature: float) -> None:
    data, weights = held_out(), [0.0, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    assert choose_weight(data, temperature, weights) == min(weights, key=lambda w: nll_by_hand(data, temperature, w))


def test_labels_of_probability_zero_need_added_probability() -> None:
    data = HeldOut(np.array([[2000.0, 0.0], [0.0, 2000.0]]), np.array([1, 1]), np.ones(2))
    assert choose_weight(data, 1.0, [0.0, 0.1]) == 0.1


def test_alpha_is_chosen_on_a_wide_grid_with_zero() -> None:
    assert ADDED_PROBABILITIES[0] == 0
    assert ADDED_PROBABILITIES[1] <= 1e-5
    assert ADDED_PROBABILITIES[-1] >= 100
    calibration = result()
    data = held_out().select(split_halves(400, 3)[0])
    weights = [added / MEAN_INFLUENCE for added in ADDED_PROBABILITIES]
    best = min(weights, key=lambda weight: nll_by_hand(data, calibration.temperature, weight))
    assert calibration.alpha == pytest.approx(COUNT * best, rel=1e-12)
    assert calibration.alpha > 0


def test_figures_are_cross_validated() -> None:
    """Every example is predicted with the temperature and alpha of the other folds, chosen by a search."""
    data, weights = held_out(100), [0.0, 1e-3, 1e-2]
    found = cross_validate(data, weights, seed=5)
    fold_of = np.random.default_rng([5, 1]).permutation(100) % FOLDS
    for fold in range(FOLDS):
        others = data.select(np.flatnonzero(fold_of != fold))
        inverse = minimize_scalar(
            lambda beta, others=others: log_loss(others.labels, softmax(beta * others.logits)), bounds=(0.01, 5)
        ).x
        weight = min(weights, key=lambda w, t=1 / inverse, others=others: nll_by_hand(others, t, w))
        for position in np.flatnonzero(fold_of == fold):
            row, influence = data.logits[position].tolist(), float(data.expected[position])
            for form, choice in (
                ("softmax", (1, 0)),
                ("temperature", (1 / inverse, 0)),
                ("calibrated", (1 / inverse, weight)),
            ):
                np.testing.assert_allclose(
                    found[form][position], probability_by_hand(row, influence, *choice), atol=1e-3
                )
    np.testing.assert_allclose(found["softmax"], softmax(data.logits), rtol=1e-12)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def test_the_table_names_all_forms_and_the_used_one() -> None:
    calibration = result()
    frame = calibration.frame
    assert list(frame.columns) == list(DESCRIPTIONS)
    assert list(frame["form"]) == ["softmax", "temperature", "calibrated"]
    assert list(frame["is_used"]) == [False, False, True]
    assert frame["accuracy"].nunique() == 1
    assert frame["nll"].is_monotonic_decreasing
    assert (frame["temperature"][0], frame["alpha"][0], frame["alpha"][1]) == (1, 0, 0)
    data = held_out().select(split_halves(400, 3)[0])
    out_of_fold = cross_validate(data, [added / MEAN_INFLUENCE for added in ADDED_PROBABILITIES], 0)
    for form, nll in zip(frame["form"], frame["nll"], strict=True):
        assert nll == pytest.approx(log_loss(data.labels, out_of_fold[form]), rel=1e-9)


def test_a_calibrated_model_keeps_its_softmax() -> None:
    calibration = result(count=120, sharpness=1.0, confused=0.0, seed=3)
    assert not calibration.has_gain
    assert (calibration.alpha, calibration.temperature) == (0, 1)
    assert "no gain: keep the softmax" in repr(calibration)
    assert calibration.headline.startswith("No gain: keep the softmax.")


@pytest.mark.parametrize(("gain", "form"), [(0.5, "calibrated"), (0.05, "softmax"), (-0.5, "softmax")])
def test_a_form_is_used_if_its_gain_is_larger_than_its_standard_error(gain: float, form: str) -> None:
    """Losses differ by ``gain +- 1`` on 100 examples: the standard error is 0.1."""
    change = gain + np.tile([1.0, -1.0], 50)
    labels = np.zeros(100, dtype=int)
    softmax = np.exp(-np.full(100, 4.0))[:, np.newaxis] * np.ones((1, 2))
    calibrated = np.exp(-4.0 + change)[:, np.newaxis] * np.ones((1, 2))
    assert choose_form({"softmax": softmax, "temperature": softmax, "calibrated": calibrated}, labels) == form


def test_a_label_of_probability_zero_is_a_large_finite_loss() -> None:
    certain, labels = np.eye(2)[[0] * 50], np.array([0, 1] * 25)
    assert choose_form({"softmax": certain, "temperature": np.full((50, 2), 0.5)}, labels) == "temperature"


def test_temperature_alone_is_used_if_alpha_does_not_help() -> None:
    calibration = result(count=2000, confused=0.0, sharpness=2.0, seed=3)
    assert calibration.alpha == 0
    assert calibration.temperature == pytest.approx(2, rel=0.15)
    assert calibration.form == "temperature"
    assert calibration.headline.endswith("Alpha is 0, because it does not improve the NLL by more than chance.")


def test_a_model_without_errors_keeps_its_softmax() -> None:
    labels = np.arange(100) % 4
    data = HeldOut(2 * np.eye(4)[labels], labels, np.ones(100))
    calibration = fit_calibration(data, data, fit_temperature(data.logits, labels), COUNT, MEAN_INFLUENCE, SETTINGS)
    assert (calibration.alpha, calibration.temperature) == (0, 1)
    assert "overconfidence cannot be measured" in calibration.headline


def test_influence_that_is_not_finite_is_refused() -> None:
    data = held_out(50)
    broken = HeldOut(data.logits, data.labels, np.full(50, np.inf))
    with pytest.raises(DataError, match="is NaN or infinite"):
        fit_calibration(data, broken, 1.0, COUNT, MEAN_INFLUENCE, SETTINGS)


@pytest.mark.parametrize("count", [40, 41, 1000])
def test_halves_are_disjoint_and_depend_on_the_seed(count: int) -> None:
    one, other = split_halves(count, 0)
    assert sorted([*one, *other]) == list(range(count))
    assert abs(len(one) - len(other)) <= 1
    assert np.array_equal(one, split_halves(count, 0)[0])
    assert not np.array_equal(one, split_halves(count, 1)[0])


@pytest.mark.parametrize("seed", [0, 7])
def test_the_halves_are_independent_of_a_permutation_with_the_same_seed(seed: int) -> None:
    """Examples that the user chooses with this seed, for instance to corrupt them, are in both halves."""
    chosen = np.random.default_rng(seed).permutation(1000)[:300]
    for half in split_halves(1000, seed):
        assert 0.4 < np.isin(chosen, half).mean() < 0.6


def test_sets_use_the_chosen_distribution_of_the_conformal_half() -> None:
    calibration = result()
    data = held_out().select(split_halves(400, 3)[1])
    rule, scores = calibration.set_rule, []
    for row, label, influence in zip(data.logits.tolist(), data.labels, data.expected.tolist(), strict=True):
        values = probability_by_hand(row, influence, calibration.temperature, calibration.alpha / COUNT)
        rank = 1 + sum(value > values[label] for value in values)
        mass = sum(value for value in values if value > values[label])
        scores.append(mass + rule.penalty * max(0, rank - rule.free_ranks))
    np.testing.assert_allclose(rule.scores, sorted(scores), rtol=1e-9, atol=1e-12)


# The result ----------------------------------------------------------------------------------------------------------


def test_the_repr_is_one_line_with_the_answer() -> None:
    calibration = result()
    text = repr(calibration)
    assert "\n" not in text
    assert len(text) < 120
    assert f"temperature {calibration.temperature:.3g}, alpha {calibration.alpha:.3g}, NLL" in text
    assert "NLL" in calibration.headline
    assert ("Alpha is 0" in calibration.headline) == (calibration.form == "temperature")
    page = calibration._repr_html_()
    assert len(page) < 3000
    assert "<table" in page


def test_table_and_plot(tmp_path: Any) -> None:
    calibration = result()
    calibration.to_csv(tmp_path / "calibration.csv")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "calibration.csv"), calibration.frame)
    labels = [text.get_text() for text in calibration.plot().axes[0].get_legend().get_texts()]
    assert [text.split(":")[0] for text in labels] == ["perfect", "softmax", "temperature", "calibrated"]


@pytest.mark.parametrize("options", [{}, {"count": 120, "sharpness": 1.0, "confused": 0.0, "seed": 3}])
def test_json_restores_everything(options: dict[str, Any]) -> None:
    calibration = result(**options)
    restored = Calibration.from_json(json.loads(json.dumps(calibration.to_json())))
    assert repr(restored) == repr(calibration)
    assert (restored.alpha, restored.temperature) == (calibration.alpha, calibration.temperature)
    pd.testing.assert_frame_equal(restored.frame, calibration.frame, check_exact=True)
    assert np.array_equal(restored.set_rule.scores, calibration.set_rule.scores)
    assert restored.set_rule.free_ranks == calibration.set_rule.free_ranks
    assert restored.set_rule.penalty == calibration.set_rule.penalty
    assert restored.settings == calibration.settings
    for form, curve in calibration.curves.items():
        for field in dataclasses.fields(curve):
            assert np.array_equal(getattr(restored.curves[form], field.name), getattr(curve, field.name))


DAMAGE: dict[str, Any] = {
    "alpha": [-1.0, None, "1", math.nan, math.inf, 3.0, True],
    "temperature": [0.0, -1.0, None, 77.0],
    "rows": [None, [], [[1]], [["softmax"]] * 3, "abc", 5],
    "curves": [None, {}, {"softmax": []}, 3],
    "scores": [None, [], [1.0, 0.0], [-1.0], [math.nan], ["a"], [[0.0]], "0"],
    "penalty": [-0.1, None, math.inf],
    "free_ranks": [0, -1, 1.5, None, True],
    "settings": [None, [], {}, {"tuning_examples": "many"}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in DAMAGE.items() for value in values])
def test_damaged_json_is_refused(name: str, value: Any) -> None:
    data = json.loads(json.dumps(result().to_json()))
    for damaged in ({**data, name: value}, {key: data[key] for key in data if key != name}):
        with pytest.raises((AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError)):
            Calibration.from_json(damaged)


@pytest.mark.parametrize("data", [None, [], "calibration", 1])
def test_other_json_is_refused(data: Any) -> None:
    with pytest.raises(TypeError, match="the calibration is a"):
        Calibration.from_json(data)


def test_settings_of_another_fit_are_refused_by_name() -> None:
    calibration = result()
    calibration.check_fit({"beta": 1.0, "model": "m"})
    with pytest.raises(SettingError, match=r"another model or fit: beta 1\.0, not 0\.5, fit 'f', not 'g'"):
        calibration.check_fit({"beta": 0.5, "fit": "g", "model": "m"})
