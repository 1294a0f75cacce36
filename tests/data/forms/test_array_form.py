"""Arrays and tensors in place of batches: ``(X, y)``, ``X`` and dicts of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from cases import seeded
from ifcomp import IFComp
from ifcomp.data.forms import DataRequest, as_data
from ifcomp.errors import DataError, LabelError

COUNT = 600  # several batches
X = torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (COUNT,), generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A model with one input named x."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def net() -> nn.Module:
    return seeded(Net)()


EXPECTED = IFComp(net()).fit([(X, Y)])
TABLE = EXPECTED.score([(X, Y)]).frame

LABELLED: dict[str, Callable[[], Any]] = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "doubles": lambda: (X.double().numpy(), Y.numpy()),
    "big_endian": lambda: (X.numpy().astype(">f4"), Y.numpy().astype(">i4")),
    "reversed_twice": lambda: (X.numpy()[::-1].copy()[::-1], Y.numpy()[::-1].copy()[::-1]),
    "label_list": lambda: (X, Y.tolist()),
    "label_series": lambda: (X.numpy(), pd.Series(Y.numpy())),
    "dict": lambda: {"x": X, "labels": Y},
    "dict_of_arrays": lambda: {"label": Y.numpy(), "x": X.double().numpy()},
}


@pytest.mark.parametrize("form", LABELLED)
def test_arrays_give_the_scores_of_batches(form: str) -> None:
    ifc = IFComp(net()).fit(LABELLED[form]())
    pd.testing.assert_frame_equal(ifc.score(LABELLED[form]()).frame, TABLE, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "data", [X, X.numpy(), (X,), (X, None), {"x": X}], ids=["tensor", "array", "single", "no_labels", "dict"]
)
def test_labels_are_optional(data: Any) -> None:
    frame = IFComp(net()).fit(data).score(data).frame
    assert "label" not in frame
    assert frame["expected_influence"].tolist() == pytest.approx(TABLE["expected_influence"].tolist(), rel=1e-3)


def test_arrays_are_audited_and_explained() -> None:
    batches = [(X[i : i + 256], Y[i : i + 256]) for i in range(0, COUNT, 256)]
    expected = IFComp(net()).audit(batches).frame
    pd.testing.assert_frame_equal(IFComp(net()).audit((X.numpy(), Y.numpy())).frame, expected)
    found = EXPECTED.explain(X[:2].numpy(), pd.Series([0, 1]), (X, Y), k=3).frame
    pd.testing.assert_frame_equal(found, EXPECTED.explain(X[:2], [0, 1], batches, k=3).frame)


def test_calls_take_arrays() -> None:
    x = X[:5].double().numpy()
    assert torch.equal(EXPECTED.influence(x), EXPECTED.influence(X[:5]))
    assert torch.equal(EXPECTED.predict_proba(x), EXPECTED.predict_proba(X[:5]))
    assert torch.equal(EXPECTED.stochastic_complexity(x, Y[:5].numpy()), EXPECTED.stochastic_complexity(X[:5], Y[:5]))


def test_arrays_are_converted_to_the_type_of_the_model() -> None:
    request = DataRequest(net().half())
    for values, dtype in (
        (X.numpy(), torch.float16),
        (Y.int().numpy(), torch.int64),
        (Y.numpy().astype(np.uint16), torch.int64),
        (Y.numpy().astype(np.uint8), torch.uint8),
    ):
        first = next(iter(as_data(values, request).batches))
        assert (first.dtype, len(first)) == (dtype, 256)
    batches = as_data((X, Y), request).batches
    assert [len(y) for _, y in batches] == [256, 256, 88]
    assert len(batches) == 3  # type: ignore[arg-type]
    assert next(iter(batches))[0].dtype == torch.float32  # tensors are taken as they are


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ((X, Y[:-1]), LabelError, r"X has 600 examples and y has shape \[599\].*batches into a list"),
        ((X, 3), LabelError, r"y has shape \[\]"),
        ((X, X[:, :1]), LabelError, "regression"),
        ((X, (X > 0).long()), LabelError, "multi-label"),
        ((X, pd.DataFrame({"y": Y.numpy()})), LabelError, r"labels.flatten\(\).long\(\)"),
        ((X, ["cat"] * COUNT), LabelError, "list of <U3. Number the classes in the order of the logits"),
        ((X, pd.Series(["cat"] * COUNT)), LabelError, "CategoricalDtype"),
        ((X, pd.Series([None, 1.0] * 300)), LabelError, "300 of 600 labels are missing"),
        ((X, [[1], [1, 2]]), LabelError, "different lengths"),
        ([X, Y], DataError, r"A list is read as batches.*Give the tuple \(X, y\)"),
        ([X.numpy(), Y.numpy()], DataError, r"Give the tuple \(X, y\)"),
        ("train.csv", DataError, "but is a str. Read the file first"),
        (np.array(["a", "b"]), DataError, "numbers, but the array has dtype <U1"),
        (torch.tensor(1.0), DataError, "no axis"),
        ({"x": X, "z": X[:3]}, DataError, r"'x': 600, 'z': 3.*single batch into a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_are_no_data_are_refused(data: Any, error: type[Exception], message: str) -> None:
    for run in (lambda: IFComp(net()).fit(data), lambda: EXPECTED.score(data)):
        with pytest.raises(error, match=message):
            run()


def test_a_list_of_two_batches_is_no_pair() -> None:
    halves = [X[:300], X[300:]]
    assert len(EXPECTED.score(halves)) == COUNT


def test_categories_name_the_classes() -> None:
    names = pd.Series(np.array(["cat", "ant", "bee"])[Y.numpy()])
    labels = names.astype(pd.CategoricalDtype(["cat", "ant", "bee"]))
    frame = IFComp(net()).audit((X.numpy(), labels)).frame
    assert frame["label"].tolist() == Y.tolist()
    assert frame["label_name"].tolist() == names.tolist()
    numbered = as_data((X.numpy(), pd.Series(Y.numpy()).astype("category")), DataRequest(net()))
    assert numbered.class_names is None
    assert torch.equal(torch.cat([y for _, y in numbered.batches]), Y)
