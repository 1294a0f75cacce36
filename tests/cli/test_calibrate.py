"""`ifcomp calibrate` chooses what the library chooses, and `ifcomp predict` uses it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from workshop import Workshop, ifcomp

from ifcomp import IFComp
from ifcomp.tasks.calibration import calibration_summary
from ifcomp.tuning import tune

BETAS = ["--betas", "0.5,2"]


def facts(*arguments: str) -> dict[str, Any]:
    found = ifcomp(*arguments, "--json")
    assert found.exit_code == 0, found.output
    content: dict[str, Any] = json.loads(found.stdout)
    return content


def test_the_choice_is_that_of_the_library(run: Workshop) -> None:
    content = facts("calibrate", "run.ifcomp", "npz:valid.npz", *BETAS, "--figure", "r.svg")
    assert content["written"] == ["calibrated.ifcomp", "calibrated.ifcomp.json", "r.svg"]
    assert Path("r.svg").read_text().startswith("<?xml")
    train, valid = [run.arrays("train")], [run.arrays("valid")]
    expected = tune(run.network(), train, valid, betas=[0.5, 2.0])
    assert (content["beta"], content["alpha"]) == (expected.beta, expected.alpha)
    assert content["held_out"]["calibrated"]["nll"] == pytest.approx(expected.nll, rel=1e-4)
    assert content["held_out"]["model"]["nll"] == pytest.approx(expected.base_nll, rel=1e-4)
    logits = run.network()(run.arrays("valid")[0]).detach()
    temperature = min(
        float(torch.nn.functional.cross_entropy(beta * logits, run.arrays("valid")[1])) for beta in (0.5, 1.0, 2.0)
    )
    assert content["held_out"]["temperature"]["nll"] == pytest.approx(temperature, rel=1e-4)
    assert IFComp.load("calibrated.ifcomp", run.network()).beta == expected.beta
    record = json.loads(Path("calibrated.ifcomp.json").read_text())
    assert (record["alpha"], record["data"], record["model"]) == (expected.alpha, "npz:train.npz", run.model)


def test_settings_of_the_run_and_of_the_search(workshop: Workshop) -> None:
    given = ["--fisher", "sampled", "--label-samples", "4", "--seed", "3", "--layers", "last", "--damping", "0.01"]
    assert ifcomp(*workshop.fit_arguments(), *given, "--batch-size", "64").exit_code == 0
    search = ["--objective", "ece", "--keep-argmax", "--shifted", "npz:more.npz", "--out", "c.ifcomp"]
    x, y = workshop.arrays("valid")
    np.savez("more.npz", x=np.roll(x.numpy(), 1, 3), y=y.numpy())
    content = facts("calibrate", "run.ifcomp", "npz:valid.npz", *BETAS, *search)
    loaded = IFComp.load("c.ifcomp", workshop.network())
    assert (loaded.settings.fisher, loaded.settings.label_samples, loaded.settings.seed) == ("sampled", 4, 3)
    assert (loaded.damping, loaded.coverage.covered) == (0.01, 130)
    assert (content["objective"], content["keep_argmax"]) == ("ece", True)
    record = json.loads(Path("c.ifcomp.json").read_text())
    assert (record["keep_argmax"], record["options"]) == (True, {"batch_size": 64})
    expected = tune(
        workshop.network(),
        [workshop.arrays("train")],
        [(x, y)],
        shifted=[(torch.tensor(np.roll(x.numpy(), 1, 3)), y)],
        betas=[0.5, 2.0],
        objective="ece",
        keep_argmax=True,
        fisher="sampled",
        label_samples=4,
        seed=3,
        layers="last",
        damping=0.01,
    )
    assert (content["beta"], content["alpha"]) == (expected.beta, expected.alpha)


def test_predictions_are_those_of_the_library(run: Workshop) -> None:
    given = ["--alpha", "0.3", "--out", "p.csv", "--batch-size", "31"]
    content = facts("predict", "run.ifcomp", "npz:valid.npz", *given)
    x, y = run.arrays("valid")
    ifc = IFComp.load("run.ifcomp", run.network())
    expected = ifc.predict_proba(x, 0.3)
    found = pd.read_csv("p.csv")
    np.testing.assert_allclose(found[[f"p_{label}" for label in range(10)]], expected, rtol=1e-4, atol=1e-9)
    assert found["prediction"].tolist() == expected.argmax(1).tolist()
    np.testing.assert_allclose(found["confidence"], expected.amax(1), rtol=1e-4)
    own = run.network()(x).softmax(1).detach()
    assert found["model_prediction"].tolist() == own.argmax(1).tolist()
    np.testing.assert_allclose(found["model_confidence"], own.amax(1), rtol=1e-4)
    assert content["metrics"]["calibrated"] == pytest.approx(calibration_summary(expected, y), rel=1e-3)
    assert content["metrics"]["model"] == pytest.approx(calibration_summary(own, y), rel=1e-3)
    assert content["changed"] == int((expected.argmax(1) != own.argmax(1)).sum())


def test_predictions_use_what_was_calibrated(run: Workshop) -> None:
    chosen = facts("calibrate", "run.ifcomp", "npz:valid.npz", *BETAS, "--keep-argmax")
    content = facts("predict", "calibrated.ifcomp", "npz:strange.npz", "--no-labels")
    assert (content["alpha"], content["keep_argmax"]) == (chosen["alpha"], True)
    assert (content["metrics"], content["changed"]) == (None, 0)
    found = pd.read_parquet("predictions.parquet")
    ifc = IFComp.load("calibrated.ifcomp", run.network())
    expected = ifc.predict_proba(run.arrays("strange")[0], chosen["alpha"], keep_argmax=True)
    np.testing.assert_allclose(found[[f"p_{label}" for label in range(10)]], expected, rtol=1e-4, atol=1e-9)
    free = facts("predict", "calibrated.ifcomp", "npz:valid.npz", "--free-argmax", "--alpha", "5")
    assert (free["alpha"], free["keep_argmax"]) == (5, False)


def test_words(run: Workshop) -> None:
    found = ifcomp("calibrate", "run.ifcomp", "npz:valid.npz", *BETAS)
    words = " ".join(found.stdout.split())
    assert "on npz:valid.npz. NLL in nats" in words
    assert "Next ifcomp predict calibrated.ifcomp DATA" in words
    words = " ".join(ifcomp("predict", "calibrated.ifcomp", "npz:valid.npz").stdout.split())
    assert "Predicted 100 inputs of npz:valid.npz with alpha" in words
    assert "smaller is better" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calibrate", "run.ifcomp", "npz:train.npz"], "The model was trained on 'npz:train.npz'"),
        (["calibrate", "run.ifcomp", "npz:bare.npz"], "has no labels"),
        (["calibrate", "run.ifcomp", "npz:valid.npz", "--shifted", "npz:bare.npz"], "has no labels"),
        (["calibrate", "run.ifcomp", "npz:valid.npz", "--figure", "r.txt"], "must end in .svg or .png or .pdf"),
        (["calibrate", "run.ifcomp", "npz:valid.npz", "--out", "gone/c"], "there is no folder 'gone'"),
        (["calibrate", "run.ifcomp", "npz:valid.npz", "--betas", "-1"], "betas"),
        (["calibrate", "run.ifcomp", "npz:valid.npz", "--betas", "x"], "--betas takes numbers"),
        (["calibrate", "run.ifcomp"], "DATA"),
        (["predict", "run.ifcomp", "npz:valid.npz"], "'run.ifcomp' is not calibrated. Use the run that"),
        (["predict", "run.ifcomp", "npz:valid.npz", "--alpha", "inf"], "alpha must be a finite number"),
        (["predict", "run.ifcomp", "npz:strange.npz", "--alpha", "1"], "label 99"),
        (["predict", "run.ifcomp", "npz:valid.npz", "--alpha", "1", "--out", "p.txt"], "must end in .csv or .parquet"),
    ],
)
def test_bad_input_ends_with_2_and_writes_nothing(run: Workshop, arguments: list[str], words: str) -> None:
    np.savez("bare.npz", x=run.arrays("valid")[0].numpy())
    before = {path.name for path in Path().iterdir()}
    found = ifcomp(*arguments)
    assert found.exit_code == 2, found.output
    assert words in " ".join(found.stderr.replace("│", " ").split())
    assert found.stdout == ""
    assert {path.name for path in Path().iterdir()} == before
