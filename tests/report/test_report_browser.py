"""The report in a browser: it works, loads nothing, and never runs code from user data."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_cases import EVIL_NAMES, MORE_EVIL_NAMES, AuditCase, LargeReport, make_audit, make_curve

from ifcomp.layers.inventory import Coverage, CoverageRow
from ifcomp.report import LayerNeighbours, Neighbour, OODScores, Preview, ReliabilityPair, build_report

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("ant", "bee", "cat", "dog")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium")
    if path is None or importlib.util.find_spec("playwright") is None:
        message = "these tests need chromium on the path and the Python package playwright"
        if os.environ.get("IFCOMP_REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield launched
        launched.close()


class OpenedPage:
    """A page with its console messages and requests."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.messages.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        address = path.as_uri()
        self.page.route("**/*", lambda route: route.continue_() if route.request.url == address else route.abort())
        self.page.goto(address)

    def column(self, name: str) -> list[str]:
        return [text.strip() for text in self.page.locator(f"#rows td.{name}").all_inner_texts()]

    def ranks(self) -> list[int]:
        return [int(text.replace(",", "")) for text in self.column("rank")]

    def status(self) -> str:
        return str(self.page.locator("#status").inner_text())

    def search(self, text: str) -> None:
        before = self.page.locator("#status").inner_text()
        self.page.fill("#query", text)
        self.page.wait_for_function("before => document.getElementById('status').textContent !== before", arg=before)


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[OpenedPage]:
    page = OpenedPage(browser, report)
    page.page.click("#as-table")
    yield page
    assert page.messages == []
    page.context.close()


@pytest.fixture(scope="module")
def audit() -> AuditCase:
    return make_audit(60, classes=4, suspects=30)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, audit: AuditCase) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    first = int(audit.ranked["index"].iloc[0])
    return build_report(
        tmp_path_factory.mktemp("report") / "report.html",
        title="A small report",
        audit=audit,
        calibration=ReliabilityPair(make_curve(0.1), make_curve(0.05)),
        ood=OODScores([0.1, 0.2], {"noise": [3.0, 4.0]}, 0.2),
        explanations={first: [(7, 0.25, 1), (8, 0.5, 2), (9, -1.5, 3, Preview("text", "a contradiction"))]},
        neighbours={first: [LayerNeighbours("conv", 0.8, (Neighbour(5, 2, Preview("text", "near")), Neighbour(6, 1)))]},
        previews={index: Preview("image", pixels[index], f"picture-{index:03d}.png") for index in range(60)},
        class_names=NAMES,
        coverage=Coverage((CoverageRow("0", "linear", "EKFAC", 3, True),)),
        provenance={"seed": 0},
    )


def with_ranks(audit: AuditCase) -> Any:
    """The rows of an audit, most suspicious first, with a column ``rank``."""
    return audit.ranked.assign(rank=range(1, len(audit.frame) + 1))


def sorted_ranks(audit: AuditCase, column: str, ascending: bool) -> list[int]:
    """Ranks of the suspects, sorted by a column with pandas."""
    frame = with_ranks(audit)
    suspects = frame[frame["is_suspect"]]
    return list(suspects.sort_values(column, ascending=ascending, kind="stable")["rank"])


def test_loads_without_messages_and_requests(browser: Any, report: Path) -> None:
    opened = OpenedPage(browser, report)
    opened.page.wait_for_load_state("networkidle")
    opened.page.click("#theme")
    opened.page.locator(".more").first.click()
    assert opened.messages == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [report.as_uri()]
    broken = opened.page.evaluate(
        "[...document.images].filter(image => !(image.complete && image.naturalWidth)).length"
    )
    assert (opened.page.locator("#rows img").count(), broken) == (12, 0)
    opened.context.close()


