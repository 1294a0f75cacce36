"""Tables as data of the commands: columns are matched by name, and labels are optional where they are not needed."""

import numpy as np
import pandas as pd
import pytest
from project import Project, check_refused, run_json, stored_record

KINDS = ("csv", "parquet")


def write(frame: pd.DataFrame, name: str, kind: str) -> str:
    """Write a table and return its name as data."""
    path = f"{name}.{kind}"
    if kind == "csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path)
    return f"{kind}:{path}"


def pixels(project: Project, name: str, label: str = "digit") -> pd.DataFrame:
    """Return one column per pixel and a label column of class names."""
    x, y = project.arrays(name)
    frame = pd.DataFrame(x.flatten(1).numpy(), columns=[f"pixel {place}" for place in range(64)])
    frame.insert(7, label, [f"digit {value}" for value in y.tolist()])
    return frame


def shuffled(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns in another order, with a column of texts."""
    columns = np.random.default_rng(0).permutation(frame.columns).tolist()
    return frame[columns].assign(note="text")


def fit(project: Project, kind: str) -> None:
    data = write(pixels(project, "train"), "train", kind)
    run_json(*project.fit_arguments(data), "--label-column", "digit")


@pytest.mark.parametrize("kind", KINDS)
def test_columns_in_another_order(project: Project, kind: str) -> None:
    fit(project, kind)
    options = stored_record()["options"]
    assert options == {"label_column": "digit", "feature_columns": [f"pixel {place}" for place in range(64)]}
    frame = pixels(project, "valid")
    for name, table in {"same": frame, "other": shuffled(frame), "none": shuffled(frame.drop(columns="digit"))}.items():
        run_json("predict", "run.ifcomp", write(table, name, kind), "--alpha", "0.1", "--out", f"{name}-out.csv")
    expected = pd.read_csv("same-out.csv")
    pd.testing.assert_frame_equal(pd.read_csv("other-out.csv"), expected)
    pd.testing.assert_frame_equal(pd.read_csv("none-out.csv"), expected)


def test_formats_give_the_same_result(project: Project) -> None:
    for kind in KINDS:
        run_json(
            *project.fit_arguments(write(pixels(project, "train", "label"), "train", kind)), "--out", f"{kind}.ifcomp"
        )
        run_json("audit", f"{kind}.ifcomp", "--out", f"{kind}-audit.csv")
    run_json(*project.fit_arguments())
    run_json("audit", "run.ifcomp", "--out", "npz-audit.csv")
    expected = pd.read_csv("npz-audit.csv")
    for kind in KINDS:
        pd.testing.assert_frame_equal(pd.read_csv(f"{kind}-audit.csv"), expected, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_columns_are_named(project: Project, kind: str) -> None:
    fit(project, kind)
    table = pixels(project, "valid").drop(columns=["pixel 5", "pixel 50"])
    arguments = ("predict", "run.ifcomp", write(table, "few", kind), "--alpha", "0.1")
    check_refused(*arguments, message=f"'few.{kind}' has no columns 'pixel 5', 'pixel 50'")


@pytest.mark.parametrize("kind", KINDS)
def test_labels_that_are_needed(project: Project, kind: str) -> None:
    fit(project, kind)
    data = write(pixels(project, "valid").drop(columns="digit"), "none", kind)
    check_refused("audit", "run.ifcomp", data, message="has no labels, but this command needs them. Name their column")
    message = f"'none.{kind}' has no column 'digit'"
    check_refused("predict", "run.ifcomp", data, "--alpha", "0.1", "--label-column", "digit", message=message)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_has_the_columns_of_the_data(project: Project, kind: str) -> None:
    data = write(pixels(project, "train", "label"), "train", kind)
    frame = pixels(project, "valid", "label")
    arguments = ("audit", "--model", project.model, "--weights", "net.safetensors", "--data", data)
    for name, table in {"same": frame, "other": shuffled(frame)}.items():
        run_json(*arguments, "--reference", write(table, name, kind), "--out", f"{name}-audit.csv")
    pd.testing.assert_frame_equal(pd.read_csv("other-audit.csv"), pd.read_csv("same-audit.csv"))


def test_a_label_among_the_inputs_is_explained(project: Project) -> None:
    frame = pixels(project, "train").replace({"digit": {f"digit {label}": str(label) for label in range(10)}})
    check_refused(*project.fit_arguments(write(frame, "train", "csv")), message="name the label with --label-column")
