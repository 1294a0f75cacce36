"""`ifcomp ood` flags inputs by the detector of the library and stores it in the run."""

import pandas as pd
import pytest
import torch
from project import Project, check_refused, ifcomp, run_json, run_text

from ifcomp import IFComp
from ifcomp.tasks.metrics import auroc

pytestmark = pytest.mark.filterwarnings("ignore:.* held-out examples are few")

ARGUMENTS = ("ood", "run.ifcomp", "npz:inverted.npz", "--held-out", "npz:valid.npz")
MEMBERS = ["complexity", "energy", "neighbours"]


def test_table_and_json(run: Project) -> None:
    content = run_json(*ARGUMENTS, "--tpr", "0.9")
    gate = IFComp.load("run.ifcomp", run.network()).ood_detector([run.arrays("valid")[0]], 0.9)
    scores = gate.score(run.arrays("inverted")[0])
    assert content["threshold"] == pytest.approx(gate.threshold, rel=1e-3)
    assert (content["score"], content["tpr"], content["examples"]) == (MEMBERS, 0.9, 100)
    flags = pd.read_csv("ood.csv")
    assert flags["score"].is_monotonic_decreasing
    assert flags.sort_values("index")["score"].tolist() == pytest.approx(scores.tolist(), rel=1e-3)
    assert content["flagged"] == int((scores > gate.threshold).sum()) == flags["is_ood"].sum()
    assert content["flagged"] > 50
    assert content["comparison"] is None


def test_the_run_keeps_the_detector(run: Project) -> None:
    result = ifcomp("ood", "run.ifcomp", "npz:inverted.npz")
    assert result.exit_code == 2
    assert "has no detector yet" in " ".join(result.stderr.split())
    made = run_json(*ARGUMENTS, "--score", "energy,complexity")
    kept = run_json("ood", "run.ifcomp", "npz:inverted.npz")
    assert made["score"] == kept["score"] == ["complexity", "energy"]
    assert (made["threshold"], made["flagged"]) == (kept["threshold"], kept["flagged"])
    detector = IFComp.load("run.ifcomp", run.network()).detector
    assert detector is not None
    assert detector.threshold == made["threshold"]


def test_known_ood_inputs_are_compared_with_simple_scores(run: Project) -> None:
    arguments = ("ood", "run.ifcomp", "npz:valid.npz", "--held-out", "npz:unlabelled.npz", "--ood", "npz:inverted.npz")
    content = run_json(*arguments)
    rows = {row["score"]: row["auroc"] for row in content["comparison"]}
    assert list(rows) == ["joined", *MEMBERS, "max softmax"]
    logits = [run.network()(run.arrays(name)[0]).detach() for name in ("valid", "inverted")]
    is_ood = torch.arange(200) >= 100
    expected = auroc(-torch.cat(logits).softmax(1).amax(1).double(), is_ood)
    assert rows["max softmax"] == pytest.approx(expected, abs=1e-3)
    assert rows["energy"] == pytest.approx(auroc(-torch.cat(logits).logsumexp(1).double(), is_ood), abs=1e-3)
    assert rows[content["best"]] == max(rows.values())
    text = run_text(*arguments)
    assert f"The best score is {content['best']}." in text
    assert "score='" not in text
    assert "FPR at 95 % TPR" in text


def test_gate(run: Project) -> None:
    content = run_json(*ARGUMENTS, "--max-flagged", "5", code=3)
    reason = f"Exit code 3: {content['flagged']} flagged inputs, but --max-flagged allows 5."
    assert (content["max_flagged"], content["exit_reason"]) == (5, reason)
    result = ifcomp(*ARGUMENTS, "--max-flagged", "5", "--quiet")
    assert reason in " ".join(result.stdout.split())
    assert run_json(*ARGUMENTS, "--max-flagged", "100")["exit_reason"] is None


def test_text(run: Project) -> None:
    text = run_text(*ARGUMENTS)
    assert "of 100 inputs are flagged: their score, complexity + energy + neighbours, is above" in text
    assert "confidence" in text
    assert "confidence" not in run_text(*ARGUMENTS, "--top", "0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "DATA"),
        (["npz:inverted.npz", "--held-out", "npz:valid.npz", "--tpr", "0"], "tpr must be in (0, 1]"),
        (["npz:inverted.npz", "--held-out", "npz:valid.npz", "--score", "loss"], "score must be one or several of"),
        (["npz:inverted.npz", "--score", "energy"], "define a new detector"),
        (["npz:inverted.npz", "--tpr", "0.9"], "define a new detector"),
        (["npz:inverted.npz", "--held-out", "npz:train.npz"], "The model was trained on 'npz:train.npz'"),
        (["npz:gone.npz"], "no file 'gone.npz'"),
        (["npz:inverted.npz", "--held-out", "npz:gone.npz"], "no file 'gone.npz'"),
        (["npz:flat.npz"], "fails on the first examples of 'npz:flat.npz'"),
        (["npz:inverted.npz", "--held-out", "npz:flat.npz"], "fails on the first examples"),
    ],
)
def test_invalid_arguments(run: Project, arguments: list[str], message: str) -> None:
    check_refused("ood", "run.ifcomp", *arguments, message=message)
