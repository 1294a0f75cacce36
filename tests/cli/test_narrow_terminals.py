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
