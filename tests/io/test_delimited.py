"""CSV files are read as the csv module of Python writes them, and can be written again byte by byte."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ifcomp.io.delimited import DELIMITERS, Row, format_row, open_delimited

CELLS = st.text(st.sampled_from("ab0.,;\t\"' \n\r\x00é漢"), max_size=6)
TABLES = st.integers(2, 4).flatmap(
    lambda width: st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1, max_size=5)
)


def as_text(rows: list[list[str]], delimiter: str, ending: str) -> str:
    stream = io.StringIO(newline="")
    has_returns = any("\r" in cell for row in rows for cell in row)  # Python 3.11 does not quote them
    quoting = csv.QUOTE_ALL if has_returns else csv.QUOTE_MINIMAL
    csv.writer(stream, delimiter=delimiter, lineterminator=ending, quoting=quoting).writerows(rows)
    return stream.getvalue()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TABLES, st.sampled_from(DELIMITERS), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", "\ufeff"]))
def test_tables_are_read_as_they_were_written(
    tmp_path: Path, rows: list[list[str]], delimiter: str, ending: str, mark: str
) -> None:
    path = tmp_path / "t.csv"
    header = ["first", *(str(place) for place in range(1, len(rows[0])))]
    text = mark + as_text([header, *rows], delimiter, ending)
    path.write_bytes(text.encode())
    with open_delimited(path) as file:
        read = list(file.rows)
    assert (file.delimiter, file.names, [row.cells for row in read]) == (delimiter, tuple(header), rows)
    assert file.header.text + "".join(row.text for row in read) == text
    for row in read:
        again = format_row(row.cells, delimiter, row.text)
        assert next(csv.reader(io.StringIO(again, newline=""), delimiter=delimiter, strict=True)) == row.cells


def test_lines_are_counted_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('sep=;\n\na;b\n"x\n\ny";1\n\n2;3\n')
    with open_delimited(path) as file:
        assert file.header.text == "sep=;\n\na;b\n"
        assert list(file.rows) == [Row(4, ["x\n\ny", "1"], '"x\n\ny";1\n'), Row(8, ["2", "3"], "\n2;3\n")]


@pytest.mark.parametrize(
    ("content", "delimiter"),
    [("a,b", ","), ("a;b", ";"), ("a\tb", "\t"), ('"a,b,c";d', ";"), ("a", ","), ("sep=,\na;b,c", ","), ("", None)],
)
def test_the_header_decides_about_the_delimiter(tmp_path: Path, content: str, delimiter: str | None) -> None:
    path = tmp_path / "t.csv"
    path.write_text(content)
    if delimiter is None:
        with pytest.raises(ValueError, match="it has no header"), open_delimited(path):
            pass
        return
    with open_delimited(path) as file:
        assert file.delimiter == delimiter