def test_starts_with_the_most_suspicious_labels(opened: OpenedPage, audit: AuditCase) -> None:
    assert opened.ranks() == list(range(1, 13))
    assert opened.status() == "Showing 1 to 12 of 30 labels, page 1 of 3."
    first = audit.ranked.iloc[0]
    assert opened.column("label")[0] == NAMES[first["label"]]
    assert opened.column("suggested")[0] == NAMES[first["suggested"]]
    assert opened.column("score")[0] == f"{first['score']:.2f}"
    assert f"picture-{first['index']:03d}.png" in opened.column("index")[0]
    assert audit.headline in opened.page.inner_text("main")


def test_sorts_by_every_number(opened: OpenedPage, audit: AuditCase) -> None:
    for column in ("index", "p_label", "p_suggested", "score", "label_complexity"):
        header = opened.page.locator(f"#table th[data-column={column}]")
        seen = []
        for _ in range(2):
            header.get_by_role("button").click()
            seen.append(header.get_attribute("aria-sort"))
            assert opened.ranks() == sorted_ranks(audit, column, seen[-1] == "ascending")[:12], column
        assert sorted(seen) == ["ascending", "descending"]
        assert opened.page.locator("#table th[aria-sort]").count() == 1


def test_sorts_by_class_name(opened: OpenedPage) -> None:
    opened.page.locator("#table th[data-column=label] button").click()
    opened.page.select_option("#size", "96")
    shown = opened.column("label")
    assert shown == sorted(shown)
    assert set(shown) == set(NAMES)


def test_keyboard(opened: OpenedPage, audit: AuditCase) -> None:
    page = opened.page
    page.focus("#export")
    for _ in range(6):  # the sixth button of the table head
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "p suggested"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    assert page.locator("#table th[data-column=p_suggested]").get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")
    assert opened.ranks() == sorted_ranks(audit, "p_suggested", True)[:12]
    for _ in range(3):  # skips the next columns
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Details"
    page.keyboard.press("Enter")
    assert page.locator("#details").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#details").is_visible()
    assert page.evaluate("document.activeElement.textContent") == "Details"


def test_skip_link_is_first(opened: OpenedPage) -> None:
    opened.page.evaluate("document.activeElement.blur()")
    opened.page.reload()
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.textContent") == "Skip to the results"
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate("document.activeElement.id") == "main"


def test_filters_by_class_and_suspects(opened: OpenedPage, audit: AuditCase) -> None:
    frame, page = with_ranks(audit), opened.page
    page.select_option("#size", "96")
    page.select_option("#given", label="bee")
    assert opened.ranks() == list(frame["rank"][frame["is_suspect"] & (frame["label"] == 1)])
    page.uncheck("#suspects")
    assert opened.ranks() == list(frame["rank"][frame["label"] == 1])
    page.select_option("#suggested", label="dog")
    assert opened.ranks() == list(frame["rank"][(frame["label"] == 1) & (frame["suggested"] == 3)])
    page.click("#clear")
    assert opened.ranks() == list(range(1, 31))


def test_confusions_are_filters(opened: OpenedPage, audit: AuditCase) -> None:
    suspects = audit.frame[audit.frame["is_suspect"]]
    counts = suspects.groupby(["label", "suggested"]).size()
    chip = opened.page.locator(".chip").first
    assert chip.locator(".count").inner_text() == str(counts.max())
    chip.click()
    assert f" of {counts.max()} labels" in opened.status()
    assert chip.get_attribute("aria-pressed") == "true"
    chip.click()
    assert " of 30 labels" in opened.status()


def test_searches_classes_indices_and_names(opened: OpenedPage, audit: AuditCase) -> None:
    frame = with_ranks(audit)
    opened.page.uncheck("#suspects")
    opened.page.select_option("#size", "96")
    opened.search("BEE")
    assert opened.ranks() == list(frame["rank"][(frame["label"] == 1) | (frame["suggested"] == 1)])
    opened.search("picture-017")
    assert opened.ranks() == list(frame["rank"][frame["index"] == 17])
    opened.search("nothing like it")
    assert opened.ranks() == []
    assert opened.status() == "No label matches. Reset the filters to see all."
    assert opened.page.locator("#export").is_disabled()
    opened.search("23")
    assert opened.ranks() == list(frame["rank"][frame["index"] == 23])


