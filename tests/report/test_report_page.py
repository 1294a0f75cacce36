"""The HTML, read with independent parsers."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_cases import EVIL_NAMES, MORE_EVIL_NAMES, LargeReport, make_audit, make_curve

from ifcomp.errors import StorageError
from ifcomp.layers.inventory import Coverage, CoverageRow
from ifcomp.report import (
    LayerNeighbours,
    Neighbour,
    OODExample,
    OODScores,
    Preview,
    ReliabilityPair,
    build_report,
    collect,
    current_provenance,
    render,
)


class Page(HTMLParser):
    """Elements with their attributes, and the texts by tag."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def render_report(names: tuple[str, ...]) -> str:
    """Render a report in which all strings of the user are among the names."""
    audit = make_audit(60, classes=len(names))
    previews = {index: Preview("text", names[index % len(names)], names[index % 3]) for index in range(60)}
    previews |= {index: Preview("row", {names[0]: names[1]}, names[2]) for index in range(0, 60, 3)}
    suspect = int(audit.ranked["index"].iloc[0])
    return render(
        collect(
            title=names[3],
            audit=replace(audit, headline=names[0], settings={names[0]: names[1]}, descriptions={"score": names[2]}),
            calibration=ReliabilityPair(make_curve(0.1), make_curve(0.05), names[0], names[1]),
            ood=OODScores([1.0, 2.0], {names[0]: [3.0], names[2]: [4.0]}, 2.0, names[1], _gallery(names)),
            explanations={suspect: [(5, 1.0, 0, Preview("text", names[0], names[1]))]},
            neighbours={suspect: [LayerNeighbours(names[0], 1.0, (Neighbour(5, 0, Preview("text", names[1])),))]},
            previews=previews,
            class_names=names,
            provenance={names[1]: names[2]},
            coverage=Coverage((CoverageRow(names[0], names[1], names[2], 3, False),)),
            predictions=audit.frame["suggested"],
            apply_command=names[2],
        )
    )


def _gallery(names: tuple[str, ...]) -> list[OODExample]:
    near = (Neighbour(3, 2, Preview("text", names[1], names[0])), Neighbour(4, 1))
    return [
        OODExample(names[0], 0, 4.0, 1, 0.5, Preview("row", {names[1]: names[0]}, names[2]), near),
        OODExample(names[1], 1, 3.0, 0, 0.5, Preview("image", [[0, 1]], names[3]), near),
    ]


