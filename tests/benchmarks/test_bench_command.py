"""``ifcomp bench`` and ``python -m benchmarks``, from a checkout only."""

import json
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


def test_suites_are_listed_as_json() -> None:
    result = CliRunner().invoke(app, ["bench", "--list", "--json"])
    content = json.loads(result.stdout)
    assert (content["command"], list(content["suites"])) == ("bench", list(SUITES))
    assert content["suites"]["fit"]["minutes"] == SUITES["fit"].minutes


def test_an_unknown_suite_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "speed"])
    assert result.exit_code == 2
    assert "There is no suite speed" in result.stderr


@pytest.mark.parametrize(("module", "folder", "succeeds"), [("benchmarks", ROOT, True), ("ifcomp", ROOT.parent, False)])
def test_bench_runs_from_a_checkout_only(module: str, folder: Path, succeeds: bool, tmp_path: Path) -> None:
    source = str(Path(ifcomp.__file__).parents[1])
    arguments = ["last", "--tiny", "--rounds", "1", "--threads", "1", "--results", str(tmp_path)]
    arguments += ["--note", "Some note.", "--json"]
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
    content = json.loads(process.stdout)
    if succeeds:
        assert "Some note." in page(tmp_path)
        assert content["written"] == [str(tmp_path / "last.json")]
        assert {found["environment"]["note"] for found in content["suites"]["last"]} == {"Some note."}
    else:
        assert "Run this command in a checkout" in content["error"]["message"]


def test_tables_are_the_answer(tmp_path: Path) -> None:
    arguments = ["bench", "last", "--tiny", "--rounds", "1", "--threads", "1", "--results", str(tmp_path), "-q"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "threads: 1" in result.stdout
    assert result.stderr == ""
