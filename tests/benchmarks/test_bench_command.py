"""``ifcomp bench`` and ``python -m benchmarks``, from a checkout only."""

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
    result = CliRunner().invoke(app, ["bench", "--list"])
    assert result.exit_code == 0
    assert all(f"{name} (about {suite.minutes:g} min): " in result.stdout for name, suite in SUITES.items())


def test_an_unknown_suite_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "speed"])
    assert result.exit_code == 2
    assert "There is no suite speed" in result.stderr


@pytest.mark.parametrize(("module", "folder", "succeeds"), [("benchmarks", ROOT, True), ("ifcomp", ROOT.parent, False)])
def test_bench_runs_from_a_checkout_only(module: str, folder: Path, succeeds: bool, tmp_path: Path) -> None:
    source = str(Path(ifcomp.__file__).parents[1])
    arguments = ["last", "--tiny", "--rounds", "1", "--threads", "1", "--results", str(tmp_path)]
    arguments += ["--note", "Some note."]
    process = subprocess.run(
        [sys.executable, "-m", module, *(["bench"] if module == "ifcomp" else []), *arguments],
        cwd=folder if succeeds else tmp_path,
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode == 0) == succeeds, process.stderr
    assert (tmp_path / "last.json").exists() == succeeds
    assert not succeeds or "Some note." in page(tmp_path)
    assert ("Run this command in a checkout" in " ".join(process.stderr.split())) != succeeds
