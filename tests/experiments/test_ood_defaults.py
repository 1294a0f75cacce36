"""The study of OOD scores: one situation, and the page of the committed results."""

import json

import numpy as np
import pytest

from experiments.ood_defaults import joins, run
from experiments.ood_defaults.situations import digits, table, texts
from ifcomp.complexity import BOUNDED_ADDED_PROBABILITY
from ifcomp.tasks.ood import MEMBERS

DEFAULT = f"bounded {BOUNDED_ADDED_PROBABILITY}"


def test_a_table() -> None:
    aurocs = run.unit(table, ("iris", 0))["auroc"]
    assert aurocs.keys() == set(run.SCORES.values())
    assert aurocs[DEFAULT]["scaled by 5"] > 0.8 > 0.5 > aurocs["parametric"]["scaled by 5"]
    assert all(0 <= value <= 1 for kinds in aurocs.values() for value in kinds.values())


def test_the_default_score_is_that_of_the_predictor() -> None:
    case = table("wine", 1)
    ifc = run.IFComp(case.model, damping=run.OOD_DAMPING, fisher="exact").fit([case.train])
    scores = run.scores(ifc, case.held_out)[DEFAULT].numpy()
    np.testing.assert_allclose(scores, ifc.score([case.held_out]).column("bounded_complexity"), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("case", [lambda: texts(0), lambda: digits("mlp", 1)])
def test_networks_are_trained(case: object) -> None:
    situation = case()  # type: ignore[operator]
    assert (situation.model(situation.held_out).softmax(1).amax(1) > 0.9).double().mean() > 0.5
    assert not situation.model.training
    shape = situation.held_out.shape[1:]
    assert all(len(inputs) > 100 and inputs.shape[1:] == shape for inputs in situation.ood.values())


def test_the_page_is_up_to_date() -> None:
    folder = run.HERE / "results"
    results = json.loads((folder / "ood.json").read_text())["results"]
    assert run.page(results) == (folder / "ood.md").read_text()


def test_joins_of_a_table() -> None:
    aurocs = joins.small(table, ("iris", 0))["auroc"]
    names = {" + ".join(join) for join in joins.JOINS}
    others = {f"all three, {name}" for name in (*joins.OTHER_JOINS, "equal weights", "equal weights, without the tail")}
    assert aurocs.keys() == {"max softmax", *MEMBERS, *names, *others}
    assert aurocs["complexity"]["scaled by 5"] > 0.8 > 0.5 > aurocs["energy"]["scaled by 5"]


def test_surprisal_of_ranks_by_hand() -> None:
    result = joins.rank_surprisal(np.array([-1.0, 4.0, 100.0]), np.arange(9.0))
    np.testing.assert_allclose(result, -np.log([0.95, 0.5, 0.05]))


def test_the_page_of_joins_is_up_to_date() -> None:
    folder = joins.HERE / "results"
    results = json.loads((folder / "joins.json").read_text())["results"]
    assert joins.page(results) == (folder / "joins.md").read_text()
