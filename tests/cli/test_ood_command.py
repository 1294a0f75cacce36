"""`ifcomp ood` flags inputs by the scores of the library."""

import numpy as np
import pandas as pd
import pytest
import torch
from project import Project, check_refused, ifcomp, run_json, run_text

from ifcomp import IFComp
from ifcomp.tasks.metrics import auroc
from ifcomp.tasks.ood import OOD_DAMPING

ARGUMENTS = ("ood", "run.ifcomp", "npz:inverted.npz", "--reference", "npz:valid.npz")


def test_table_and_json(run: Project) -> None:
    content = run_json(*ARGUMENTS, "--tpr", "0.9")
    ifc = IFComp.load("run.ifcomp", run.network())
    reference, inverted = (
        ifc.bounded_complexity(run.arrays(name)[0], damping=OOD_DAMPING) for name in ("valid", "inverted")
    )
    assert content["threshold"] == pytest.approx(float(reference.sort().values[89]), rel=1e-3)
    flags = pd.read_csv("ood.csv")
    assert flags["index"].tolist() == inverted.argsort(descending=True).tolist()
    assert content["flagged"] == int((inverted > content["threshold"]).sum()) == flags["is_ood"].sum()
    assert content["flagged"] > 50
    is_ood = torch.arange(200) >= 100
    assert content["separation"]["auroc"] == pytest.approx(auroc(torch.cat([reference, inverted]), is_ood), abs=1e-3)


def test_gate(run: Project) -> None:
    assert run_json("ood", "run.ifcomp", "npz:inverted.npz", "--max-flagged", "5", code=3)["max_flagged"] == 5


def test_other_scores(run: Project) -> None:
    assert run_json(*ARGUMENTS)["score"] == "bounded_complexity"
    assert "are flagged: bounded complexity above" in run_text(*ARGUMENTS)
    content = run_json(*ARGUMENTS, "--capped", "0.3")
    expected = IFComp.load("run.ifcomp", run.network()).parametric_complexity(
        run.arrays("inverted")[0], alpha=0.3, capped=True, damping=OOD_DAMPING
    )
    flags = pd.read_csv("ood.csv").sort_values("index")
    np.testing.assert_allclose(flags["parametric_complexity"], expected, rtol=1e-3)
    assert content["score"] == "parametric_complexity"
    assert content["flagged"] == int((flags["parametric_complexity"] > content["threshold"]).sum())
    assert run_json(*ARGUMENTS, "--probes", "2")["score"] == "parametric_complexity"
    result = ifcomp(*ARGUMENTS, "--capped", "0.3", "--probes", "2")
    assert result.exit_code == 2
    assert "needs the hindsight probability of every label" in result.stderr


def test_text(run: Project) -> None:
    text = run_text("ood", "run.ifcomp", "npz:inverted.npz", "--probes", "2")
    assert "of 100 inputs of npz:inverted.npz are flagged" in text
    assert "held-out data is a better --reference" in text
    assert "held-out" not in run_text(*ARGUMENTS)
    assert "confidence" not in run_text(*ARGUMENTS, "--top", "0")


def test_another_beta_is_suggested_if_the_inputs_are_alike(run: Project) -> None:
    text = run_text("ood", "run.ifcomp", "npz:valid.npz", "--reference", "npz:inverted.npz")
    assert "compare a fit with another --beta, such as 0.1" in text
    assert "--beta" not in run_text(*ARGUMENTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "DATA"),
        (["npz:inverted.npz", "--tpr", "0"], "tpr must be in (0, 1]"),
        (["npz:gone.npz"], "no file 'gone.npz'"),
        (["npz:inverted.npz", "--reference", "npz:gone.npz"], "no file 'gone.npz'"),
        (["npz:flat.npz"], "fails on the first examples of 'npz:flat.npz'"),
        (["npz:inverted.npz", "--reference", "npz:flat.npz"], "fails on the first examples"),
    ],
)
def test_invalid_arguments(run: Project, arguments: list[str], message: str) -> None:
    check_refused("ood", "run.ifcomp", *arguments, message=message)
