"""Tables in Parquet files."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from source_helpers import read_all, write_table

from ifcomp.data.sources import SourceOptions, open_source
from ifcomp.errors import DataError, EmptyDataError, LabelError


def test_numeric_columns_are_features() -> None:
    source = open_source(write_table(b=[1, 2], label=[1, 0], a=[0.5, np.pi], c=[True, False]))
    x, y = read_all(source)
    assert x.dtype == torch.float32
    np.testing.assert_array_equal(x.numpy(), np.array([[1, 0.5, 1], [2, np.pi, 0]], np.float32))
    assert y is not None
    assert y.tolist() == [1, 0]
    assert source.preview([1])[0].content == {"b": 2, "a": pytest.approx(np.pi), "c": 0}


def test_a_column_may_be_named_twice() -> None:
    options = SourceOptions(feature_columns=("a", "label", "a"))
    source = open_source(write_table(a=[0.5, 1.5], label=[0, 1]), options)
    assert read_all(source)[0].tolist() == [[0.5, 0, 0.5], [1.5, 1, 1.5]]


def test_list_column_and_string_labels() -> None:
    spec = write_table(name=["x", "y", "z"], kind=["dog", "cat", "dog"], features=[[1.5, 2], [3, 4], [5, 6]])
    options = SourceOptions(label_column="kind", feature_columns=("features",))
    source = open_source(spec, options)
    x, y = read_all(source)
    assert x.tolist() == [[1.5, 2], [3, 4], [5, 6]]
    assert y is not None
    assert (y.tolist(), source.class_names) == ([1, 0, 1], ("cat", "dog"))
    known = open_source(spec, options, class_names=["dog", "eel", "cat"])
    assert known.labels is not None
    assert known.labels.tolist() == [0, 2, 0]
    with pytest.raises(LabelError, match="not classes of the fit: 'dog'"):
        open_source(spec, options, class_names=["cat"])


def test_unlabelled_data_does_not_need_the_label_column() -> None:
    spec, options = write_table(a=[1.0, 2.0], b=[3.0, 4.0]), SourceOptions(label_column="kind")
    with pytest.raises(DataError, match="has no column 'kind'"):
        open_source(spec, options)
    source = open_source(spec, options, labelled=False)
    assert read_all(source)[0].tolist() == [[1, 3], [2, 4]]
    assert source.labels is None
    with_labels = open_source(write_table(a=[1.0], kind=[7]), options, labelled=False).unlabelled()
    assert read_all(with_labels)[0].tolist() == [[1]]


def test_columns_are_matched_by_name() -> None:
    source = open_source(write_table(b=[1.0], a=[2.0]))
    assert source.feature_columns == ("b", "a")
    options = SourceOptions(feature_columns=source.feature_columns)
    moved = open_source(write_table(extra=["text"], a=[2.0], label=[0], b=[1.0]), options)
    assert read_all(moved)[0].tolist() == [[1, 2]]
    with pytest.raises(DataError, match=r"has no column 'b'. Its columns are 'a', 'c'"):
        open_source(write_table(a=[2.0], c=[1.0]), options)


def test_categorical_labels_and_integers_in_lists() -> None:
    source = open_source(write_table(label=pd.Categorical(["b", "a"]), ids=[[1, 2, 3], [4, 5, 6]]))
    x, y = read_all(source)
    assert (x.dtype, x.tolist()) == (torch.int64, [[1, 2, 3], [4, 5, 6]])
    assert y is not None
    assert y.tolist() == [1, 0]


def test_table_without_labels() -> None:
    x, y = read_all(open_source(write_table(a=[1.0, 2.0])))
    assert (x.tolist(), y) == ([[1], [2]], None)


@pytest.mark.parametrize(
    ("columns", "options", "error", "message"),
    [
        ({"a": [1.0]}, {"label_column": "y"}, DataError, "no column 'y'. Its columns are 'a'"),
        ({"a": [1.0]}, {"feature_columns": ("a", "b")}, DataError, "no column 'b'"),
        ({"a": [1.0], "b": ["x"], "c": ["y"]}, {}, DataError, "Column 'b', 'c' of .* is not numeric"),
        ({"a": [1.0, None]}, {}, DataError, "Column 'a' of .* has empty cells"),
        ({"a": [1.0, 2.0], "label": [1, None]}, {}, DataError, "Column 'label' of .* has empty cells"),
        ({"a": [1.0], "label": [0.5]}, {}, LabelError, "integers or strings, but column 'label'"),
        ({"a": [[1.0], [1.0, 2.0]]}, {}, DataError, "have 1 to 2 values"),
        ({"a": [["x"]]}, {}, DataError, "must contain numbers only"),
        ({"label": [1]}, {}, DataError, "no column with features"),
        ({"a": []}, {}, EmptyDataError, "no rows"),
    ],
)
def test_unusable_tables_are_refused(
    columns: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_source(write_table(**columns), SourceOptions(**options))


def test_missing_and_foreign_files_are_refused() -> None:
    with pytest.raises(DataError, match="no file"):
        open_source("parquet:gone.parquet")
    Path("t.parquet").write_text("hello")
    with pytest.raises(DataError, match=r"Cannot read 't.parquet' as a Parquet file"):
        open_source("parquet:t.parquet")
