"""The check of phrases finds the dialect, with lines and suggestions, and accepts conventional prose."""

from pathlib import Path

import pytest

import prose

DIALECT = {
    "a fit takes 5 milliseconds an example": "milliseconds an example",
    "one row an input": "row an input",
    "eigendecompositions come once a fit": "once a fit",
    "estimated from so many random directions": "so many",
    "the result hangs on the damping": "hangs on",
    "the error was mended": "mended",
    "a compiler can be had": "can be had",
    "Take stock of a model": "Take stock",
    "detect strange inputs": "strange inputs",
    "among strangers": "strangers",
    "this is quicker": "quicker",
    "there is no room": "no room",
    "the message says what to do": "says what",
    "unfold what positions see": "what positions see",
    "what each layer sees": "what each layer sees",
    '"""What a step holds."""': '"""What',
    "#: Where the weights are.": "Where",
    "a process of its own": "of its own",
    "the file is there already": "is there already",
    "all that was recorded": "all that was",
    "the model comes back": "comes back",
    "a stopped run goes on from there": "goes on from",
    "timed by turns": "by turns",
    "weight of the example beside a training example": "beside a training example",
    "whatever the data is": "whatever the data is",
    "where the model is sure of itself": "sure of itself",
    "settings that mean nothing": "that mean nothing",
    "weights kept on the way": "on the way",
    "what users hand in": "hand in",
    "    seed: Of the samples.": "seed: Of",
    "the footprint of an example": "footprint",
    "a piece of the batch": "piece",
    "it adds doubt": "doubt",
    "small eigenvalues carry the news": "carry the news",
}

CONVENTIONAL = """
Each measurement runs for at least one second; short calls are averaged. Times are milliseconds per example.
The function gives each of N examples a label and passes an example to the model. It forms a set of rows.
There are so many classes that all labels are slow. The process hangs on exit. We recommend to amend the settings.
The command `--strange DATA` compares two files. There is room for improvement, and no doubt about it.
What you see depends on the damping. Every piece of code below takes a fitted predictor. They go hand in hand.
    data: Training data of the model.
    shape: of one input
"""


def test_every_pattern_has_an_example() -> None:
    hits = {hit.suggestion for text in DIALECT for hit in prose.find_hits(text)}
    assert hits == set(prose.PHRASES.values())


@pytest.mark.parametrize(("text", "phrase"), DIALECT.items())
def test_dialect_is_found(text: str, phrase: str) -> None:
    assert phrase in [hit.phrase for hit in prose.find_hits(text)]


def test_conventional_prose_is_accepted() -> None:
    assert prose.find_hits(CONVENTIONAL) == []


@pytest.mark.parametrize("gap", ["\n    ", "\n#: ", '"\n        f"', "\n  # "])
def test_phrases_may_span_lines(gap: str) -> None:
    (hit,) = prose.find_hits(f"first line\nestimated from so{gap}many directions")
    assert (hit.line, hit.phrase) == (2, "so many")


def test_the_command_prints_hits_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.md").write_text("The error was fixed.\n")
    assert prose.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    page = tmp_path / "folder" / "bad.py"
    page.parent.mkdir()
    page.write_text("x = 1\n# The error was mended.\n")
    (tmp_path / "data.json").write_text('"mended"')
    assert prose.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{page}:2: 'mended': write 'fix'\n"
