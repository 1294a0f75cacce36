"""Untrusted text: arguments of the command line, and names in a report."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from typer.testing import CliRunner

from fuzz.common import examples, fitted, model
from fuzz.drawing import Draw
from ifcomp import IFComp
from ifcomp.cli import options
from ifcomp.cli.main import app
from ifcomp.cli.model import read_weights
from ifcomp.cli.output import escape_control
from ifcomp.data.factories import is_factory_name
from ifcomp.data.sources import SourceOptions, open_source, source_kind
from ifcomp.errors import ModelError
from ifcomp.memory import as_bytes
from ifcomp.report import Preview, build_report
from ifcomp.tasks.audit import LabelAudit

#: Parsers of command-line arguments. Factories are recognised but not called, because a call runs code by design.
PARSERS: tuple[Callable[[str], object], ...] = (
    lambda text: options.parse_damping(text, None),
    as_bytes,
    lambda text: SourceOptions(mean=options.parse_numbers("--mean", text), std=options.parse_numbers("--std", text)),
    lambda text: IFComp(model(), layers=options.parse_layers(text)).coverage,
    lambda text: is_factory_name(text) or source_kind(text),
    lambda text: is_factory_name(text) or open_source(text),
    lambda text: open_source(f"npz:{text}"),
    lambda text: open_source(f"parquet:{text}"),
    lambda text: open_source(f"csv:{text}"),
    lambda text: open_source(f"folder:none/{text}"),
    read_weights,
    lambda text: IFComp.load(text, model()),
    lambda text: options.DataOptions(label_column=text, feature_columns=text, mean=text, std=text).parse(),
    lambda text: escape_control(text).encode("utf-8"),
)


def words(data: bytes, folder: Path) -> None:
    """Parse a text. The first byte selects the parser."""
    PARSERS[(data[0] if data else 0) % len(PARSERS)](data[1:].decode("utf-8", "surrogateescape"))


#: Commands that fail early without a model, and options of all commands.
COMMANDS = (
    "fit",
    "score",
    "audit",
    "ood",
    "calibrate",
    "predict",
    "prune",
    "report",
    "apply",
    "estimate",
    "--version",
    "nothing",
)
OPTIONS = (
    *("--damping", "--beta", "--max-memory", "--layers", "--mean", "--std", "--max-suspects", "--data", "--drop"),
    *("--image-size", "--batch-size", "--grey", "--label-column", "--feature-columns", "--weights", "--model", "--out"),
    *(
        "--alpha",
        "--probes",
        "--json",
        "--trust-run",
        "--device",
        "--top",
        "--fisher",
        "--sua",
        "--reference",
        "--help",
    ),
)
PREFIXES = (
    "",
    "",
    "npz:",
    "parquet:",
    "csv:",
    "folder:",
    "relative:",
    "digits",
    "net:build",
    "run.ifcomp",
    "0.5",
    "-1",
    "8GB",
)


def command(data: bytes, folder: Path) -> None:
    """Run a random command line without calling factories. The exit code is 0 or 2."""
    draw = Draw(data)
    arguments = [draw.choice(COMMANDS)]
    for _ in range(draw.number(0, 6)):
        option, text = draw.choice((*OPTIONS, "")), f"{draw.choice(PREFIXES)}{draw.text() if draw.number(0, 1) else ''}"
        arguments += [part for part in (option, text) if part]
    with patch("ifcomp.cli.model.call_factory", _refuse), patch("ifcomp.data.sources.factory.call_factory", _refuse):
        result = CliRunner().invoke(app, arguments, prog_name="ifcomp")
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    assert result.exit_code in (0, 2), result.output


def _refuse(spec: str, *_: object) -> NoReturn:
    raise ModelError(f"'{spec}' is not called here.")


class _Elements(HTMLParser):
    """Tags of a page with the names of their attributes, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, list[str]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, [name for name, _ in attrs]))


def report(data: bytes, folder: Path) -> None:
    """Build a report with hostile names. It has the same elements as a report with harmless names."""
    draw = Draw(data)
    assert _page(tuple(draw.text() for _ in range(6)), folder) == _harmless(folder)


@cache
def _harmless(folder: Path) -> list[tuple[str, list[str]]]:
    return _page(("a", "b", "c", "d", "e", "f"), folder)


def _page(names: tuple[str, ...], folder: Path) -> list[tuple[str, list[str]]]:
    path = build_report(
        folder / "report.html",
        title=names[0],
        audit=_audit(),
        previews={0: Preview("text", names[1], names[2]), 1: Preview("row", {names[3]: names[1]}, names[0])},
        class_names=[names[4], names[5], names[1]],
        provenance={f"k{names[3]}": names[2]},
    )
    return _Elements(path.read_text(encoding="utf-8")).elements


@cache
def _audit() -> LabelAudit:
    return fitted().audit([examples()], progress=False)
