"""The experiment that chose the score of strange inputs: one table of it, and the page of the committed results."""

import json

import numpy as np
import pytest

from experiments.ood_defaults import run
from experiments.ood_defaults.situations import digits, table, texts
from ifcomp.complexity import TYPICAL_COMPLEXITY
from ifcomp.tasks.ood import OOD_COLUMN

DEFAULT = f"bounded {TYPICAL_COMPLEXITY}"


def test_a_table() -> None:
    found = run.unit(table, ("iris", 0))["auroc"]
    assert found.keys() == set(run.SCORES.values())
    assert found[DEFAULT]["scaled by 5"] > 0.8 > 0.5 > found["parametric"]["scaled by 5"]
    assert all(0 <= value <= 1 for kinds in found.values() for value in kinds.values())


def test_the_default_is_the_predictors() -> None:
    case = table("wine", 1)
    ifc = run.IFComp(case.model, damping=run.OOD_DAMPING, fisher="exact").fit([case.train])
    found = run.scores(ifc, case.usual)[DEFAULT].numpy()
    np.testing.assert_allclose(found, ifc.score([case.usual]).column(OOD_COLUMN), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("case", [lambda: texts(0), lambda: digits("mlp", 1)])
def test_networks_have_learnt_something(case: object) -> None:
    found = case()  # type: ignore[operator]
    assert (found.model(found.usual).softmax(1).amax(1) > 0.9).double().mean() > 0.5
    assert not found.model.training
    assert all(len(inputs) > 100 and inputs.shape[1:] == found.usual.shape[1:] for inputs in found.strange.values())


def test_the_page_is_that_of_the_results() -> None:
    folder = run.HERE / "results"
    results = json.loads((folder / "ood.json").read_text())["results"]
    assert run.page(results) == (folder / "ood.md").read_text()
