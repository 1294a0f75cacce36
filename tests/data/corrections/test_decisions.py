"""Files of decisions, and their checks against the data."""

from pathlib import Path

import numpy as np
import pytest

from ifcomp.data.corrections import LabelledFile, read_decisions, resolve_decisions
from ifcomp.data.corrections.decisions import Action, Decision
from ifcomp.errors import DataError, EmptyDataError, IfcompWarning, LabelError
from ifcomp.io.delimited import escape_cell

HEADER = "index,decision,label\n"


def write(text: str | bytes) -> str:
    Path("d.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    return "d.csv"


def labelled(
    labels: list[int] | None, class_names: tuple[str, ...] | None = None, names: tuple[str, ...] | None = None
) -> LabelledFile:
    """Data of four examples."""
    values = None if labels is None else np.array(labels)
    return LabelledFile("data", 4, values, class_names, names, lambda corrections, out: ())


@pytest.mark.parametrize(
    "text",
    [
        "index,decision,label\n3,relabel,dog\n0,drop,\n1,keep,\n",
        "\ufeffindex;decision;label\r\n3;relabel;dog\r\n0;drop;\r\n1;keep;\r\n",
        "sep=;\r\nindex;decision;label\r\n3;relabel;dog\r\n0;drop;\r\n1;keep;",
        'Decision,score,"Label",INDEX\n RELABEL ,1.5,dog,3\n\nDrop,2,cat, 0\nkeep,,,1\n\n',
        "index\tdecision\tlabel\n3\trelabel\tdog\n0\tdrop\t\n1\tkeep\t\n",
    ],
)
def test_forms_of_files(text: str) -> None:
    decisions = read_decisions(write(text))
    assert [(decision.index, decision.action.value, decision.label) for decision in decisions] == [
        (3, "relabel", "dog"),
        (0, "drop", ""),
        (1, "keep", ""),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("index,label\n1,2\n", "has no column 'decision'. Its columns are 'index', 'label'"),
        ("decision\nkeep\n", "has no column 'index'"),
        ("index,decision,Index\n1,keep,1\n", "several columns with the name 'index'"),
        (HEADER + "1,delete,\n", "Line 2 of 'd.csv': the decision must be keep, relabel or drop, but is 'delete'"),
        (HEADER + "1,,\n", "but is ''"),
        (HEADER + "1,relabel,\n", "Line 2 of 'd.csv': relabel needs a class index or class name"),
        ("index,decision\n1,relabel\n", "relabel needs a class index or class name"),
        (HEADER + "0,keep,\n-1,keep,\n", "Line 3 of 'd.csv': the index must be a whole number from 0 on, but is '-1'"),
        (HEADER + "1.0,keep,\n", "but is '1.0'"),
        (HEADER + "1e3,keep,\n", "but is '1e3'"),
        (HEADER + "٣,keep,\n", "the index must be a whole number"),
        (HEADER + f"{'9' * 5000},keep,\n", "the index must be a whole number"),
        (HEADER + "7,keep,\n\n2,drop,\n7,drop,\n", "Lines 2 and 5 of 'd.csv' decide about the same index 7"),
        (HEADER + "1,keep\n", "line 2 has 2 cells, but the header has 3"),
        (b"index,decision,label\n1,relabel,caf\xe9\n", "line 2 is not UTF-8 text; in a spreadsheet, save it as"),
        (HEADER.encode("utf-16"), "its text is UTF-16"),
        (b"PK\x03\x04", "it is an Excel workbook"),
        ("", "it has no header"),
    ],
)
def test_invalid_files_are_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_decisions(write(text))


def test_the_number_of_decisions_is_limited() -> None:
    path = write(HEADER + "".join(f"{index},keep,\n" for index in range(6)))
    assert len(read_decisions(path, max_decisions=6)) == 6
    with pytest.raises(DataError, match="it has more than 5 rows"):
        read_decisions(path, max_decisions=5)


def test_missing_and_empty_files_are_refused() -> None:
    with pytest.raises(DataError, match=r"There is no file 'gone.csv'"):
        read_decisions("gone.csv")
    with pytest.raises(EmptyDataError, match="has no decisions"):
        read_decisions(write(HEADER))


# Checks against the data ---------------------------------------------------------------------------------------------


def resolve(text: str, data: LabelledFile, by_name: bool | None = None) -> tuple[dict[int, int], set[int], int, int]:
    result = resolve_decisions(read_decisions(write(text)), data, "d.csv", by_name=by_name)
    return dict(result.labels), set(result.dropped), result.kept, result.unchanged


