"""Every script of the documentation runs, and prints what the documentation shows, up to numbers."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from docs.tools.capture import EXAMPLES, OUTPUTS, PROCESSES, ROOT, run_example


def without_numbers(text: str) -> list[str]:
    """The words of a text: runs of digits, with the signs and brackets around them, are one kind of word."""
    return re.sub(r"[-+\d.,\[\]()%]*\d[-+\d.,e\[\]()%]*", "0", text).split()


def words(text: str) -> set[str]:
    return set(without_numbers(text))


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # a deprecated pandas argument of cleanlab
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in PROCESSES])
def test_an_example_prints_what_the_documentation_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    shown = (OUTPUTS / f"{name}.txt").read_text()
    printed = capsys.readouterr().out
    assert printed.count("\n") == shown.count("\n")
    if name == "text_transformer":  # which texts come first depends on rounding
        assert words(printed) & words(shown) >= {"suspects,", "covered:", "nats:", "mixed"}
    else:
        assert without_numbers(printed) == without_numbers(shown)


@pytest.mark.parametrize("name", PROCESSES)
def test_an_example_for_several_processes_prints_what_the_documentation_shows(name: str, tmp_path: Path) -> None:
    printed = run_example(name, str(tmp_path))
    assert without_numbers(printed) == without_numbers((OUTPUTS / f"{name}.txt").read_text())


def test_the_model_of_the_shell_examples_trains_and_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        net = runpy.run_path(str(ROOT / "examples" / "own_model" / "net.py"), run_name="__main__")
    x, y = net["batches"]("test.npz")[0]
    assert float((net["trained"]()(x).argmax(1) == y).double().mean()) > 0.8
    assert len(net["batches"]("train.npz")) == 4


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_has_its_output_in_the_documentation(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 60
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert f'--8<-- "examples/{name}.py"' in pages
    assert f'--8<-- "docs/outputs/{name}.txt"' in pages
