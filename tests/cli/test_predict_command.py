"""`ifcomp predict` writes the probabilities of the library."""

import numpy as np
import pandas as pd
import pytest
from project import Project, check_refused, ifcomp, run_json, run_text

from ifcomp import IFComp
from ifcomp.tasks.calibration import calibration_summary

PROBABILITIES = [f"p_{label}" for label in range(10)]

pytestmark = pytest.mark.filterwarnings("ignore:100 held-out examples are few")


def test_table_and_metrics(run: Project) -> None:
    options = ["--alpha", "0.3", "--free-argmax", "--out", "p.csv", "--batch-size", "31"]
    content = run_json("predict", "run.ifcomp", "npz:valid.npz", *options)
    x, y = run.arrays("valid")
    expected = IFComp.load("run.ifcomp", run.network()).predict_proba(x, 0.3, keep_argmax=False)
    table = pd.read_csv("p.csv")
    np.testing.assert_allclose(table[PROBABILITIES], expected, rtol=1e-4, atol=1e-9)
    assert table["prediction"].tolist() == expected.argmax(1).tolist()
    np.testing.assert_allclose(table["confidence"], expected.amax(1), rtol=1e-4)
    softmax = run.network()(x).softmax(1).detach()
    assert table["model_prediction"].tolist() == softmax.argmax(1).tolist()
    np.testing.assert_allclose(table["model_confidence"], softmax.amax(1), rtol=1e-4)
    assert content["metrics"]["calibrated"] == pytest.approx(calibration_summary(expected, y), rel=1e-3)
    assert content["metrics"]["model"] == pytest.approx(calibration_summary(softmax, y), rel=1e-3)
    assert content["changed"] == int((expected.argmax(1) != softmax.argmax(1)).sum())


def test_calibrated_run(run: Project) -> None:
    chosen = run_json("calibrate", "run.ifcomp", "npz:valid.npz")
    content = run_json("predict", "run.ifcomp", "npz:inverted.npz", "--no-labels")
    assert content["is_calibrated"]
    assert (content["metrics"], content["changed"], content["covered"]) == (None, 0, None)
    table = pd.read_csv("predictions.csv")
    ifc = IFComp.load("run.ifcomp", run.network())
    assert ifc.calibration is not None
    assert ifc.calibration.temperature == chosen["temperature"]
    expected = ifc.predict_proba(run.arrays("inverted")[0])
    np.testing.assert_allclose(table[PROBABILITIES], expected, rtol=1e-4, atol=1e-9)
    content = run_json("predict", "run.ifcomp", "npz:valid.npz", "--free-argmax", "--alpha", "5")
    assert (content["alpha"], content["is_calibrated"]) == (5, False)


def test_prediction_sets(run: Project) -> None:
    run_json("calibrate", "run.ifcomp", "npz:valid.npz")
    content = run_json("predict", "run.ifcomp", "npz:valid.npz", "--coverage", "0.9", "--batch-size", "33")
    x, y = run.arrays("valid")
    sets = IFComp.load("run.ifcomp", run.network()).predict_set(x, coverage=0.9)
    table = pd.read_csv("predictions.csv", dtype={"prediction_set": str})
    assert table["set_size"].tolist() == sets.sum(1).tolist()
    expected = ["; ".join(f"digit {label}" for label in row.nonzero().flatten().tolist()) for row in sets]
    assert table["prediction_set"].tolist() == expected
    assert content["mean_set_size"] == pytest.approx(float(sets.sum(1).double().mean()))
    assert content["covered"] == pytest.approx(float(sets[range(100), y].double().mean()))
    text = run_text("predict", "run.ifcomp", "npz:valid.npz", "--coverage", "0.9")
    assert "Prediction sets with coverage 0.9 have" in text
    assert "not guaranteed under shift" in text
    assert table["prediction_name"].tolist() == [f"digit {label}" for label in table["prediction"]]


@pytest.mark.filterwarnings("default:Coverage 0.999")
def test_a_coverage_that_needs_more_conformal_examples_is_noticed(run: Project) -> None:
    run_json("calibrate", "run.ifcomp", "npz:valid.npz")
    result = ifcomp("predict", "run.ifcomp", "npz:valid.npz", "--coverage", "0.999")
    assert result.exit_code == 0
    assert "Coverage 0.999 needs more than 50 conformal examples, so every set has all labels." in result.stderr


def test_the_next_steps_are_those_that_are_missing(run: Project) -> None:
    text = run_text("predict", "run.ifcomp", "npz:valid.npz")
    assert "ifcomp calibrate run.ifcomp DATA" in text
    assert "ifcomp ood run.ifcomp npz:valid.npz --held-out DATA" in text
    run_json("calibrate", "run.ifcomp", "npz:valid.npz")
    run_json("ood", "run.ifcomp", "npz:inverted.npz", "--held-out", "npz:valid.npz")
    text = run_text("predict", "run.ifcomp", "npz:valid.npz")
    assert "ifcomp calibrate" not in text
    assert "ifcomp ood run.ifcomp npz:valid.npz find" in text


def test_a_run_without_calibration_uses_the_default(run: Project) -> None:
    content = run_json("predict", "run.ifcomp", "npz:valid.npz")
    assert not content["is_calibrated"]
    expected = IFComp.load("run.ifcomp", run.network()).predict_proba(run.arrays("valid")[0])
    np.testing.assert_allclose(pd.read_csv("predictions.csv")[PROBABILITIES], expected, rtol=1e-4, atol=1e-9)


def test_text(run: Project) -> None:
    text = run_text("predict", "run.ifcomp", "npz:valid.npz", "--alpha", "0.3")
    assert "Predicted 100 inputs of npz:valid.npz with alpha 0.3" in text
    assert "Smaller NLL, ECE and Brier score are better" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["npz:valid.npz", "--coverage", "0.9"], "--coverage needs a calibration: call 'ifcomp calibrate run.ifcomp"),
        (["npz:valid.npz", "--coverage", "1.5"], "--coverage must be between 0 and 1"),
        (["npz:valid.npz", "--coverage", "0.9", "--alpha", "1"], "Leave --alpha out"),
        (["npz:valid.npz", "--alpha", "inf"], "alpha must be a finite number"),
        (["npz:inverted.npz", "--alpha", "1"], "label 99"),
        (["npz:valid.npz", "--alpha", "1", "--out", "p.txt"], "must end in .csv or .parquet"),
    ],
)
def test_invalid_arguments(run: Project, arguments: list[str], message: str) -> None:
    check_refused("predict", "run.ifcomp", *arguments, message=message)
