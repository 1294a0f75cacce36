"""Corrected data files, compared with a calculation by pandas and NumPy."""

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ifcomp.data.corrections import Corrections, open_labels
from ifcomp.errors import DataError, EmptyDataError, LabelError, SettingError

RNG = np.random.default_rng(0)
COUNT = 20
NAMES = ("cat", "dog", "eel")
LABELS = np.arange(COUNT) % 3
CORRECTIONS = Corrections({0: 2, 7: 0, 19: 2}, frozenset({3, 18}))
EXPECTED = np.delete(
    np.where(np.arange(COUNT) == 7, 0, np.where(np.isin(np.arange(COUNT), [0, 19]), 2, LABELS)), [3, 18]
)


def frame(labels: Any) -> pd.DataFrame:
    return pd.DataFrame(
        {"a": RNG.normal(size=COUNT), "label": labels, "text": ['hello, "world"\n', "x"] * (COUNT // 2)}
    )


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(save: Any) -> None:
    arrays = {
        "x": RNG.normal(size=(COUNT, 2, 3)),
        "y": LABELS.astype(np.uint8),
        "classes": np.array(NAMES),
        "ids": np.arange(COUNT) + 100,
        "mean": np.ones((2, 3), order="F"),
        "version": np.array(3),
    }
    save("t.npz", **arrays)
    data = open_labels("npz:t.npz")
    assert (data.count, data.class_names) == (COUNT, NAMES)
    assert data.write(CORRECTIONS, "o.npz") == ()
    kept = np.delete(np.arange(COUNT), [3, 18])
    expected = {**arrays, "x": arrays["x"][kept], "y": EXPECTED.astype(np.uint8), "ids": arrays["ids"][kept]}
    with np.load("o.npz", allow_pickle=False) as written:
        assert written.files == list(arrays)
        for name, array in expected.items():
            np.testing.assert_array_equal(written[name], array, strict=True)
    with zipfile.ZipFile("t.npz") as before, zipfile.ZipFile("o.npz") as after:
        assert {i.filename: i.compress_type for i in before.infolist()} == {
            i.filename: i.compress_type for i in after.infolist()
        }


def test_classes_of_an_npz_are_not_examples() -> None:
    np.savez("t.npz", x=np.ones((3, 2)), y=np.arange(3), classes=np.array(NAMES))
    open_labels("npz:t.npz").write(Corrections({}, frozenset({1})), "o.npz")
    with np.load("o.npz") as written:
        assert written["classes"].tolist() == list(NAMES)


def test_objects_in_an_npz_are_never_unpickled() -> None:
    np.savez("t.npz", x=np.ones((3, 2)), y=np.arange(3), extra=np.array([{}], object))
    with pytest.raises(DataError, match="objects are never unpickled"):
        open_labels("npz:t.npz").write(Corrections({}, frozenset({1})), "o.npz")
    assert sorted(os.listdir()) == ["t.npz"]


@pytest.mark.parametrize(
    "labels",
    [
        LABELS,
        LABELS.astype(np.int8),
        [NAMES[label] for label in LABELS],
        pd.Categorical.from_codes(LABELS, NAMES),
        pd.Categorical.from_codes(LABELS, NAMES, ordered=True),
    ],
    ids=["int64", "int8", "string", "categorical", "ordered"],
)
def test_parquet(labels: Any) -> None:
    table = frame(labels)
    table.to_parquet("t.parquet", row_group_size=6)
    data = open_labels("parquet:t.parquet")
    data.write(CORRECTIONS, "o.parquet")
    written = pd.read_parquet("o.parquet")
    expected = table.drop(index=[3, 18]).reset_index(drop=True)
    is_named = data.class_names is not None
    assert written["label"].tolist() == [NAMES[label] if is_named else label for label in EXPECTED]
    assert written["label"].dtype == pd.read_parquet("t.parquet")["label"].dtype
    pd.testing.assert_frame_equal(written[["a", "text"]], expected[["a", "text"]], check_dtype=False)
    assert pq.read_schema("o.parquet").equals(pq.read_schema("t.parquet"), check_metadata=True)


def test_parquet_with_many_row_groups_and_lists() -> None:
    rows = 10_000
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(2 * rows, dtype=np.float32)), 2)
    labels = np.arange(rows) % 5
    pq.write_table(pa.table({"x": values, "kind": labels}), "t.parquet", row_group_size=999)
    changed = {index: (index + 1) % 5 for index in range(0, rows, 7)}
    dropped = frozenset(range(3, rows, 11)) - changed.keys()
    open_labels("parquet:t.parquet", label_column="kind").write(Corrections(changed, dropped), "o.parquet")
    expected = [changed.get(index, index % 5) for index in range(rows) if index not in dropped]
    table = pq.read_table("o.parquet")
    assert table.column("kind").to_pylist() == expected
    assert [row[0] / 2 for row in table.column("x").to_pylist()] == [i for i in range(rows) if i not in dropped]


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("settings", [{}, {"sep": ";"}, {"encoding": "utf-8-sig"}, {"lineterminator": "\r\n"}], ids=str)
def test_csv(is_named: bool, settings: dict[str, Any]) -> None:
    table = frame([NAMES[label] for label in LABELS] if is_named else LABELS)
    table.to_csv("t.csv", index=False, **settings)
    open_labels("csv:t.csv").write(CORRECTIONS, "o.csv")
    expected = table.drop(index=[3, 18])
    expected["label"] = [NAMES[label] if is_named else label for label in EXPECTED]
    expected.to_csv("expected.csv", index=False, **settings)
    assert Path("o.csv").read_bytes() == Path("expected.csv").read_bytes()


