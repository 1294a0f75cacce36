"""Names that others chose reach neither the terminal nor a spreadsheet as anything but text; files name no one."""

from __future__ import annotations

import csv
import os
import socket
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from workshop import Workshop, ifcomp

from ifcomp.cli.output import paragraph, table, visible
from ifcomp.scores import write_csv

FORMULAS = ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", " =1", "\uff1d1", "\n=1")
PLAIN = ("plain", "-5", "3.5", "a=b", "", '"quoted", with a comma')


def test_cells_never_start_a_formula(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    names = [*FORMULAS, *PLAIN]
    write_csv(path, pd.DataFrame({"name": names, "value": np.arange(len(names)) - 5.5}))
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [*(f"'{name}" for name in FORMULAS), *PLAIN]
    assert [float(row["value"]) for row in rows] == (np.arange(len(names)) - 5.5).tolist()


def test_names_of_files_in_an_audit_are_text(workshop: Workshop) -> None:
    x, y = workshop.arrays("train")
    for index, (image, label) in enumerate(zip(x, y, strict=True)):
        folder = Path("images") / f"={label}\x1b[31m\u202e"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * image[0]).round().byte().numpy()).save(folder / f"{index:03}.png")
    assert ifcomp("fit", workshop.model, "folder:images", "--grey", "--weights", "net.safetensors").exit_code == 0
    found = ifcomp("audit", "run.ifcomp", "--top", "3")
    assert found.exit_code == 0, found.output
    assert "\x1b[31m" not in found.output
    assert "\u202e" not in found.output
    assert "\\x1b[" in found.output
    names = pd.read_csv("audit.csv")["name"]
    assert names.str.startswith("'=").all()
    assert set(names.str.slice(1)) == {str(path.relative_to("images")) for path in Path("images").rglob("*.png")}


def test_errors_do_not_steer_the_terminal() -> None:
    found = ifcomp("ood", "run\x1b]0;owned\x07.ifcomp", "digits")
    assert found.exit_code == 2
    assert "\x1b]0" not in found.output
    assert "\\x1b]0;owned\\x07" in found.output


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\ud800", "none/x", "x" * 300])
def test_names_that_no_file_can_have_end_with_2(run: Workshop, name: str) -> None:
    for arguments in (["audit", name], ["audit", "run.ifcomp", "--out", f"{name}.csv"], ["ood", "run.ifcomp", name]):
        found = ifcomp(*arguments)
        assert (found.exit_code, isinstance(found.exception, SystemExit)) == (2, True), (arguments[:2], found.output)


@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b31m", "a\rb", "\u202eevil", "\ud800", "\x00", "\u200b"])
def test_what_steers_a_terminal_is_shown_as_an_escape(text: str) -> None:
    shown = visible(f"name {text}")
    assert shown.isprintable()
    assert shown.startswith("name ")
    assert visible(shown) == shown
    assert paragraph(text).plain == visible(text)
    assert "\x1b" not in str(next(iter(table([text], [[text]]).columns)).header)


def test_other_characters_stay() -> None:
    assert visible("Größe 漢字 🙂 [bold]x[/bold]\n\tthere") == "Größe 漢字 🙂 [bold]x[/bold]\n\tthere"


def test_files_say_nothing_about_who_and_where(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "zaphod")
    monkeypatch.setenv("LOGNAME", "zaphod")
    monkeypatch.setenv("HOME", "/home/zaphod")
    monkeypatch.setattr(socket, "gethostname", lambda: "heartofgold")
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    for arguments in (
        workshop.fit_arguments(),
        ["score", "run.ifcomp", "--out", "scores.parquet"],
        ["audit", "run.ifcomp", "--report", "audit.html"],
        ["ood", "run.ifcomp", "npz:strange.npz"],
        ["calibrate", "run.ifcomp", "npz:valid.npz"],
        ["report", "run.ifcomp", "--held-out", "npz:valid.npz", "--strange", "npz:strange.npz"],
        ["prune", "run.ifcomp", "--drop", "0.1"],
    ):
        found = ifcomp(*arguments)
        assert found.exit_code == 0, found.output
    written = [path for path in Path().rglob("*") if path.is_file() and path not in before and path.suffix != ".pyc"]
    assert {".ifcomp", ".json", ".parquet", ".csv", ".html"} <= {path.suffix for path in written}
    secrets = [b"zaphod", b"heartofgold", os.fsencode(workshop.folder), os.fsencode(workshop.folder.parent.name)]
    assert [(path, word) for path in written for word in secrets if word in path.read_bytes()] == []