def test_pages(opened: OpenedPage) -> None:
    page = opened.page
    assert page.locator("#previous").is_disabled()
    seen = opened.ranks()
    for _ in range(2):
        page.click("#next")
        seen += opened.ranks()
    assert seen == list(range(1, 31))
    assert page.locator("#next").is_disabled()
    page.click("#first")
    assert opened.ranks()[0] == 1
    page.click("#last")
    assert opened.ranks()[0] == 25
    page.fill("#page", "2")
    page.keyboard.press("Enter")
    assert opened.ranks()[0] == 13
    page.fill("#page", "999")
    page.keyboard.press("Enter")
    assert opened.ranks()[0] == 25


def exported(opened: OpenedPage) -> list[dict[str, str]]:
    with opened.page.expect_download() as download:
        opened.page.click("#export")
    assert download.value.suggested_filename == "labels.csv"
    return list(csv.DictReader(io.StringIO(Path(download.value.path()).read_bytes().decode("utf-8-sig"), newline="")))


def test_export_is_filtered_and_sorted(opened: OpenedPage, audit: AuditCase) -> None:
    frame = audit.frame
    opened.page.select_option("#given", label="cat")
    opened.page.locator("#table th[data-column=label_complexity] button").click()
    rows = exported(opened)
    expected = frame[frame["is_suspect"] & (frame["label"] == 2)].sort_values("label_complexity", ascending=False)
    assert [int(row["index"]) for row in rows] == list(expected["index"])
    for name in ("p_label", "p_suggested", "score", "label_complexity"):
        assert [float(row[name]) for row in rows] == pytest.approx(list(expected[name]), rel=1e-5)
    assert {row["label_name"] for row in rows} == {"cat"}
    assert {row["label"] for row in rows} == {"2"}
    assert {row["is_suspect"] for row in rows} == {"true"}
    assert [row["name"] for row in rows] == [f"picture-{index:03d}.png" for index in expected["index"]]


def test_details_show_numbers_and_training_examples(opened: OpenedPage, audit: AuditCase) -> None:
    page = opened.page
    page.locator(".more").first.click()
    first = audit.ranked.iloc[0]
    body = page.inner_text("#details-body")
    assert page.inner_text("#details-heading") == f"Example {first['index']}"
    assert f"Labelled {NAMES[first['label']]}, looks like {NAMES[first['suggested']]}." in body
    assert f"{first['score']:.5g} nats" in body
    assert "Nearest examples in layer conv (weight 0.80)" in body
    near = page.locator(".examples.neighbours li").all_inner_texts()
    assert ["near" in near[0], "cat #5" in near[0], "bee #6" in near[1], len(near)] == [True, True, True, 2]
    supporting = page.locator(".examples.supporting li").all_inner_texts()
    contradicting = page.locator(".examples.contradicting li").all_inner_texts()
    assert ["#8" in supporting[0], "#7" in supporting[1], len(supporting)] == [True, True, 2]
    assert "influence +0.5" in supporting[0]
    assert "a contradiction" in contradicting[0]
    assert "influence -1.5" in contradicting[0]
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#details-heading") == f"Example {audit.ranked['index'].iloc[1]}"
    assert page.locator(".examples").count() == 0
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#details-heading") == f"Example {first['index']}"
    page.click("#details-close")
    assert not page.locator("#details").is_visible()