@pytest.mark.parametrize(
    ("class_names", "label", "by_name", "expected"),
    [
        (None, "1", None, 1),
        (("cat", "dog"), "dog", None, 1),
        (("cat", "dog"), "1", None, 1),
        (("=cat", "=dog"), "'=dog", None, 1),  # as tables of ifcomp contain it
        (("'=dog", "=dog"), "'=dog", None, 0),
        (("cat;=1", "a;-\n"), escape_cell("a;-\n"), None, 1),
        (("cat;=1", "a;-\n"), "cat;'=1", None, 0),
        (("0", "1"), "1", None, 1),
        (("1", "0"), "1", True, 0),
        (("1", "0"), "1", False, 1),
        (("7", "8"), "8", None, 1),
        (("7", "8"), "8", False, 1),
    ],
)
def test_labels_are_names_or_indices(
    class_names: tuple[str, ...] | None, label: str, by_name: bool | None, expected: int
) -> None:
    data = labelled([1 - expected] * 3 + [expected], class_names)
    assert resolve(f"{HEADER}2,relabel,{label}\n", data, by_name) == ({2: expected}, set(), 0, 0)


def test_decisions_are_counted() -> None:
    text = "index,decision,label,given\n0,relabel,1,0\n1,relabel,1,1\n2,drop,,\n3,keep,,0\n"
    assert resolve(text, labelled([0, 1, 0, 0])) == ({0: 1}, {2}, 1, 1)


@pytest.mark.parametrize(
    ("row", "data", "error", "message"),
    [
        ("4,keep,,,", labelled([0, 1, 0, 1]), DataError, "there is no index 4. 'data' has 4 examples, 0 to 3"),
        ("1,relabel,2,,", labelled([0, 1, 0, 1]), LabelError, "'2' is not one of the classes: 0 to 1"),
        ("1,relabel,-1,,", labelled([0, 1, 0, 1]), LabelError, "'-1' is not one of the classes"),
        ("1,relabel,dog,,", labelled([0, 1, 0, 1]), LabelError, "'dog' is not one of the classes"),
        ("1,relabel,eel,,", labelled([0, 1, 0, 1], ("cat", "dog")), LabelError, "'eel' is not one .*'cat', 'dog'"),
        ("1,relabel,2,,", labelled([0, 1, 0, 1], ("cat", "dog")), LabelError, "'2' is not one of the classes"),
        ("1,relabel,1,,", labelled([0, 1, 0, 1], ("1", "0")), LabelError, "name of class 0 and the index of class 1"),
        ("1,relabel,0,,", labelled(None), LabelError, "has no labels, so examples can be kept and dropped only"),
        ("1,keep,,0,", labelled([0, 1, 0, 1]), DataError, "example 1 was '0', but is '1' in 'data'. The decisions b"),
        ("1,drop,,cat,", labelled([0, 1, 0, 1], ("cat", "dog")), DataError, "was 'cat', but is 'dog'"),
        ("1,keep,,,b", labelled([0, 1, 0, 1], names=tuple("axyz")), DataError, "example 1 was 'b', but is 'x'"),
    ],
)
def test_decisions_about_other_data_are_refused(
    row: str, data: LabelledFile, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"Line 2 of 'd.csv': .*{message}"):
        resolve(f"index,decision,label,given,name\n{row}\n", data)


def test_names_of_examples_are_those_of_the_audit() -> None:
    text = "index,decision,name\n0,keep,a/1.png\n1,keep,'=b/1.png\n2,keep,\n"
    names = ("a/1.png", "=b/1.png", "c", "d")
    assert resolve(text, labelled([0, 0, 1, 1], names=names)) == ({}, set(), 3, 0)


def test_unlabelled_examples_can_be_dropped() -> None:
    assert resolve("index,decision,given\n2,drop,5\n", labelled(None)) == ({}, {2}, 0, 0)


def test_examples_and_classes_must_be_left() -> None:
    with pytest.raises(DataError, match="drops all 4 examples of 'data'"):
        resolve("index,decision\n0,drop\n1,drop\n2,drop\n3,drop\n", labelled([0, 1, 0, 1]))
    with pytest.warns(IfcompWarning, match="No example of class 'dog' is left"):
        resolve(f"{HEADER}1,drop,\n3,relabel,cat\n", labelled([0, 1, 0, 1], ("cat", "dog")))


def test_lines_are_those_of_the_file() -> None:
    assert read_decisions(write(f"\n{HEADER}\n\n5,keep,\n"))[0] == Decision(5, 5, Action.keep, "", "", "")
