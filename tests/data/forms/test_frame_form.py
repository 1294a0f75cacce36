"""Tables of pandas in place of batches."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from cases import seeded
from ifcomp import IFComp
from ifcomp.errors import DataError, LabelError, NonFiniteError

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
X[:, 1] = X[:, 1].round()
Y = torch.arange(40) % 2
FRAME = pd.DataFrame(X.numpy(), columns=["age", "visits", "dose"]).astype({"visits": "int64"})
LABELS = pd.Series(Y.numpy())


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)))()


EXPECTED = IFComp(net()).fit([(X, Y)]).score([(X, Y)]).frame


@pytest.mark.parametrize("name", ["label", "labels", "target", None])
def test_tables_give_the_scores_of_batches(name: str | None) -> None:
    data: Any = (FRAME, LABELS)
    if name is not None:
        data = FRAME.copy()
        data.insert(1, name, LABELS)
    ifc = IFComp(net()).fit(data)
    pd.testing.assert_frame_equal(ifc.score(data).frame, EXPECTED, rtol=1e-5)
    assert torch.equal(ifc.predict_proba(data if name else FRAME), ifc.predict_proba(X))


def test_a_table_without_labels_is_scored() -> None:
    frame = IFComp(net()).fit(FRAME).score(FRAME).frame
    assert "label" not in frame
    assert frame["expected_influence"].tolist() == pytest.approx(EXPECTED["expected_influence"].tolist(), rel=1e-4)


def test_nullable_and_boolean_columns_are_numbers() -> None:
    frame = FRAME.astype({"visits": "Int64", "age": "Float64"}).assign(dose=FRAME["dose"] > 0)
    inputs = X.clone()
    inputs[:, 2] = (X[:, 2] > 0).float()
    ifc = IFComp(net()).fit([X])
    assert torch.equal(ifc.influence(frame), ifc.influence(inputs))
    frame.loc[7, "visits"] = pd.NA
    with pytest.raises(NonFiniteError, match="example 7"):
        ifc.score(frame)


def test_columns_of_the_fit_are_remembered(tmp_path: Path) -> None:
    fitted = IFComp(net()).fit((FRAME, LABELS))
    fitted.save(tmp_path / "fit")
    other = FRAME[["dose", "age", "visits"]].assign(identity="x", label=1)
    for ifc in (fitted, IFComp.load(tmp_path / "fit", fitted.model)):
        assert torch.equal(ifc.influence(other), ifc.influence(X))
        assert ifc.score(other).frame["label"].eq(1).all()
        for call in (ifc.score, ifc.influence, ifc.audit):
            with pytest.raises(DataError, match=r"no column 'visits'.*The fit used 'age', 'visits', 'dose'"):
                call(FRAME[["dose", "age"]])
    with pytest.raises(DataError, match="no columns 'age', 'visits'"):
        fitted.influence(FRAME[["dose"]])
    fitted.fit((FRAME.rename(columns={"age": "years"}), LABELS))  # a new fit has new columns
    with pytest.raises(DataError, match="no column 'years'"):
        fitted.score(FRAME)


def test_held_out_tables_have_the_columns_of_the_training_data() -> None:
    ifc = IFComp(net()).fit((FRAME, LABELS))
    table = (pd.concat([FRAME[["dose", "age", "visits"]]] * 5), pd.concat([LABELS] * 5))
    expected = ifc.calibrate([(X.repeat(5, 1), Y.repeat(5))], progress=False)
    found = ifc.calibrate(table, progress=False)
    pd.testing.assert_frame_equal(found.frame, expected.frame, rtol=1e-5)


def test_row_names_are_in_the_audit() -> None:
    frame = FRAME.set_index(pd.Index([f"patient {row}" for row in range(40)]))
    audit = IFComp(net()).audit(frame.assign(label=Y.numpy()))
    assert audit.frame["name"].tolist() == frame.index.tolist()
    assert "name" not in IFComp(net()).audit((FRAME, LABELS)).frame


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (
            FRAME.assign(city="Oslo"),
            DataError,
            "Column 'city' of the table is not numeric. .* label, give .X, y.",
        ),
        (pd.DataFrame({"label": [0, 1]}), DataError, "no column with features"),
        (FRAME.assign(label=0, target=1), DataError, r"'label', 'target' could all be the labels. Give \(X, y\)"),
        (FRAME.set_axis(["a", "b", "b"], axis=1), DataError, "Several columns have the name 'b'"),
        ((FRAME, LABELS[::-1]), DataError, r"index of the labels differs.*y.loc\[X.index\]"),
        ((FRAME, LABELS[:30]), LabelError, r"40 examples and y has shape \[30\]"),
        (FRAME.assign(label="yes"), LabelError, "CategoricalDtype"),
        (FRAME.assign(label=0.5), LabelError, "regression targets"),
        ([FRAME, LABELS], DataError, r"Give the tuple \(X, y\)"),
    ],
    ids=["text", "no_features", "two_labels", "duplicate", "index", "length", "label_text", "regression", "list"],
)
def test_unusable_tables_are_refused(data: Any, error: type[Exception], message: str) -> None:
    for run in (IFComp(net()).fit, IFComp(net()).fit([X]).score):
        with pytest.raises(error, match=message):
            run(data)
