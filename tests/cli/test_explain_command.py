"""`ifcomp explain` lists the training examples behind labels."""

import numpy as np
import pandas as pd
import pytest
from project import Project, check_refused, run_json, run_text

from ifcomp import IFComp, Relative


def test_the_table_is_that_of_the_predictor(run: Project) -> None:
    content = run_json("explain", "run.ifcomp", "40,3", "--count", "2", "--damping", "relative:1")
    assert content["queries"] == [{"index": index, "label": int(run.arrays("train")[1][index])} for index in (40, 3)]
    frame = pd.read_csv("explain.csv")
    pd.testing.assert_frame_equal(frame, pd.DataFrame(content["effects"]))
    x, y = run.arrays("train")
    ifc = IFComp.load("run.ifcomp", run.network())
    chosen = [40, 3]
    expected = ifc.explain(x[chosen], y[chosen], [(x, y)], k=2, positions=chosen, damping=Relative(1.0))
    assert frame["query"].tolist() == [chosen[query] for query in expected.frame["query"]]
    assert frame["index"].tolist() == expected.frame["index"].tolist()
    np.testing.assert_allclose(frame["effect"], expected.frame["effect"], rtol=1e-5)
    assert not (frame["query"] == frame["index"]).any()  # an example is left out of its own list


def test_other_data_is_compared_with_all_training_examples(run: Project) -> None:
    x, y = run.arrays("train")
    np.savez("copy.npz", x=x[7:9], y=y[7:9])
    content = run_json("explain", "run.ifcomp", "1", "copy.npz", "--count", "1")
    assert (content["data"], content["train"]) == ("npz:copy.npz", "npz:train.npz")
    supports = [row for row in content["effects"] if row["role"] == "supports"]
    assert [row["index"] for row in supports] == [8]  # the same image and label


def test_the_text_names_classes_and_direction(run: Project) -> None:
    text = run_text("explain", "run.ifcomp", "40", "--count", "1")
    assert f"Example 40 with the label digit {run.arrays('train')[1][40]}" in text
    assert "Positive effects support the label" in text
    assert "supports" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x"], "whole numbers separated by commas, such as 17,25, but got 'x'"),
        (["3,3"], "each is given once, but got '3,3'"),
        (["200"], "There is no example 200: the data has 200 examples, 0 ... 199."),
        (["0", "unlabelled.npz"], "has no labels"),
        (["0", "--train", "unlabelled.npz"], "has no labels"),
        (["0", "--out", "train.npz"], "must end in .csv or .parquet"),
    ],
)
def test_invalid_arguments(run: Project, arguments: list[str], message: str) -> None:
    check_refused("explain", "run.ifcomp", *arguments, message=message)
