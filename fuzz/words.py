"""Words of others: what the command line parses, and names that end up in a report."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

from fuzz.common import examples, fitted, model
from fuzz.drawing import Draw
from ifcomp import IFComp
from ifcomp.cli import options
from ifcomp.cli.models import read_weights
from ifcomp.cli.output import visible
from ifcomp.memory import as_bytes
from ifcomp.report import Preview, build_report
from ifcomp.sources import SourceOptions, open_source
from ifcomp.sources.factories import is_factory
from ifcomp.sources.opening import kind_of
from ifcomp.tasks.mislabel import LabelAudit, audit_labels

#: What a text may be taken for. Names of functions are recognised, but not called: that would run code by design.
PARSERS: tuple[Callable[[str], object], ...] = (
    options.damping,
    as_bytes,
    lambda text: SourceOptions(mean=options.numbers("--mean", text), std=options.numbers("--std", text)),
    lambda text: IFComp(model(), layers=options.layers(text)).coverage,
    lambda text: is_factory(text) or kind_of(text),
    lambda text: is_factory(text) or open_source(text),
    lambda text: open_source(f"npz:{text}"),
    lambda text: open_source(f"parquet:{text}"),
    lambda text: open_source(f"folder:none/{text}"),
    read_weights,
    lambda text: IFComp.load(text, model()),
    lambda text: options.DataChoice(label_column=text, feature_columns=text, mean=text, std=text).parsed(),
    lambda text: visible(text).encode("utf-8"),
)


def words(data: bytes, folder: Path) -> None:
    """Everything that the command line parses: the first byte says what the rest is taken for."""
    PARSERS[(data[0] if data else 0) % len(PARSERS)](data[1:].decode("utf-8", "surrogateescape"))


class _Elements(HTMLParser):
    """Tags with the names of their attributes, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [name for name, _ in attrs]))


def report(data: bytes, folder: Path) -> None:
    """A page with hostile names keeps the elements of one with harmless names."""
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
    return _Elements(path.read_text(encoding="utf-8")).found


@cache
def _audit() -> LabelAudit:
    return audit_labels(fitted().score([examples()], progress=False))
