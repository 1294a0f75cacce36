"""Hostile file and class names are plain text on the terminal and in spreadsheets; output files are anonymous."""

from __future__ import annotations

import csv
import os
import socket
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from project import Project, ifcomp
from safetensors.torch import save_file

from ifcomp.cli.output import escape_control, paragraph, table
from ifcomp.tables import write_csv

FORMULAS = ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", " =1", "\uff1d1", "\n=1")
PLAIN = ("plain", "-5", "3.5", "a=b", "", '"quoted", with a comma')


def test_cells_never_start_a_formula(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    names = [*FORMULAS, *PLAIN]
    write_csv(path, pd.DataFrame({"name": names, "value": np.arange(len(names)) - 5.5}))
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    shown = [name.replace("\t", "\\t").replace("\n", "\\n") for name in FORMULAS]
    assert [row["name"] for row in rows] == [*(f"'{name}" for name in shown), *PLAIN]
    assert [float(row["value"]) for row in rows] == (np.arange(len(names)) - 5.5).tolist()


def test_cells_never_start_a_formula_after_a_semicolon(tmp_path: Path) -> None:
    """In many countries spreadsheets separate cells of a CSV file by semicolons."""
    path = tmp_path / "a.csv"
    write_csv(
        path, pd.DataFrame({"index": [0, 1, 2, 3], "name": ["a;=cmd|' /C calc'!A0", "a; +1;@2", 'a";=1', "a;b=1"]})
    )
    cells = [cell.strip() for line in path.read_text().splitlines() for cell in line.split(";")]
    assert len(cells) == 10
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]
    assert pd.read_csv(path)["name"][3] == "a;b=1"


def test_file_names_in_an_audit_are_text(project: Project) -> None:
    x, y = project.arrays("train")
    for index, (image, label) in enumerate(zip(x, y, strict=True)):
        folder = Path("images") / f"={label}\x1b[31m\u202e"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * image[0]).round().byte().numpy()).save(folder / f"{index:03}.png")
    assert ifcomp("fit", project.model, "folder:images", "--grey", "--weights", "net.safetensors").exit_code == 0
    result = ifcomp("audit", "run.ifcomp", "--top", "3")
    assert result.exit_code == 0, result.output
    assert "\x1b[31m" not in result.output
    assert "\u202e" not in result.output
    assert "\\x1b[" in result.output
    names = pd.read_csv("audit.csv")["name"]
    assert names.str.startswith("'=").all()
    paths = {str(path.relative_to("images")).replace("\x1b", "\\x1b") for path in Path("images").rglob("*.png")}
    assert set(names.str.slice(1)) == paths


def test_every_row_of_a_table_is_one_line(tmp_path: Path) -> None:
    """A carriage return in a name would start a row, and the row could start with a formula."""
    path = tmp_path / "a.csv"
    names = ["a\r=cmd|' /C calc'!A0", "a\n=1", "a\x00\x1b[2J", "a\u2028=1", "a\x85b"]
    write_csv(path, pd.DataFrame({"name": names, "=1\r=2": 0}))
    text = path.read_bytes().decode()
    assert len(text.splitlines()) == len(names) + 1
    assert text.isascii()
    assert text.splitlines()[0] == "name,'=1\\r=2"
    assert text.splitlines()[1] == "a\\r=cmd|' /C calc'!A0,0"


def test_error_messages_have_no_control_characters() -> None:
    result = ifcomp("ood", "run\x1b]0;owned\x07.ifcomp", "digits")
    assert result.exit_code == 2
    assert "\x1b]0" not in result.output
    assert "\\x1b]0;owned\\x07" in result.output


def test_line_breaks_in_names_are_not_printed(project: Project) -> None:
    """Names of tensors, classes, columns and files in messages are in one line."""
    name, model = "a\nError: b\u2028c", ["--model", project.model, "--weights", "net.safetensors"]
    x, y = project.arrays("train")
    save_file({**project.network().state_dict(), name: x[:1]}, "more.safetensors")
    np.savez("classes.npz", x=x, y=y % 2, classes=np.array([name, "b"]))
    np.savez("other.npz", **{name: x.numpy()})
    pd.DataFrame({name: ["text"], "label": [1]}).to_csv("table.csv", index=False)
    Path("images").mkdir()
    Path("images", f"{name}.png").write_text("no image")
    messages = [ifcomp("audit", "--model", project.model, "--weights", "more.safetensors", "--data", "train.npz")]
    messages += [ifcomp("audit", *model, "--data", data) for data in ("classes.npz", "other.npz", "table.csv")]
    messages.append(ifcomp("audit", *model, "--data", "folder:images"))
    for result, lines in zip(messages, (2, 1, 1, 1, 1), strict=True):
        assert result.exit_code == 2
        assert "Error: b" in result.stderr
        shown = result.stderr.replace("printed by the user's code\n", "")
        assert len(shown.strip().splitlines()) == lines, shown


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\ud800", "none/x", "x" * 300])
def test_impossible_file_names(run: Project, name: str) -> None:
    for arguments in (["audit", name], ["audit", "run.ifcomp", "--out", f"{name}.csv"], ["ood", "run.ifcomp", name]):
        result = ifcomp(*arguments)
        assert (result.exit_code, isinstance(result.exception, SystemExit)) == (2, True), (arguments[:2], result.output)


@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b31m", "a\rb", "\u202eevil", "\ud800", "\x00", "\u200b"])
def test_control_characters_are_escaped(text: str) -> None:
    shown = escape_control(f"name {text}")
    assert shown.isprintable()
    assert shown.startswith("name ")
    assert escape_control(shown) == shown
    assert paragraph(text).plain == escape_control(text)
    assert "\x1b" not in str(next(iter(table([text], [[text]]).columns)).header)


def test_other_characters_are_kept() -> None:
    assert escape_control("Größe 漢字 🙂 [bold]x[/bold]\n\tthere") == "Größe 漢字 🙂 [bold]x[/bold]\n\tthere"


@pytest.mark.filterwarnings("ignore:100 held-out examples are few")
def test_output_files_contain_no_user_host_or_folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "zaphod")
    monkeypatch.setenv("LOGNAME", "zaphod")
    monkeypatch.setenv("HOME", "/home/zaphod")
    monkeypatch.setattr(socket, "gethostname", lambda: "heartofgold")
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    for arguments in (
        project.fit_arguments(),
        ["score", "run.ifcomp", "--out", "scores.parquet"],
        ["audit", "run.ifcomp", "--report", "audit.html"],
        ["ood", "run.ifcomp", "npz:inverted.npz", "--held-out", "npz:valid.npz"],
        ["calibrate", "run.ifcomp", "npz:valid.npz"],
        ["report", "run.ifcomp"],
        ["prune", "run.ifcomp", "--drop", "0.1"],
        ["explain", "run.ifcomp", "3"],
    ):
        result = ifcomp(*arguments)
        assert result.exit_code == 0, result.output
    written = [path for path in Path().rglob("*") if path.is_file() and path not in before and path.suffix != ".pyc"]
    assert {".ifcomp", ".parquet", ".csv", ".html"} <= {path.suffix for path in written}
    secrets = [b"zaphod", b"heartofgold", os.fsencode(project.folder), os.fsencode(project.folder.parent.name)]
    assert [(path, word) for path in written for word in secrets if word in path.read_bytes()] == []
