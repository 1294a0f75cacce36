"""The report in a browser: it works, loads nothing, and never runs code from user data."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_cases import EVIL_NAMES, MORE_EVIL_NAMES, AuditCase, LargeReport, make_audit, make_curve

from ifcomp.io.delimited import escape_cell
from ifcomp.layers.inventory import Coverage, CoverageRow
from ifcomp.report import (
    LayerNeighbours,
    Neighbour,
    OODExample,
    OODScores,
    Preview,
    ReliabilityPair,
    build_report,
)

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
        self.page.set_default_timeout(20_000)  # Chromium is slow if all cores are busy
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

    def decisions(self) -> list[dict[str, str]]:
        """Export the decisions and read the file."""
        with self.page.expect_download() as download:
            self.page.click("#export")
        assert download.value.suggested_filename == "decisions.csv"
        text = Path(download.value.path()).read_bytes().decode()
        assert text.startswith(("index,decision,label,given\r\n", "index,decision,label,given,name\r\n"))
        return list(csv.DictReader(io.StringIO(text, newline="")))

    def open_filters(self) -> None:
        self.page.click(".filters summary")

    def search(self, text: str) -> None:
        before = self.page.locator("#status").inner_text()
        self.page.fill("#query", text)
        self.page.wait_for_function("before => document.getElementById('status').textContent !== before", arg=before)


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[OpenedPage]:
    page = OpenedPage(browser, report)
    page.page.click("#as-table")
    page.open_filters()
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
    near = (Neighbour(5, 2, Preview("text", "near")), Neighbour(6, 1))
    flagged = OODExample("noise", 1, 4.0, 2, 0.9, Preview("image", pixels[0], "noise.png"), near)
    return build_report(
        tmp_path_factory.mktemp("report") / "report.html",
        title="A small report",
        audit=audit,
        calibration=ReliabilityPair(make_curve(0.1), make_curve(0.05)),
        ood=OODScores([0.1, 0.2], {"noise": [3.0, 4.0]}, 0.2, examples=[flagged]),
        explanations={first: [(7, 0.25, 1), (8, 0.5, 2), (9, -1.5, 3, Preview("text", "a contradiction"))]},
        neighbours={first: [LayerNeighbours("conv", 0.8, near, (2, 1, 2, int(audit.ranked["label"].iloc[0])))]},
        previews={index: Preview("image", pixels[index], f"picture-{index:03d}.png") for index in range(60)},
        class_names=NAMES,
        coverage=Coverage((CoverageRow("0", "linear", "EKFAC", 3, True),)),
        provenance={"seed": 0},
        predictions=audit.frame["label"],
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
    opened.page.locator(".why").first.click()
    assert opened.messages == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [report.as_uri()]
    broken = opened.page.evaluate(
        "[...document.images].filter(image => !(image.complete && image.naturalWidth)).length"
    )
    assert (opened.page.locator("#cards img").count(), broken) == (12, 0)
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


def test_keyboard_in_the_table(opened: OpenedPage, audit: AuditCase) -> None:
    page = opened.page
    page.focus("#table-region")
    for _ in range(6):  # the sixth button of the table head
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "p suggested"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.locator("#table th[data-column=p_suggested]").get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")
    assert opened.ranks() == sorted_ranks(audit, "p_suggested", True)[:12]
    for _ in range(6):  # skips the next columns and the decision
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Why"
    page.keyboard.press("Enter")
    assert page.locator("#details").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#details").is_visible()


# Decisions -----------------------------------------------------------------------------------------------------------


def card(page: Any, rank: int) -> Any:
    return page.locator("#cards .card").nth(rank)


def pressed(page: Any, rank: int) -> list[str]:
    return list(card(page, rank).locator("button[aria-pressed=true]").all_inner_texts())


def test_decides_by_button(browser: Any, report: Path, audit: AuditCase) -> None:
    opened = OpenedPage(browser, report)
    page, ranked = opened.page, audit.ranked
    assert page.locator("#export").is_disabled()
    assert page.locator("#undo").is_disabled()
    assert page.inner_text("#decided") == "0 of 30 suspects decided."
    for rank, name in enumerate(("Keep", "Relabel", "Drop")):
        card(page, rank).get_by_role("button", name=name).click()
        assert pressed(page, rank) == [name]
    suggested = NAMES[ranked["suggested"].iloc[1]]
    assert page.locator("#cards .stamp").all_inner_texts()[:3] == ["kept", f"→ {suggested}", "dropped"]
    assert page.inner_text("#decided") == "3 of 30 suspects decided: 1 kept, 1 relabelled, 1 dropped."
    assert page.evaluate("document.getElementById('progress').value") == 3
    given = [NAMES[label] for label in ranked["label"][:3]]
    actions = ("keep", "relabel", "drop")
    expected = sorted(zip(ranked["index"][:3].tolist(), actions, ("", suggested, ""), given, strict=True))
    assert [tuple(row.values()) for row in opened.decisions()] == [(str(index), *rest) for index, *rest in expected]
    card(page, 0).get_by_role("button", name="Keep").click()  # the same decision again removes it
    assert pressed(page, 0) == []
    assert len(opened.decisions()) == 2
    assert opened.messages == []
    opened.context.close()


def test_decides_by_key(browser: Any, report: Path, audit: AuditCase) -> None:
    opened = OpenedPage(browser, report)
    page = opened.page
    for key in "1232":
        page.keyboard.press(key)
    assert [pressed(page, rank) for rank in range(5)] == [["Keep"], ["Relabel"], ["Drop"], ["Relabel"], []]
    assert page.evaluate("document.activeElement.dataset.row") == "4"  # the next card
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("3")
    assert pressed(page, 3) == ["Drop"]
    page.keyboard.press("u")
    assert pressed(page, 3) == ["Relabel"]  # the decision before
    page.keyboard.press("u")
    page.click("#undo")
    assert [pressed(page, rank) for rank in range(4)] == [["Keep"], ["Relabel"], [], []]
    for _ in range(12):
        page.keyboard.press("ArrowRight")
    assert opened.status() == "Showing 13 to 24 of 30 labels, page 2 of 3."
    page.keyboard.press("u")
    assert opened.status() == "Showing 1 to 12 of 30 labels, page 1 of 3."  # goes to the label
    assert page.evaluate("document.activeElement.dataset.row") == "1"
    assert opened.messages == []
    opened.context.close()


def test_keys_can_be_turned_off_and_do_not_disturb_fields(browser: Any, report: Path) -> None:
    opened = OpenedPage(browser, report)
    page = opened.page
    page.uncheck("#keys")
    page.keyboard.press("1")
    assert page.inner_text("#decided") == "0 of 30 suspects decided."
    page.check("#keys")
    opened.open_filters()
    page.focus("#query")
    page.keyboard.type("123")
    page.keyboard.press("Control+1")
    assert page.input_value("#query") == "123"
    assert page.inner_text("#decided") == "0 of 30 suspects decided."
    opened.context.close()


def test_decisions_are_kept_in_the_browser_for_this_report(
    browser: Any, report: Path, tmp_path: Path, audit: AuditCase
) -> None:
    opened = OpenedPage(browser, report)
    opened.page.keyboard.press("3")
    opened.page.wait_for_function("document.querySelector('#decided').innerText.startsWith('1 of 30')")
    opened.page.reload()
    assert pressed(opened.page, 0) == ["Drop"]
    assert opened.page.locator("#undo").is_disabled()
    frame = audit.frame.assign(label=(audit.frame["label"] + 1) % 4)
    other = build_report(tmp_path / "r.html", title="A small report", audit=replace(audit, frame=frame))
    opened.page.unroute("**/*")
    opened.page.goto(other.as_uri())
    assert opened.page.inner_text("#decided") == "0 of 30 suspects decided."
    opened.page.goto(report.as_uri())
    assert pressed(opened.page, 0) == ["Drop"]
    opened.page.evaluate("localStorage.setItem(Object.keys(localStorage)[0], '{damaged')")
    opened.page.reload()
    assert opened.page.inner_text("#decided") == "0 of 30 suspects decided."
    assert opened.messages == []
    opened.context.close()


def test_a_browser_without_storage_says_so(browser: Any, report: Path) -> None:
    opened = OpenedPage(browser, report)
    opened.page.add_init_script("Storage.prototype.setItem = () => { throw new DOMException('full'); }")
    opened.page.reload()
    opened.page.keyboard.press("1")
    assert "This browser does not store decisions" in opened.page.inner_text("#decided")
    assert len(opened.decisions()) == 1
    opened.context.close()


def test_another_label_is_chosen_in_the_details(browser: Any, report: Path, audit: AuditCase) -> None:
    opened = OpenedPage(browser, report)
    page, first = opened.page, audit.ranked.iloc[0]
    other = next(name for label, name in enumerate(NAMES) if label not in (first["label"], first["suggested"]))
    page.keyboard.press("w")
    page.get_by_label("New label").select_option(label=other)
    assert opened.page.locator("#details-decision button[aria-pressed=true]").inner_text() == "Relabel"
    page.focus("#details-heading")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("1")  # decides about the second label and moves to the third
    assert page.inner_text("#details-heading") == f"Example {audit.ranked['index'].iloc[2]}"
    page.keyboard.press("u")
    assert page.inner_text("#details-heading") == f"Example {audit.ranked['index'].iloc[1]}"
    page.keyboard.press("Escape")
    decided = {"index": str(first["index"]), "decision": "relabel", "label": other, "given": NAMES[first["label"]]}
    assert opened.decisions() == [decided]
    assert opened.messages == []
    opened.context.close()


def test_views_of_decided_and_open_labels(opened: OpenedPage) -> None:
    page = opened.page
    for rank in (0, 2):
        page.locator("#rows tr").nth(rank).get_by_role("button", name="Keep").click()
    page.select_option("#show", "decided")
    assert opened.ranks() == [1, 3]
    page.select_option("#show", "open")
    assert opened.ranks()[:3] == [2, 4, 5]
    page.select_option("#show", "all")
    page.click("#last")
    page.locator("#rows tr").first.get_by_role("button", name="Drop").click()
    assert page.inner_text("#decided").startswith("2 of 30 suspects decided, and 1 other: 2 kept, 0 relabelled, 1")


NET = """
import numpy as np, torch
from sklearn.datasets import load_digits
from torch import nn

