"""`ifcomp prune` lists the examples to keep."""

import pandas as pd
import pytest
from project import Project, check_refused, run_json, run_text


def test_examples_of_smallest_complexity_are_dropped(run: Project) -> None:
    content = run_json("prune", "run.ifcomp", "--drop", "0.25,0.5")
    frame = pd.read_csv("keep.csv")
    assert content["lists"] == [{"drop": 0.25, "kept": 150, "dropped": 50}, {"drop": 0.5, "kept": 100, "dropped": 100}]
    order = frame["stochastic_complexity"].to_numpy().argsort()
    assert sorted(order[50:]) == frame["index"][frame["keep_0.25"]].tolist()
    assert sorted(order[100:]) == frame["index"][frame["keep_0.5"]].tolist()
    assert "share to drop" in run_text("prune", "run.ifcomp")


def test_balanced(run: Project) -> None:
    run_json("prune", "run.ifcomp", "--drop", "0.5", "--balanced", "--out", "b.parquet")
    frame = pd.read_parquet("b.parquet")
    kept, total = frame[frame["keep_0.5"]].groupby("label").size(), frame.groupby("label").size()
    assert (kept == total - total // 2).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drop", "1"], "below 1, but got '1'"),
        (["--drop", "x"], "--drop takes numbers"),
        (["npz:unlabelled.npz"], "has no labels"),
    ],
)
def test_invalid_arguments(run: Project, arguments: list[str], message: str) -> None:
    check_refused("prune", "run.ifcomp", *arguments, message=message)
