"""`ifcomp calibrate` chooses what the library chooses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from project import Project, check_refused, ifcomp, run_json, run_text

from ifcomp import IFComp
from ifcomp.tuning import tune

BETAS = ["--betas", "0.5,2"]


def test_choice_and_record(run: Project) -> None:
    content = run_json("calibrate", "run.ifcomp", "npz:valid.npz", *BETAS, "--figure", "r.svg")
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


def test_settings_of_the_run_and_of_the_search(project: Project) -> None:
    fit_options = ["--fisher", "sampled", "--label-samples", "4", "--seed", "3", "--layers", "last"]
    fit_options += ["--damping", "0.01", "--batch-size", "64"]
    assert ifcomp(*project.fit_arguments(), *fit_options).exit_code == 0
    search = ["--objective", "ece", "--keep-argmax", "--shifted", "npz:shifted.npz", "--out", "c.ifcomp"]
    x, y = project.arrays("valid")
    np.savez("shifted.npz", x=np.roll(x.numpy(), 1, 3), y=y.numpy())
    content = run_json("calibrate", "run.ifcomp", "npz:valid.npz", *BETAS, *search)
    loaded = IFComp.load("c.ifcomp", project.network())
    assert (loaded.settings.fisher, loaded.settings.label_samples, loaded.settings.seed) == ("sampled", 4, 3)
    assert (loaded.damping, loaded.coverage.covered) == (0.01, 130)
    assert (content["objective"], content["keep_argmax"]) == ("ece", True)
    record = json.loads(Path("c.ifcomp.json").read_text())
    assert (record["keep_argmax"], record["options"]) == (True, {"batch_size": 64})
    expected = tune(
        project.network(),
        [project.arrays("train")],
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


def test_text(run: Project) -> None:
    text = run_text("calibrate", "run.ifcomp", "npz:valid.npz", *BETAS)
    assert "on npz:valid.npz. NLL is in nats" in text
    assert "Next ifcomp predict calibrated.ifcomp DATA" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "DATA"),
        (["npz:train.npz"], "The model was trained on 'npz:train.npz'"),
        (["npz:unlabelled.npz"], "has no labels"),
        (["npz:valid.npz", "--shifted", "npz:unlabelled.npz"], "has no labels"),
        (["npz:valid.npz", "--figure", "r.txt"], "must end in .svg or .png or .pdf"),
        (["npz:valid.npz", "--out", "gone/c"], "there is no folder 'gone'"),
        (["npz:valid.npz", "--betas", "-1"], "betas"),
        (["npz:valid.npz", "--betas", "x"], "--betas takes numbers"),
    ],
)
def test_invalid_arguments(run: Project, arguments: list[str], message: str) -> None:
    check_refused("calibrate", "run.ifcomp", *arguments, message=message)