def build():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = (values[:300] for values in load_digits(return_X_y=True))
    y[:20] = (y[:20] + 1) % 10
    model, inputs = build(), torch.tensor(x / 16).float()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), torch.tensor(y)).backward()
        optimizer.step()
    torch.save(model.state_dict(), "net.pt")
    np.savez("train.npz", x=inputs.numpy(), y=y, classes=[f"digit {label}" for label in range(10)])
"""


def test_ten_decisions_are_carried_out(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audit, decide on ten cards, export, run the command on the page: the labels have changed."""
    (tmp_path / "net.py").write_text(NET)

    def run(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True, capture_output=True)

    run("net.py")
    options = ("--model", "net:build", "--weights", "net.pt", "--data", "npz:train.npz")
    run("-m", "ifcomp", "audit", *options, "--report", "audit.html")
    opened = OpenedPage(browser, tmp_path / "audit.html")
    page = opened.page
    shown = [int(text.removeprefix("#")) for text in page.locator("#cards .number").all_inner_texts()]
    suggested = page.locator("#cards .suggested bdi").all_inner_texts()
    for key in "2223122212":
        page.keyboard.press(key)
    decided = opened.decisions()
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "decisions.csv")
    command = page.inner_text(".next code")
    opened.context.close()
    assert len(decided) == 10
    assert command == "ifcomp apply decisions.csv --data npz:train.npz --out train-corrected.npz"
    run("-m", *shlex.split(command))
    with np.load(tmp_path / "train.npz") as one, np.load(tmp_path / "train-corrected.npz") as other:
        before, after = dict(one), dict(other)
    expected = before["y"].copy()
    for place in (0, 1, 2, 5, 6, 7, 9):
        expected[shown[place]] = int(suggested[place].removeprefix("digit "))
    assert (expected != before["y"]).sum() == 7
    assert after["y"].tolist() == np.delete(expected, shown[3]).tolist()
    np.testing.assert_array_equal(after["x"], np.delete(before["x"], shown[3], axis=0))


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
    page.select_option("#show", "all")
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
    opened.page.select_option("#show", "all")
    opened.page.select_option("#size", "96")
    opened.search("BEE")
    assert opened.ranks() == list(frame["rank"][(frame["label"] == 1) | (frame["suggested"] == 1)])
    opened.search("picture-017")
    assert opened.ranks() == list(frame["rank"][frame["index"] == 17])
    opened.search("nothing like it")
    assert opened.ranks() == []
    assert opened.status() == "No label matches. Reset the filters to see all."
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


