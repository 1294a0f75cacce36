"""``ifcomp bench``: the same as ``python -m benchmarks``, from a checkout only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ifcomp
from benchmarks.page import page
from benchmarks.suites import SUITES
from ifcomp.cli.main import app

ROOT = Path(__file__).parents[2]


def test_suites_are_listed() -> None:
    found = CliRunner().invoke(app, ["bench", "--list"])
    assert found.exit_code == 0
    assert all(f"{name} (about {suite.minutes:g} min): " in found.stdout for name, suite in SUITES.items())


def test_an_unknown_suite_is_refused() -> None:
    found = CliRunner().invoke(app, ["bench", "speed"])
    assert found.exit_code == 2
    assert "There is no suite speed" in found.stderr


@pytest.mark.parametrize(("module", "folder", "found"), [("benchmarks", ROOT, True), ("ifcomp", ROOT.parent, False)])
def test_it_runs_from_a_checkout(module: str, folder: Path, found: bool, tmp_path: Path) -> None:
    source = str(Path(ifcomp.__file__).parents[1])
    arguments = ["last", "--tiny", "--rounds", "1", "--threads", "1", "--results", str(tmp_path)]
    arguments += ["--note", "Some note."]
    ended = subprocess.run(
        [sys.executable, "-m", module, *(["bench"] if module == "ifcomp" else []), *arguments],
        cwd=folder if found else tmp_path,
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode == 0) == found, ended.stderr
    assert (tmp_path / "last.json").exists() == found
    assert not found or "Some note." in page(tmp_path)
    assert ("Run this command in a checkout" in " ".join(ended.stderr.split())) != found