def test_policy_allows_only_our_style_and_script() -> None:
    page = Page(render_report(("a", "b", "c", "d")))
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in (page.texts["script"][-1], page.texts["style"][0])
    ]
    assert policy == (
        f"default-src 'none'; script-src {digests[0]}; style-src {digests[1]}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def test_no_inline_handlers_and_no_remote_resources() -> None:
    page = Page(render_report(("a", "b", "c", "d")))
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "style", tag
            if name in ("src", "href", "action", "srcset", "xlink:href"):
                assert value is not None
                assert value.startswith(("#", "data:")), (tag, name, value)
    style = page.texts["style"][0]
    assert "url(" not in style
    assert "@import" not in style
    assert {tag for tag, _ in page.elements}.isdisjoint({"iframe", "object", "embed", "base"})


@pytest.mark.parametrize("names", [EVIL_NAMES, MORE_EVIL_NAMES], ids=["escapes", "more"])
def test_evil_names_change_no_element(names: tuple[str, ...]) -> None:
    harmless, evil = Page(render_report(tuple("abcdef"))), Page(render_report(names))
    assert [tag for tag, _ in evil.elements] == [tag for tag, _ in harmless.elements]
    assert [sorted(attributes) for _, attributes in evil.elements] == [
        sorted(attributes) for _, attributes in harmless.elements
    ]
    assert evil.texts["script"][-1] == harmless.texts["script"][-1]
    payload = json.loads(evil.texts["script"][0])
    assert tuple(payload["classes"]) == names
    assert names[3] in evil.texts["h1"][0]


def test_json_cannot_end_its_script_element() -> None:
    source = render_report(EVIL_NAMES)
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', source, re.DOTALL)
    assert embedded is not None
    assert not set("<>&\u2028\u2029") & set(embedded[1])
    assert embedded[1].isascii()


def test_names_with_invalid_unicode(tmp_path: Path) -> None:
    path = build_report(
        tmp_path / "r.html", title="\udcff title", audit=make_audit(classes=2), class_names=["\udcff", "b"]
    )
    text = path.read_text(encoding="utf-8")
    assert "? title" in text
    assert json.loads(Page(text).texts["script"][0])["classes"] == ["\udcff", "b"]


@pytest.mark.parametrize("part", ["audit", "calibration", "ood", "coverage"])
def test_each_part_alone(part: str) -> None:
    parts = {
        "audit": make_audit(),
        "calibration": ReliabilityPair(make_curve(0.1), make_curve(0.05)),
        "ood": OODScores([0.1, 0.2], {"new": [0.3]}, 0.2),
        "coverage": Coverage((CoverageRow("0", "linear", "EKFAC", 3, True),)),
    }
    source = render(collect(title="t", **{part: parts[part]}))  # type: ignore[arg-type]
    identifiers = {attributes.get("id") for _, attributes in Page(source).elements}
    assert ("table" in identifiers) == (part == "audit")
    assert ("data" in identifiers) == (part == "audit")
    assert ("reliability-1-title" in identifiers) == (part == "calibration")
    assert ("ood-title" in identifiers) == (part == "ood")
    assert ("Coverage of every layer" in source) == (part == "coverage")
    for other, hint in {
        "audit": "audit=ifc.audit(loader)",
        "calibration": "calibration=ifc.calibrate(held_out)",
        "ood": "ood=gate.table(new)",
        "coverage": "coverage=ifc.coverage",
    }.items():
        assert (hint in source) == (other != part)


def test_references_have_targets() -> None:
    page = Page(render_report(("a", "b", "c", "d")))
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    for _, attributes in page.elements:
        for name in ("aria-labelledby", "href"):
            for target in (attributes.get(name) or "").removeprefix("#").split():
                if not target.startswith("data:"):
                    assert target in identifiers, target


def test_gallery_of_flagged_inputs() -> None:
    ood = OODScores([1.0], {"new": [4.0]}, 1.0, "energy", _gallery(tuple("abcdef")))
    source = render(collect(title="t", ood=ood, class_names=list("abcdef")))
    assert "The model says <b><bdi>b</bdi></b> with 0.50." in source
    assert '<bdi>c</bdi><span class="number"> #3</span>' in source
    assert "Score 4, threshold 1, #0" in source
    assert len([name for name in Page(source).all("ul") if name.get("class") == "nearest"]) == 2


def test_confusion_matrices() -> None:
    audit = make_audit(60, classes=4)
    frame = audit.frame
    cells = Page(render(collect(title="t", audit=audit, predictions=frame["label"]))).all("td")
    classes = [(cell.get("class") or "").partition("-")[0] for cell in cells]
    assert classes.count("diagonal") == 8  # of two tables
    assert classes.count("shade") == 24
    many = replace(audit, frame=frame.assign(label=frame["label"] + 30))
    source = render(collect(title="t", audit=many, predictions=frame["label"]))
    assert source.count("There are too many classes for a table.") == 2


def test_the_command_that_carries_out_decisions() -> None:
    assert "<code>ifcomp apply decisions.csv --data DATA --out FILE</code>" in render(
        collect(title="t", audit=make_audit())
    )
    shown = render(collect(title="t", audit=make_audit(), apply_command="ifcomp apply d.csv --data csv:a.csv"))
    assert "<code>ifcomp apply d.csv --data csv:a.csv</code>" in shown


def test_provenance() -> None:
    import torch

    provenance = current_provenance(command="ifcomp report", seed=3)
    assert provenance["torch"] == torch.__version__ or torch.__version__.startswith(provenance["torch"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", provenance["date"])
    assert (provenance["command"], provenance["seed"]) == ("ifcomp report", "3")


def test_report_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="gone"):
        build_report(tmp_path / "gone" / "r.html", title="t", audit=make_audit())


def test_file_size_of_a_large_report(large_report: LargeReport) -> None:
    assert large_report.path.stat().st_size < 12e6
    embedded = re.search(r'id="data">(.*?)</script>', large_report.path.read_text(), re.DOTALL)
    assert embedded is not None
    payload = json.loads(embedded[1])
    assert len(payload["shown"]) == 200
    assert len(payload["columns"]["rank"]) == 100_000


def test_templates_are_in_the_wheel(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = (
        "import sys; from hatchling.builders.wheel import WheelBuilder; "
        "print(list(WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=['standard'])))"
    )
    subprocess.run([sys.executable, "-c", script, str(root), str(tmp_path)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    templates = {path.name for path in (root / "src/ifcomp/report/templates").iterdir()}
    assert templates == {"report.html.jinja", "charts.html.jinja", "parts.html.jinja", "report.css", "report.js"}
    assert {f"ifcomp/report/templates/{name}" for name in templates} <= packed