def test_details_show_numbers_and_training_examples(opened: OpenedPage, audit: AuditCase) -> None:
    page = opened.page
    page.locator("#rows .why").first.click()
    first = audit.ranked.iloc[0]
    body = page.inner_text("#details-body")
    assert page.inner_text("#details-heading") == f"Example {first['index']}"
    assert f"Labelled {NAMES[first['label']]}, looks like {NAMES[first['suggested']]}." in body
    assert "Nearest in layer conv" in body
    assert "3 of the 4 nearest have another label. The first 2 are shown." in body
    assert "The votes of this layer have weight 0.80." in body
    page.click("#details-body summary")
    assert f"{first['score']:.5g} nats" in page.inner_text("#details-body")
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
    assert "The nearest examples of this label are not in this report." in page.inner_text("#details-body")
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
    opened.page.keyboard.press("2")
    opened.page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
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
    opened.open_filters()
    opened.page.select_option("#size", "96")
    shown = opened.page.locator("#rows td.label").all_text_contents()
    assert [text.replace("\udcff", "\ufffd") for text in shown] == [
        names[label].replace("\udcff", "\ufffd") for label in audit.ranked["label"]
    ]
    for button in range(4):
        opened.page.locator("#rows .why").nth(button).click()
        opened.page.click("#details-close")
    opened.search(names[0][:8])
    opened.page.click("#clear")
    opened.page.wait_for_timeout(200)
    assert opened.page.evaluate("window.pwned") is None
    assert opened.page.evaluate("document.querySelectorAll('script').length") == 2
    assert opened.page.title() == names[3]
    assert opened.messages == []
    assert [url for url in opened.requests if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
    opened.page.select_option("#size", "96")
    for _ in range(48):
        opened.page.keyboard.press("2")
    rows = opened.decisions()
    assert {row["label"] for row in rows} >= {names[0], names[2]}
    assert not any(row["label"].startswith(("=", "+", "@")) for row in rows)
    opened.context.close()


def test_suspects_without_a_preview_have_names(browser: Any, tmp_path: Path) -> None:
    audit = make_audit(20, classes=4, suspects=10)
    names = [f"dir/picture-{index:03d}.png" for index in range(19)] + [f"dir/{'long' * 60}.png"]
    ranked = audit.ranked["index"].tolist()
    order = {index: names[rank] for rank, index in enumerate([*ranked[:3], *ranked[4:], ranked[3]])}
    named = replace(audit, frame=audit.frame.assign(name=[order[index] for index in audit.frame["index"]]))
    path = build_report(
        tmp_path / "r.html",
        title="t",
        audit=named,
        class_names=NAMES,
        previews={index: Preview("image", np.zeros((8, 8)), order[index]) for index in ranked},
        max_previews=2,
        apply_command="ifcomp apply decisions.csv --data folder:train --out moves.csv",
    )
    opened = OpenedPage(browser, path)
    shown = opened.page.locator("#cards .card").all_inner_texts()
    assert all(order[index] in text for index, text in zip(ranked[:3], shown, strict=False))
    assert "Only the 2 most suspicious labels have a preview." in opened.page.inner_text("#labels")
    for _ in range(4):
        opened.page.keyboard.press("1")
    exported = {int(row["index"]): row["name"] for row in opened.decisions()}
    assert exported == {index: order[index] if len(order[index]) < 200 else "" for index in ranked[:4]}
    assert opened.messages == []
    opened.context.close()


def test_exported_text_is_not_a_formula(browser: Any, tmp_path: Path) -> None:
    formulas = ["=1+1", "+1-800", "-2+3", "@SUM(A1)", "\t=1", " =1", "\uff1d1", "a;=1", "a\n=1\x1b\u2028"]
    others = ["-5", '"a", b', "plain", "two\nlines", "3.5"]
    names = formulas + others
    audit = make_audit(len(names), classes=len(names), suspects=len(names))
    labels = np.arange(len(names))
    frame = audit.frame.assign(label=(labels + 1) % len(names), suggested=labels, score=-labels)
    path = build_report(tmp_path / "r.html", title="t", audit=replace(audit, frame=frame), class_names=names)
    opened = OpenedPage(browser, path)
    for _ in names:
        opened.page.keyboard.press("2")
    assert [row["label"] for row in opened.decisions()] == [escape_cell(name) for name in names]
    opened.context.close()


def test_large_report_has_few_elements(browser: Any, large_report: LargeReport) -> None:
    audit, opened = large_report.audit, OpenedPage(browser, large_report.path)
    page = opened.page
    page.click("#as-table")
    opened.open_filters()
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
    page.click("#as-cards")
    page.keyboard.press("2")
    assert [row["index"] for row in opened.decisions()] == [str(audit.ranked["index"].iloc[0])]
    page.select_option("#size", "96")
    assert page.evaluate(count) < 6000
    assert opened.messages == []
    opened.context.close()


def _long_example(previews: dict[int, Preview]) -> list[OODExample]:
    near = tuple(Neighbour(index, index % 2, previews.get(index)) for index in range(4))
    return [OODExample("n" * 90, 123_456, 2.0, 0, 0.5, previews.get(0), near)]


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
        class_names=["w" * 60, "unbroken-" * 9, "c", "d"],
        predictions=audit.frame["suggested"],
        ood=OODScores([1.0], {"n" * 90: [2.0]}, 1.0, examples=_long_example(previews)),
        calibration=ReliabilityPair(make_curve(0.1), make_curve(0.05)),
        coverage=Coverage((CoverageRow("layer." * 15, "linear", "EKFAC", 3, True),)),
        provenance={"command": "x" * 200},
    )
    opened = OpenedPage(browser, path)
    opened.page.set_viewport_size({"width": 390, "height": 844})
    opened.page.reload()
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
    assert opened.page.locator("#as-cards").get_attribute("aria-pressed") == "true"
    assert not opened.page.locator("#table").is_visible()
    opened.page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
    indices = audit.ranked["index"].tolist()
    opened.page.select_option("#sort", "p_label")
    numbers = opened.page.locator("#cards .number").all_inner_texts()
    assert numbers == [f"#{indices[rank - 1]}" for rank in sorted_ranks(audit, "p_label", False)[:12]]
    opened.page.click("#direction")
    numbers = opened.page.locator("#cards .number").all_inner_texts()
    assert numbers == [f"#{indices[rank - 1]}" for rank in sorted_ranks(audit, "p_label", True)[:12]]
    for node in ("#cards .card", "#cards .decide button"):
        assert opened.page.evaluate(
            "node => [...document.querySelectorAll(node)].every((part) => part.scrollWidth <= part.clientWidth + 1)",
            node,
        ), node
    opened.page.locator(".why").first.click()
    assert opened.page.evaluate("document.getElementById('details-body').scrollWidth <= innerWidth")
    assert opened.page.evaluate("document.getElementById('details-decision').scrollWidth <= innerWidth")
    opened.context.close()


def test_roles_for_screen_readers(opened: OpenedPage, audit: AuditCase) -> None:
    page, first = opened.page, audit.ranked.iloc[0]
    table = page.get_by_role("table", name="Labels to check")
    assert table.get_by_role("row").count() == 13
    assert table.get_by_role("row").last.get_by_role("cell").count() == 10
    page.click("#as-cards")
    assert table.count() == 0
    cards = page.get_by_role("list", name="Labels to check").get_by_role("listitem")
    assert cards.count() == 12
    given, suggested = NAMES[first["label"]], NAMES[first["suggested"]]
    label = f"Example {first['index']}, given {given}, suggested {suggested}, suspicion {first['score']:.2f}"
    assert cards.first.get_attribute("aria-label") == label
    decision = cards.first.get_by_role("group", name=f"Decision about example {first['index']}")
    assert decision.get_by_role("button").all_inner_texts() == ["Keep", "Relabel", "Drop"]
    assert page.get_by_role("search").get_by_label("Given label").count() == 1
    assert page.get_by_role("status").all_inner_texts() == [page.inner_text("#decided"), opened.status()]
    assert page.get_by_role("progressbar", name="Decided suspects").count() == 1
    assert page.get_by_role("img", name="Reliability diagram").count() == 2
