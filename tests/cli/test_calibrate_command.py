"""`ifcomp calibrate` stores in the run what the library chooses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from project import Project, check_refused, ifcomp, run_json, run_text, stored_record

from ifcomp import IFComp

pytestmark = pytest.mark.filterwarnings("ignore:100 held-out examples are few")


def test_the_run_contains_the_calibration(run: Project) -> None:
    record = stored_record()
    expected = IFComp.load("run.ifcomp", run.network())
    calibration = expected.calibrate([run.arrays("valid")])
    content = run_json("calibrate", "run.ifcomp", "npz:valid.npz", "--figure", "r.svg")
    assert content["written"] == ["run.ifcomp", "r.svg"]
    assert Path("r.svg").read_text().startswith("<?xml")
    assert stored_record() == record
    assert content["alpha"] == pytest.approx(calibration.alpha, rel=1e-6)
    assert content["temperature"] == pytest.approx(calibration.temperature, rel=1e-4)
    assert content["has_gain"] == calibration.has_gain
    for row in calibration.frame.to_dict("records"):
        assert content["metrics"][row["form"]]["nll"] == pytest.approx(row["nll"], rel=1e-4)
    loaded = IFComp.load("run.ifcomp", run.network()).calibration
    assert loaded is not None
    assert (loaded.alpha, loaded.temperature) == (content["alpha"], content["temperature"])


def test_settings_of_the_run_are_kept(project: Project) -> None:
    fit_options = ["--fisher", "sampled", "--label-samples", "4", "--seed", "3", "--layers", "last"]
    fit_options += ["--damping", "0.01", "--batch-size", "64"]
    assert ifcomp(*project.fit_arguments(), *fit_options).exit_code == 0
    before = IFComp.load("run.ifcomp", project.network())
    x, y = project.arrays("valid")
    np.savez("shifted.npz", x=np.roll(x.numpy(), 1, 3), y=y.numpy())
    content = run_json("calibrate", "run.ifcomp", "npz:valid.npz", "--shifted", "npz:shifted.npz")
    after = IFComp.load("run.ifcomp", project.network())
    assert (after.settings, after.damping) == (before.settings, before.damping)
    assert torch.equal(after.influence(x[:5]), before.influence(x[:5]))
    assert content["settings"]["shifted_examples"] == 100
    assert content["settings"]["tuning_examples"] == 150
    assert content["temperature"] > 1


def test_text(run: Project) -> None:
    text = run_text("calibrate", "run.ifcomp", "npz:valid.npz")
    assert "held-out examples" in text
    assert "NLL is in nats" in text
    assert "Next ifcomp predict run.ifcomp DATA" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "HELD_OUT"),
        (["npz:train.npz"], "The model was trained on 'npz:train.npz'"),
        (["npz:unlabelled.npz"], "has no labels"),
        (["npz:valid.npz", "--shifted", "npz:unlabelled.npz"], "has no labels"),
        (["npz:valid.npz", "--figure", "r.txt"], "must end in .svg or .png or .pdf"),
    ],
)
def test_invalid_arguments(run: Project, arguments: list[str], message: str) -> None:
    before = Path("run.ifcomp").read_bytes()
    check_refused("calibrate", "run.ifcomp", *arguments, message=message)
    assert Path("run.ifcomp").read_bytes() == before
