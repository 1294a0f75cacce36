"""Generated parts of the site: notebooks, the reference of the commands from typer, and the list of results."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mkdocs does not set it

from docs.tools.notebooks import NOTEBOOKS, rendered

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs"
RESULTS = SITE / "results"
TOOLS = SITE / "tools"

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_EXAMPLE = re.compile(r"\[bold\]Example:\[/bold\] (.+)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert the generated parts, and remove links to files outside the site."""
    path = Path(page.file.abs_src_path)
    made = {
        "readme": lambda: moved(body(ROOT / "README.md"), path.parent),
        "contributing": lambda: moved(body(ROOT / "CONTRIBUTING.md"), path.parent),
        "changelog": lambda: moved(body(ROOT / "CHANGELOG.md"), path.parent).replace("\n## ", "\n### "),
        "commands": commands,
        "results": lambda: results(RESULTS),
    }
    made |= {f"notebook: {path.stem}": partial(rendered, path) for path in NOTEBOOKS}
    for name, make in made.items():
        if f"<!-- {name} -->" in markdown:
            markdown = markdown.replace(f"<!-- {name} -->", make())
    return unlinked(markdown, path.parent) if path.is_relative_to(RESULTS) else markdown


def body(path: Path) -> str:
    """The text of a page without its title."""
    return path.read_text().split("\n", 1)[1]


def moved(markdown: str, folder: Path) -> str:
    """A page of the root folder as one of the site: links follow, and those that leave the site become words."""
    markdown = _LINK.sub(lambda found: found.group(0).replace("](docs/", "]("), markdown)
    return unlinked(markdown, folder)


def commands() -> str:
    """The reference of every command, as typer writes it."""
    call = [sys.executable, "-m", "typer", "ifcomp.cli.main", "utils", "docs", "--name", "ifcomp"]
    text = subprocess.run(call, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    text = _EXAMPLE.sub(r"**Example:** `\1`", text)
    return text.split("\n", 1)[1]  # the page has its own title


def results(folder: Path) -> str:
    """A list of the pages of results, then of the raw numbers."""
    pages = sorted(path for path in folder.glob("**/*.md") if path != folder / "index.md")
    raw = sorted(path for path in folder.glob("**/*") if path.suffix in (".json", ".csv", ".parquet"))
    lines = [f"- [{_title(path)}]({path.relative_to(folder).as_posix()})" for path in pages]
    lines += ["", "Raw numbers:", ""] if raw else []
    lines += [f"- [{path.relative_to(folder).as_posix()}]({path.relative_to(folder).as_posix()})" for path in raw]
    return (
        "\n".join(lines) if pages or raw else "There are no results here yet: see `experiments/` for how to run them."
    )


def unlinked(markdown: str, folder: Path) -> str:
    """The text with links to files that the site does not have turned into their words."""

    def shown(match: re.Match[str]) -> str:
        picture, words, target = match.group(1), match.group(2), match.group(3)
        place = (folder / target).resolve()
        if "://" in target or (place.exists() and place.is_relative_to(SITE) and not place.is_relative_to(TOOLS)):
            return match.group(0)
        return f"({words})" if picture else words

    return _LINK.sub(shown, markdown)


def _title(path: Path) -> str:
    heading = re.search(r"^# (.+)$", path.read_text(), re.MULTILINE)
    return heading.group(1) if heading else path.stem
