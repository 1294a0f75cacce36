"""Every script, notebook and block of the documentation runs, and prints what it shows, up to numbers."""

import contextlib
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import typer
from torch.utils.data import TensorDataset

from docs.tools.capture import EXAMPLES, OUTPUTS, PROCESSES, ROOT, pages, refreshed, run_example
from docs.tools.notebooks import NOTEBOOKS, rendered, run_cell, run_notebook
from ifcomp import IFComp
from ifcomp.cli.main import app


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
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert f'--8<-- "examples/{name}.py"' in pages
    assert f'--8<-- "docs/outputs/{name}.txt"' in pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_the_blocks_of_a_page_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "own_model", tmp_path, dirs_exist_ok=True)
    assert without_numbers(refreshed(page.read_text(), str(tmp_path))) == without_numbers(page.read_text())


def shown_text(notebook: dict[str, Any]) -> list[str]:
    """The printed texts of a notebook."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return ["".join(output.get("text", output.get("data", {}).get("text/plain", []))) for output in outputs]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path: Path, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        printed = shown_text(run_notebook(path, str(tmp_path)))
    shown = shown_text(json.loads(path.read_text(encoding="utf-8")))
    if path.stem == "text":  # which texts come first depends on rounding and on the versions of the packages
        assert len(printed) == len(shown)
        assert words(" ".join(printed)) & words(" ".join(shown)) >= {"suspects;", "flagged", "supports", "sets,"}
    else:
        assert [without_numbers(text) for text in printed] == [without_numbers(text) for text in shown]
    assert (tmp_path / "report.html").exists()


def test_cells_print_show_their_last_value_and_keep_their_names() -> None:
    names: dict[str, Any] = {}
    assert run_cell("value = 3\nprint('one')\nvalue + 1", names) == [
        {"name": "stdout", "output_type": "stream", "text": ["one\n"]},
        {"data": {"text/plain": ["4"]}, "metadata": {}, "output_type": "display_data"},
    ]
    assert run_cell("value;", names) == []
    with pytest.raises(NameError):
        run_cell("missing", names)


def test_notebooks_are_rendered_without_their_title() -> None:
    page = rendered(NOTEBOOKS[0])
    assert not page.lstrip().startswith("# ")
    assert "data:image/png;base64," in page
    assert "```python\nimport torch" in page


#: Blocks of pages that need a device, another package or files of the reader.
NOT_RUN = ('autocast("cuda"', "DataCollatorWithPadding", "torch.library.Library", "--8<--")


def snippets(page: str) -> list[str]:
    """Return the blocks of Python of a page that are not marked, in order."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    return [block for block in blocks if not any(name in block for name in NOT_RUN)]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the data of ``net.py``, and the names that the pages use."""
    folder = tmp_path_factory.mktemp("reader")
    with contextlib.chdir(folder), torch.random.fork_rng():
        net = runpy.run_path(str(ROOT / "examples" / "own_model" / "net.py"), run_name="__main__")
        model, loader, test = net["trained"](), net["batches"]("train.npz"), net["batches"]("test.npz")
        shifted, (x, y) = net["batches"]("noisy.npz"), loader[0]
        ifc = IFComp(model).fit(loader)
        audit = ifc.audit(loader)
        audit.to_csv("audit.csv")
        ifc.save("run.ifcomp")
    names = {"IFComp": IFComp, "torch": torch, "pd": pd, "ifc": ifc, "model": model, "audit": audit, "x": x, "y": y}
    names |= {"loader": loader, "train_loader": loader, "test_loader": test, "held_out_loader": test}
    names |= {"shifted_loader": shifted, "new_loader": shifted, "known_ood_loader": [1 - images for images, _ in test]}
    names |= {"x_test": test[0][0], "train_data": TensorDataset(*map(torch.cat, zip(*loader, strict=True)))}
    return folder, names | {"labels": torch.cat([labels for _, labels in loader]).numpy()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", ["tasks.md", "settings.md", "scale-out.md", "command-line.md"])
def test_the_blocks_of_the_guide_run(page: str, reader: tuple[Path, dict[str, Any]]) -> None:
    folder, names = reader
    names = dict(names)
    blocks = snippets(page)
    assert blocks
    with contextlib.chdir(folder):
        for block in blocks:
            run_cell(block, names)


def options(command: Any) -> set[str]:
    """Return the options of a command, as they are written."""
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def documented_commands() -> list[str]:
    """Return every line of ``ifcomp`` in the blocks of the README and the pages."""
    found = []
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for block in re.findall(r"```(?:console|bash|sh)\n(.*?)```", page.read_text().replace("\\\n", " "), re.DOTALL):
            found += re.findall(r"(?:^|\$ |-m |&& )(ifcomp [a-z].*?)(?=$|#|&&|  )", block, re.MULTILINE)
    return found


def test_documented_commands_exist_with_their_options() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = documented_commands()
    assert len(lines) > 20
    for line in lines:
        name, *rest = line.split()[1:]
        assert name in commands, line
        assert {word.split("=")[0] for word in rest if word.startswith("--")} <= options(commands[name]), line
