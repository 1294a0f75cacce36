"""Tables in CSV files."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from source_helpers import read_all

from ifcomp.data.sources import SourceOptions, open_source
from ifcomp.data.sources.csv_labels import MAX_LABELS
from ifcomp.data.sources.csv_values import ValueStore
from ifcomp.errors import DataError, EmptyDataError, LabelError

RNG = np.random.default_rng(0)


def write(text: str | bytes) -> str:
    """Write a CSV file into the current folder and return its name as data."""
    Path("t.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    return "csv:t.csv"


def test_values_equal_those_of_pandas() -> None:
    frame = pd.DataFrame(RNG.normal(size=(300, 7)) * 10.0 ** RNG.integers(-9, 9, (300, 7)), columns=list("gfedcba"))
    frame["flag"], frame["count"] = RNG.random(300) < 0.5, RNG.integers(-5, 5, 300)
    frame.insert(3, "label", RNG.integers(0, 4, 300))
    frame.to_csv("t.csv", index=False)
    source = open_source("csv:t.csv", SourceOptions(batch_size=64))
    x, y = read_all(source)
    assert x.dtype == torch.float32
    expected = frame.drop(columns="label")
    np.testing.assert_array_equal(x.numpy(), expected.astype(np.float32).to_numpy())
    assert y is not None
    assert (y.tolist(), len(source), source.class_names) == (frame["label"].tolist(), 300, None)
    assert source.feature_columns == tuple(expected.columns)
    assert source.preview([5])[0].content == {name: np.float32(expected[name][5]) for name in expected.columns}


@pytest.mark.parametrize(
    "text",
    [
        "a,label,b\n1,x,2\n3,y,4\n",
        "a,label,b\r\n1,x,2\r\n3,y,4",
        "\ufeffa;label;b\n1;x;2\n3;y;4\n",
        "sep=;\na;label;b\n1;x;2\n3;y;4\n",
        '\ufeff"sep=\t"\n"a"\tlabel\tb\n1\t"x"\t2\n3\ty\t4\n',
        "\na, label ,b\n\n1, x ,2\n\n\n 3 ,y,4\n\n",
        '"a",label,"b"\n"1","x",2\n3,"y","4"\n',
    ],
)
def test_forms_of_csv_files(text: str) -> None:
    source = open_source(write(text))
    x, y = read_all(source)
    assert (x.tolist(), source.feature_columns) == ([[1, 2], [3, 4]], ("a", "b"))
    assert y is not None
    assert (y.tolist(), source.class_names) == ([0, 1], ("x", "y"))


def test_a_cell_may_contain_delimiters_and_line_breaks() -> None:
    source = open_source(
        write('a,"the ""label"", here"\n1,"x,\ny"\n2,z\n'), SourceOptions(label_column='the "label", here')
    )
    assert source.class_names == ("x,\ny", "z")


def test_columns_are_matched_by_name() -> None:
    source = open_source(write("b,a,label\n1,2,0\n"))
    options = SourceOptions(feature_columns=source.feature_columns)
    moved = open_source(write("id,label,a,b\nrow-1,1,2,1\n"), options)
    assert read_all(moved)[0].tolist() == [[1, 2]]
    unlabelled = open_source(write("a,b\n2,1\n"), options)
    assert (read_all(unlabelled)[0].tolist(), unlabelled.labels) == ([[1, 2]], None)
    with pytest.raises(DataError, match=r"has no column 'b'. Its columns are 'a', 'c'"):
        open_source(write("a,c\n2,1\n"), options)


def test_unlabelled_data_does_not_need_the_label_column() -> None:
    spec, options = write("a,b\n1,3\n2,4\n"), SourceOptions(label_column="kind")
    with pytest.raises(DataError, match="has no column 'kind'"):
        open_source(spec, options)
    assert read_all(open_source(spec, options, labelled=False))[0].tolist() == [[1, 3], [2, 4]]


@pytest.mark.parametrize(
    ("labels", "known", "expected", "names"),
    [
        (["2", "0", "02"], None, [2, 0, 2], None),
        (["dog", "cat", "dog"], None, [1, 0, 1], ("cat", "dog")),
        (["dog", "cat", "dog"], ["dog", "eel", "cat"], [0, 2, 0], ("dog", "eel", "cat")),
        (["1", "2a", "1"], None, [0, 1, 0], ("1", "2a")),
        (["1", "1"], ["1", "2a"], [0, 0], ("1", "2a")),
        (["1", "0"], ["cat", "dog"], [1, 0], ("cat", "dog")),
        (["-1", "+3"], None, [-1, 3], None),
    ],
)
def test_labels(labels: list[str], known: list[str] | None, expected: list[int], names: tuple[str, ...] | None) -> None:
    source = open_source(write("\n".join(["x,label", *(f"0,{label}" for label in labels)])), class_names=known)
    assert source.labels is not None
    assert (source.labels.tolist(), source.class_names) == (expected, names)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("a,b\n1,2\n3,x\n", DataError, "Line 3 of 't.csv', column 'b': 'x' is not a finite number"),
        ("a,id,b\n\n1,x,y\n", DataError, "Line 3 of 't.csv', column 'id', 'b': 'x' is not"),
        ("a,b\n1,\n", DataError, "Line 2 of 't.csv', column 'b': the cell is empty"),
        ("a;b\n1;0,5\n", DataError, "column 'b': '0,5' has a decimal comma"),
        ("a\nnan\n", DataError, "'nan' is not a finite number"),
        ("a\n1e39\n", DataError, "'1e39' is not a finite number"),
        ("a\n1_0\n", DataError, "'1_0' is not a finite number"),
        ("a,label\n1,\n", DataError, "Line 2 of 't.csv', column 'label': the label is empty"),
        ("a,label\n1,1\n1,0.5\n", LabelError, "Line 3 of 't.csv', column 'label': .* '0.5' is a fraction"),
        ("a,label\n1,1.0\n", LabelError, "'1.0' is a fraction"),
        ("a,label\n1," + "x" * 2000, DataError, "the label has 2,000 characters"),
        ("a,b\n1,2,3\n", DataError, "line 2 has 3 cells, but the header has 2"),
        ('a\n"1\n', DataError, "line 2: unexpected end of data"),
        ('a\n"1"2\n', DataError, "line 2: "),
        ("a,b,a\n1,2,3\n", DataError, "several columns with the name 'a'"),
        (",a\n0,1\n", DataError, "Column 1 of 't.csv' has no name. .*index=False"),
        ("5.1,3.5,setosa\n4.9,3.0,setosa\n", DataError, "must contain the names of the columns"),
        ("label\n1\n", DataError, "no column with features"),
        ("a,b\n", EmptyDataError, "no rows"),
        ("", DataError, "it has no header"),
        (b"a,b\n1,2\n\xff,3\n", DataError, "line 3 is not UTF-8 text; .*CSV UTF-8"),
        ("a,b\n1,2\n".encode("utf-16"), DataError, "its text is UTF-16; .*CSV UTF-8"),
        (b"PK\x03\x04xyz", DataError, "Excel workbook"),
        (b"\x1f\x8bxyz", DataError, "it is compressed"),
    ],
)
def test_unusable_files_are_refused(text: str | bytes, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_source(write(text))


def test_unknown_classes_are_named() -> None:
    with pytest.raises(LabelError, match=re.escape("not classes of the fit: 'eel'. Its classes are 'cat', 'dog'.")):
        open_source(write("a,label\n1,cat\n2,eel\n"), class_names=["cat", "dog"])


def test_columns_of_other_content_are_not_labels() -> None:
    rows = "\n".join(f"1,{number}" for number in range(MAX_LABELS + 1))
    with pytest.raises(DataError, match=f"Line {MAX_LABELS + 2:,} of .*more than {MAX_LABELS:,} distinct labels"):
        open_source(write(f"a,label\n{rows}\n"))


def test_columns_named_by_numbers() -> None:
    pd.DataFrame(np.ones((2, 3))).to_csv("t.csv", index=False)
    assert open_source("csv:t.csv").feature_columns == ("0", "1", "2")


def test_missing_files_are_refused() -> None:
    with pytest.raises(DataError, match=r"no file 'gone.csv'"):
        open_source("csv:gone.csv")


@pytest.mark.parametrize("memory_bytes", [0, 100, 10**9])
def test_values_in_memory_and_in_files_are_equal(memory_bytes: int) -> None:
    values = RNG.normal(size=(5000, 60)).astype(np.float32)
    store = ValueStore(60, memory_bytes)
    for row in values:
        store.append(row)
    result = store.as_array()
    assert isinstance(result, np.memmap) == (memory_bytes < values.nbytes)
    np.testing.assert_array_equal(result, values)
