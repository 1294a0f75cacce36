"""Tables fit into the terminal. Column names are broken between words if there is space."""

import io

import pytest
from rich.console import Console

from ifcomp.cli.output import Outcome, table

COLUMNS = ("name", "p(suggested)", "neighbours that disagree")


@pytest.mark.parametrize(("width", "is_whole"), [(100, True), (48, True), (30, False)])
def test_words_are_whole_if_there_is_space(width: int, is_whole: bool) -> None:
    console = Console(file=io.StringIO(), width=width)
    row = ("a/long/path/of/an/image.png", "0.939", "15 of 15")
    Outcome({}, [table(COLUMNS, [row])]).show(console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = "".join(lines)
    assert all(word in text for name in COLUMNS for word in name.split()) == is_whole
    assert "0.939" in text


@pytest.mark.parametrize("width", [80, 72, 60])
def test_long_names_do_not_cut_the_other_columns(width: int) -> None:
    columns = ("name", "label", "suggested", "p(label)", "p(suggested)", "nats", "neighbours that disagree")
    row = ("automobile/img0611.png", "automobile", "airplane", "0.010", "0.778", "4.40", "34 of 35")
    console = Console(file=io.StringIO(), width=width)
    Outcome({}, [table(columns, [row], left=3)]).show(console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert all(cell in "".join(lines) for cell in ("0.010", "0.778", "4.40"))
    assert "34 of 35" in "".join(lines) or ("34 of" in "".join(lines) and width == 60)