def test_other_rows_of_a_csv_are_copied_byte_by_byte() -> None:
    text = '\ufeffa , label,b\r\n"1","0", 2\n\n 1.50,1,"x"\n1e5,0,""'
    Path("t.csv").write_bytes(text.encode())
    open_labels("csv:t.csv").write(Corrections({1: 0}, frozenset()), "o.csv")
    assert Path("o.csv").read_bytes() == text.replace('\n\n 1.50,1,"x"', "\n 1.50,0,x").encode()
    open_labels("csv:t.csv").write(Corrections({}, frozenset({2})), "o.csv")
    assert Path("o.csv").read_bytes() == text.removesuffix('1e5,0,""').encode()


def test_labels_are_quoted_where_needed() -> None:
    Path("t.csv").write_text('a,label\n1,"x, ""y"""\n2,z\n')
    open_labels("csv:t.csv").write(Corrections({1: 0}, frozenset()), "o.csv")
    assert Path("o.csv").read_text() == 'a,label\n1,"x, ""y"""\n2,"x, ""y"""\n'


def test_files_that_change_are_refused() -> None:
    Path("t.csv").write_text("a,label\n1,0\n2,1\n")
    data = open_labels("csv:t.csv")
    Path("t.csv").write_text("a,label\n1,0\n2,1\n3,1\n")
    with pytest.raises(DataError, match="was changed while it was read"):
        data.write(Corrections({0: 1}, frozenset()), "o.csv")
    assert sorted(os.listdir()) == ["t.csv"]


@pytest.mark.parametrize("spec", ["parquet:t.parquet", "csv:t.csv"])
def test_tables_without_labels(spec: str) -> None:
    table = pd.DataFrame({"a": [1.0, 2.0, 3.0]})
    table.to_parquet("t.parquet")
    table.to_csv("t.csv", index=False)
    data = open_labels(spec)
    assert (data.labels, data.count) == (None, 3)
    out = f"o.{spec.partition(':')[0]}"
    data.write(Corrections({}, frozenset({1})), out)
    written = pd.read_csv(out) if out.endswith("csv") else pd.read_parquet(out)
    assert written["a"].tolist() == [1, 3]
    with pytest.raises(DataError, match="has no column 'kind'"):
        open_labels(spec, label_column="kind")


@pytest.mark.parametrize(
    ("spec", "settings", "error", "message"),
    [
        ("digits", {}, SettingError, "can be corrected, but the data is 'digits'"),
        ("module:factory", {}, SettingError, "can be corrected"),
        ("t.csv", {}, SettingError, "Data must be named as"),
        ("npz:t.npz", {"label_column": "y"}, SettingError, "--label-column does not apply"),
        ("npz:gone.npz", {}, DataError, "There is no file 'gone.npz'"),
        ("csv:gone.csv", {}, DataError, "There is no file 'gone.csv'"),
        ("parquet:gone.parquet", {}, DataError, "There is no file 'gone.parquet'"),
        ("folder:gone", {}, DataError, "no folder 'gone'"),
        ("csv:empty.csv", {}, EmptyDataError, "has no rows"),
        ("csv:fractions.csv", {}, LabelError, "'0.5' is a fraction"),
        ("parquet:fractions.parquet", {}, LabelError, "integers or strings"),
        ("csv:names.csv", {"class_names": ["a"]}, LabelError, "'b'"),
    ],
)
def test_unusable_data_is_refused(spec: str, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    Path("empty.csv").write_text("a,label\n")
    Path("fractions.csv").write_text("a,label\n1,0.5\n")
    Path("names.csv").write_text("a,label\n1,a\n2,b\n")
    pd.DataFrame({"a": [1], "label": [0.5]}).to_parquet("fractions.parquet")
    with pytest.raises(error, match=message):
        open_labels(spec, **settings)


def test_classes_that_do_not_occur() -> None:
    Path("t.csv").write_text("a,label\n1,cat\n2,eel\n")
    data = open_labels("csv:t.csv", class_names=NAMES)
    assert data.labels is not None
    assert (data.labels.tolist(), data.class_names) == ([0, 2], NAMES)
    data.write(Corrections({0: 1}, frozenset()), "o.csv")
    assert Path("o.csv").read_text() == "a,label\n1,dog\n2,eel\n"