def test_dark_mode_follows_the_system_and_the_button(browser: Any, report: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).map(Number)"
    for scheme, dark in (("light", False), ("dark", True)):
        opened = OpenedPage(browser, report, color_scheme=scheme)
        button = opened.page.get_by_role("button", name="Dark mode")
        for expected in (dark, not dark, dark):
            assert button.get_attribute("aria-pressed") == str(expected).lower()
            assert (_luminance(opened.page.evaluate(background)[:3]) < 0.2) == expected
            button.click()
        assert opened.messages == []
        opened.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_text(browser: Any, report: Path, scheme: str) -> None:
    """Every text has a contrast of at least 4.5 (WCAG 2), computed from resolved colours."""
    opened = OpenedPage(browser, report, color_scheme=scheme)
    pairs = opened.page.evaluate("""() => {
        const colours = new Set();
        const parse = (color) => {
            const canvas = document.createElement("canvas").getContext("2d");
            canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
            return [...canvas.getImageData(0, 0, 1, 1).data];
        };
        for (const node of document.querySelectorAll("body *")) {
            const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
            if (!hasText || !node.checkVisibility() || node.closest("script, :disabled, dialog, option")) continue;
            let behind = node;
            while (behind && parse(getComputedStyle(behind).backgroundColor)[3] < 200) behind = behind.parentElement;
            const style = getComputedStyle(node);
            const front = parse(node instanceof SVGElement ? style.fill : style.color);
            const back = parse(getComputedStyle(behind).backgroundColor);
            colours.add(JSON.stringify([front.slice(0, 3), back.slice(0, 3), node.getAttribute("class")]));
        }
        return [...colours].map((pair) => JSON.parse(pair));
    }""")
    assert len(pairs) > 10
    for front, behind, name in pairs:
        light, dark = sorted((_luminance(front), _luminance(behind)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, front, behind)
    opened.context.close()


def _luminance(color: list[int]) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in np.array(color) / 255]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.parametrize("names", [EVIL_NAMES, MORE_EVIL_NAMES], ids=["escapes", "more"])
def test_evil_names_are_text(browser: Any, tmp_path: Path, names: tuple[str, ...]) -> None:
    audit = make_audit(48, classes=len(names), suspects=48)
    audit = replace(audit, settings={names[0]: names[1]}, descriptions={"score": names[2]})
    index = audit.ranked["index"].tolist()
    previews = {at: Preview("text", names[at % 6], names[(at + 1) % 6]) for at in index}
    previews |= {at: Preview("row", {names[1]: names[0]}, names[2]) for at in index[::2]}
    path = build_report(
        tmp_path / "evil.html",
        title=names[3],
        audit=audit,
        calibration=ReliabilityPair(make_curve(0.1), make_curve(0.05), names[0], names[2]),
        ood=OODScores([1.0], {names[0]: [2.0]}, 1.0, names[1]),
        explanations={at: [(1, 1.0, 0, Preview("text", names[0], names[1]))] for at in index},
        previews=previews,
        class_names=names,
        provenance={names[1]: names[0]},
        coverage=Coverage((CoverageRow(names[0], names[1], names[2], 3, False),)),
    )
    opened = OpenedPage(browser, path)
    opened.page.click("#as-table")
    opened.page.select_option("#size", "96")
    shown = opened.page.locator("#rows td.label").all_text_contents()
    assert [text.replace("\udcff", "\ufffd") for text in shown] == [
        names[label].replace("\udcff", "\ufffd") for label in audit.ranked["label"]
    ]
    for button in range(4):
        opened.page.locator(".more").nth(button).click()
        opened.page.click("#details-close")
    opened.search(names[0][:8])
    opened.page.click("#clear")
    opened.page.wait_for_timeout(200)
    assert opened.page.evaluate("window.pwned") is None
    assert opened.page.evaluate("document.querySelectorAll('script').length") == 2
    assert opened.page.title() == names[3]
    assert opened.messages == []
    assert [url for url in opened.requests if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
    rows = exported(opened)
    assert {row["label_name"] for row in rows} >= {names[0], names[2], f"'{names[4]}"}
    assert not any(value.startswith(("=", "+", "@")) for row in rows for value in row.values())
    opened.context.close()


def test_exported_text_is_not_a_formula(browser: Any, tmp_path: Path) -> None:
    formulas = ["=1+1", "+1-800", "-2+3", "@SUM(A1)", "\t=1", " =1", "\uff1d1"]
    others = ["-5", '"a", b', "plain", "two\nlines", "3.5"]
    names = formulas + others
    audit = make_audit(len(names), classes=len(names), suspects=len(names))
    frame = audit.frame.assign(label=np.arange(len(names)), score=-np.arange(len(names)))
    path = build_report(tmp_path / "r.html", title="t", audit=replace(audit, frame=frame), class_names=names)
    opened = OpenedPage(browser, path)
    assert [row["label_name"] for row in exported(opened)] == [*(f"'{name}" for name in formulas), *others]
    opened.context.close()


def test_large_report_has_few_elements(browser: Any, large_report: LargeReport) -> None:
    audit, opened = large_report.audit, OpenedPage(browser, large_report.path)
    page = opened.page
    page.click("#as-table")
    count = "document.querySelectorAll('*').length"
    assert page.locator("#rows tr").count() == 12
    assert page.evaluate(count) < 1000
    page.click("#last")
    assert opened.ranks() == list(range(99_997, 100_001))
    page.locator("#table th[data-column=p_label] button").click()
    assert opened.ranks() == list(with_ranks(audit).nlargest(12, "p_label")["rank"])
    page.select_option("#given", "7")
    assert f" of {(audit.frame['label'] == 7).sum():,} labels" in opened.status()
    opened.search("4711")
    assert len(opened.ranks()) <= 1
    page.click("#clear")
    assert len(exported(opened)) == 100_000
    page.select_option("#size", "96")
    assert page.evaluate(count) < 6000
    assert opened.messages == []
    opened.context.close()


@pytest.mark.parametrize("kind", ["image", "text", "row", "none"])
def test_no_horizontal_scrolling_on_a_phone(browser: Any, tmp_path: Path, kind: str) -> None:
    audit = make_audit(30)
    contents = {"image": np.zeros((8, 8)), "text": "unbroken" * 40, "row": {"a" * 50: "b" * 50, "c": 1.5}}
    previews = {index: Preview(kind, contents[kind], "n" * 80) for index in range(30)} if kind != "none" else {}  # type: ignore[arg-type]
    path = build_report(
        tmp_path / "r.html",
        title="long" * 30,
        audit=audit,
        previews=previews,
        class_names=["w" * 60, "b", "c", "d"],
        calibration=ReliabilityPair(make_curve(0.1), make_curve(0.05)),
        coverage=Coverage((CoverageRow("layer." * 15, "linear", "EKFAC", 3, True),)),
        provenance={"command": "x" * 200},
    )
    opened = OpenedPage(browser, path)
    opened.page.set_viewport_size({"width": 390, "height": 844})
    opened.page.reload()
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
    assert opened.page.locator("#as-cards").get_attribute("aria-pressed") == "true"
    assert not opened.page.locator("#table thead").is_visible()
    opened.page.select_option("#sort", "p_label")
    assert opened.ranks() == sorted_ranks(audit, "p_label", False)[:12]
    opened.page.click("#direction")
    assert opened.ranks() == sorted_ranks(audit, "p_label", True)[:12]
    opened.page.locator(".more").first.click()
    assert opened.page.evaluate("document.getElementById('details-body').scrollWidth <= innerWidth")
    opened.context.close()


def test_roles_for_screen_readers(opened: OpenedPage) -> None:
    for layout in ("#as-table", "#as-cards"):
        opened.page.click(layout)
        table = opened.page.get_by_role("table", name="Suspicious labels")
        assert table.get_by_role("row").count() == (13 if layout == "#as-table" else 12)
        assert table.get_by_role("row").last.get_by_role("cell").count() == (9 if layout == "#as-table" else 8)
    assert opened.page.get_by_role("search").get_by_label("Given label").count() == 1
    assert opened.page.get_by_role("status").inner_text() == opened.status()
    assert opened.page.get_by_role("img", name="Reliability diagram").count() == 1
