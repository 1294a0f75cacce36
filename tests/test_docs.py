"""The documentation builds without a warning, its links lead somewhere, and it says what is so."""

import importlib
import inspect
import re
import subprocess
import sys
import types
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import ifcomp.cli.main
from docs.tools import capture, hooks
from ifcomp import IFComp
from ifcomp.cli.output import GATE
from ifcomp.scores import DESCRIPTIONS
from ifcomp.tasks.audit import AUDIT_DAMPING
from ifcomp.tasks.ood import OOD_DAMPING
from ifcomp.tasks.pruning import PRUNING_DAMPING

ROOT = capture.ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**capture.environment(), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_local_link_of_the_site_has_a_target(site: Path) -> None:
    pages = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    assert {"index.html", "images.html", "gallery.html", "command-line.html"} <= {path.name for path in pages}
    for path, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if re.match(r"[a-z]+:|//", link):
                continue
            target, _, anchor = link.partition("#")
            place = (path.parent / target).resolve() if target else path
            place = place / "index.html" if place.is_dir() else place
            assert place.exists(), f"{path.name}: {link}"
            if anchor and place in pages:
                assert f'id="{anchor}"' in pages[place], f"{path.name}: {link}"


def test_every_command_and_every_public_name_is_on_the_site(site: Path) -> None:
    reference = (site / "command-line.html").read_text()
    for command in ifcomp.cli.main.app.registered_commands:
        assert f'id="ifcomp-{command.callback.__name__}"' in reference
    assert "[bold]" not in reference
    assert f"<td>{GATE}</td>\n<td>a gate was exceeded" in reference
    api = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    for name in (
        *(f"ifcomp.IFComp.{name}" for name in dir(IFComp) if name[0] != "_" and callable(getattr(IFComp, name))),
        *(f"ifcomp.{name}" for name in ifcomp.__all__ if name[0] != "_"),
        "ifcomp.report.OODExample",
        "ifcomp.estimation.estimate",
        "ifcomp.tasks.ood.ood_threshold",
        "ifcomp.errors.ModelError",
    ):
        assert f'id="{name}"' in api


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_of_pages_in_the_root_folder_exist(page: Path) -> None:
    links = [found.group(3) for found in hooks._LINK.finditer(page.read_text())]
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_readme_is_as_short_as_it_should_be() -> None:
    readme = (ROOT / "README.md").read_text()
    python = capture._PYTHON.search(readme)
    shell = capture._SHELL.search(readme)
    assert python is not None
    assert shell is not None
    assert len([line for line in python[2].splitlines() if line and not line.startswith(("import", "from"))]) <= 6
    assert python[4].count("\n") >= 5
    assert shell[2].count("$ ") == 3
    assert len(readme.splitlines()) < 170
    for picture in ("report.png", "audit-epochs.png"):
        assert f"docs/assets/{picture}" in readme
        assert (ROOT / "docs" / "assets" / picture).stat().st_size < 400_000


def test_the_site_has_at_most_seven_tabs() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    tabs = re.findall(r"^  - (\w+):", nav, re.MULTILINE)
    assert tabs == ["Home", "Start", "Guide", "Results", "Compare", "API", "Contribute"]


def test_reports_of_the_gallery_are_small_and_complete() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text()
    reports = sorted((ROOT / "docs" / "assets" / "gallery").glob("*.html"))
    assert [path.stem for path in reports] == ["images", "table", "text"]
    for path in reports:
        assert f"assets/gallery/{path.name}" in page
        assert path.stat().st_size < 1_000_000


def test_versions_in_the_comparison_are_those_of_the_requirements() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    header = next(line for line in (ROOT / "docs" / "compare.md").read_text().splitlines() if line.startswith("| | "))
    names = {"curvlinops": "curvlinops-for-pytorch"}
    shown = dict(re.findall(r"(\S+) (\d[\d.]*)", header.split("| TRAK")[0]))
    assert shown == {name: pins[names.get(name, name)] for name in shown}
    assert len(shown) == 5


def named(text: str) -> object:
    """What a name in the table of symbols stands for: ``Class.member``, ``package.module.name``, ``(argument=)``."""
    path, _, argument = text.removesuffix("=)").partition("(")
    parts = path.split(".") if path.startswith("ifcomp.") else ["ifcomp", *path.split(".")]
    found: object = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        if isinstance(found, types.ModuleType) and not hasattr(found, part):
            found = importlib.import_module(".".join(parts[:place]))
        elif isinstance(found, type) and is_dataclass(found) and part in {field.name for field in fields(found)}:
            found = part
        else:
            found = getattr(found, part)
    assert not argument or argument in inspect.signature(found).parameters, text  # type: ignore[arg-type]
    return found


def test_every_name_in_the_table_of_symbols_exists() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text().split("## The paper's symbols")[1].split("\n## ")[0]
    cells = [line.split("|")[3] for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(cells) > 25
    for cell in cells:
        names = re.findall(r"(column )?`([^`]+)`", cell)
        assert names or cell.strip() == "(nothing)", cell
        for column, name in names:
            assert name in DESCRIPTIONS if column else named(name) is not None, name
    with pytest.raises(AttributeError):
        named("IFComp.missing")
    with pytest.raises(AssertionError):
        named("IFComp(missing=)")


def test_the_dampings_that_the_pages_name_are_those_of_the_code() -> None:
    settings = (ROOT / "docs" / "settings.md").read_text()
    named = {name: float(value) for name, value in re.findall(r"(\w+_DAMPING) = Relative\((.+?)\)", settings)}
    assert named == {
        "OOD_DAMPING": OOD_DAMPING.multiple,
        "AUDIT_DAMPING": AUDIT_DAMPING.multiple,
        "PRUNING_DAMPING": PRUNING_DAMPING.multiple,
    }


def test_results_are_listed_whatever_is_there(tmp_path: Path) -> None:
    assert "no results" in hooks.results(tmp_path / "missing")
    (tmp_path / "index.md").write_text("# Results")
    (tmp_path / "ood.md").write_text("# Strange inputs\n\n[code](../../x.py) [raw](ood.json) ![plot](no.png)")
    (tmp_path / "ood.json").write_text("{}")
    found = hooks.results(tmp_path)
    assert "- [Strange inputs](ood.md)" in found
    assert "- [ood.json](ood.json)" in found
    assert "index.md" not in found


def test_links_out_of_the_site_become_words() -> None:
    text = "[how](tasks.md) [code](../src/ifcomp/scores.py) [web](https://arxiv.org) ![gone](assets/gone.png)"
    expected = "[how](tasks.md) code [web](https://arxiv.org) (gone)"
    assert hooks.unlinked(text, ROOT / "docs") == expected
    assert hooks.moved("[how](docs/tasks.md)", ROOT / "docs") == "[how](tasks.md)"


def test_marked_blocks_are_filled_with_what_they_print(tmp_path: Path) -> None:
    page = (
        "<!-- run: shell -->\n```console\n$ echo one > file\nold\n$ cat file\n```\n"
        "<!-- run: python -->\n```python\nprint(open('file').read().strip() * 2)\n```\n\n```text\nold\n```\n"
    )
    found = capture.refreshed(page, str(tmp_path))
    assert "$ echo one > file\n$ cat file\none\n```" in found
    assert "```text\noneone\n```" in found
