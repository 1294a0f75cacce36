"""`ifcomp score` writes the scores of the library."""

import numpy as np
import pandas as pd
import pytest
from project import Project, check_refused, ifcomp, run_json

from ifcomp import IFComp, Relative


def test_scores_of_the_training_data(run: Project) -> None:
    content = run_json("score", "run.ifcomp", "--batch-size", "37")
    assert (content["examples"], content["data"], content["written"]) == (200, "npz:train.npz", ["scores.csv"])
    assert content["settings"]["seen"] is True
    expected = IFComp.load("run.ifcomp", run.network()).score([run.arrays("train")])
    scores = pd.read_csv("scores.csv")
    pd.testing.assert_frame_equal(scores, expected.frame, rtol=1e-4, atol=1e-8)
    assert content["summary"]["bounded_complexity"]["largest"] == pytest.approx(scores["bounded_complexity"].max())
    assert content["summary"]["error"]["median"] == pytest.approx(scores["error"].median())


def test_other_data_is_unseen(run: Project) -> None:
    options = ["--alpha", "0.5", "--damping", "relative:0.01", "--linearized", "--out", "s.csv"]
    content = run_json("score", "run.ifcomp", "npz:valid.npz", *options)
    assert content["settings"]["seen"] is False
    expected = IFComp.load("run.ifcomp", run.network()).score(
        [run.arrays("valid")], seen=False, alpha=0.5, damping=Relative(0.01), linearized=True
    )
    pd.testing.assert_frame_equal(pd.read_csv("s.csv"), expected.frame, rtol=1e-4, atol=1e-8)
    assert run_json("score", "run.ifcomp", "npz:valid.npz", "--seen")["settings"]["seen"] is True
    assert run_json("score", "run.ifcomp", "npz:train.npz")["settings"]["seen"] is True


def test_probes(run: Project) -> None:
    content = run_json("score", "run.ifcomp", "--probes", "10")
    scores = pd.read_csv("scores.csv")
    assert "regret" not in scores
    expected = IFComp.load("run.ifcomp", run.network()).score([run.arrays("train")]).frame
    np.testing.assert_allclose(scores["expected_influence"], expected["expected_influence"], rtol=1e-3)
    assert content["settings"]["probes"] == 10
    result = ifcomp("score", "run.ifcomp", "npz:valid.npz", "--probes", "2")
    assert result.exit_code == 2
    assert "probes= does not compute it" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "scores.txt"], "must end in .csv or .parquet"),
        (["--out", "gone/scores.csv"], "there is no folder 'gone'"),
        (["--alpha", "-1"], "--alpha"),
        (["--alpha", "inf"], "alpha must be a finite number"),
        (["--probes", "0"], "--probes"),
        (["npz:inverted.npz"], "label 99"),
    ],
)
def test_invalid_arguments(run: Project, arguments: list[str], message: str) -> None:
    check_refused("score", "run.ifcomp", *arguments, message=message)
