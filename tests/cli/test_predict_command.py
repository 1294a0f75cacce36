"""`ifcomp predict` writes the probabilities of the library."""

import numpy as np
import pandas as pd
import pytest
from project import Project, check_refused, run_json, run_text

from ifcomp import IFComp
from ifcomp.tasks.calibration import calibration_summary

PROBABILITIES = [f"p_{label}" for label in range(10)]


def test_table_and_metrics(run: Project) -> None:
    options = ["--alpha", "0.3", "--out", "p.csv", "--batch-size", "31"]
    content = run_json("predict", "run.ifcomp", "npz:valid.npz", *options)
    x, y = run.arrays("valid")
    expected = IFComp.load("run.ifcomp", run.network()).predict_proba(x, 0.3)
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
    chosen = run_json("calibrate", "run.ifcomp", "npz:valid.npz", "--betas", "0.5,2", "--keep-argmax")
    content = run_json("predict", "calibrated.ifcomp", "npz:inverted.npz", "--no-labels")
    assert (content["alpha"], content["keep_argmax"]) == (chosen["alpha"], True)
    assert (content["metrics"], content["changed"]) == (None, 0)
    table = pd.read_csv("predictions.csv")
    ifc = IFComp.load("calibrated.ifcomp", run.network())
    expected = ifc.predict_proba(run.arrays("inverted")[0], chosen["alpha"], keep_argmax=True)
    np.testing.assert_allclose(table[PROBABILITIES], expected, rtol=1e-4, atol=1e-9)
    content = run_json("predict", "calibrated.ifcomp", "npz:valid.npz", "--free-argmax", "--alpha", "5")
    assert (content["alpha"], content["keep_argmax"]) == (5, False)


def test_text(run: Project) -> None:
    text = run_text("predict", "run.ifcomp", "npz:valid.npz", "--alpha", "0.3")
    assert "Predicted 100 inputs of npz:valid.npz with alpha 0.3" in text
    assert "Smaller NLL, ECE and Brier score are better" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["npz:valid.npz"], "'run.ifcomp' is not calibrated. Use the run that"),
        (["npz:valid.npz", "--alpha", "inf"], "alpha must be a finite number"),
        (["npz:inverted.npz", "--alpha", "1"], "label 99"),
        (["npz:valid.npz", "--alpha", "1", "--out", "p.txt"], "must end in .csv or .parquet"),
    ],
)
def test_invalid_arguments(run: Project, arguments: list[str], message: str) -> None:
    check_refused("predict", "run.ifcomp", *arguments, message=message)
