"""The study of inference times: stored and newly measured results of the benchmark."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import record as recorded
from benchmarks.run import Console, run
from benchmarks.suite import Measured, Times
from benchmarks.suites.table1 import PAPER, SUITE
from experiments import reproduce
from experiments.reproduce import timing
from experiments.reproduce.record import read
from experiments.reproduce.study import Record

ENVIRONMENT = {"date": "2026-01-02", "commit": "abcdef0123", "threads": 1, "cpu": "a core", "torch": "2", "load": 0.5}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def synthetic_run(name: str) -> recorded.Run:
    """Return two rounds of four inputs with 1, 200, 3 and 0.9 ms per input."""
    best = {"ours": 1, "ACNML": 200, "GradNorm": 3, "GradNorm, ours": 0.9, "forward": 0.1}
    times = {key: Times(4, [8e-3 * value, 4e-3 * value]) for key, value in best.items()}
    return recorded.Run(name, 1, {**ENVIRONMENT, "tiny": False}, Measured(times))


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    recorded.write("table1", [replace(synthetic_run(name), threads=2) for name in PAPER], tmp_path)
    recorded.write("table1", [synthetic_run(name) for name in PAPER], tmp_path)
    reproduce.reproduce("timing", "paper", tmp_path)
    return read(tmp_path / "timing" / "paper")


def test_stored_results_are_used_with_their_environment(record: Record, tmp_path: Path) -> None:
    assert record.results.keys() == PAPER.keys()
    page = (tmp_path / "timing" / "paper" / "table.md").read_text()
    assert "on 2026-01-02 at commit abcdef0, 1 thread of a core, torch 2. Load" in page
    assert "| IF-COMP (this library) | 1.00 | 1.00 | 1.00 | 0.241 | 15.76 | 188.8 |" in page
    assert "| ACNML-EKFAC / IF-COMP | 200.00 | 200.00 | 200.00 | 7.34 | 14.71 | 12.37 |" in page
    norm, *speedups = timing.claims(record)
    assert norm.ours == "1.11 times as long as our gradient norm, 0.33 times as long as with vmap"
    assert [claim.ours for claim in speedups] == ["200 times"] * 3
    verdicts = [claim.verdict for claim in (norm, *speedups)]
    assert verdicts == ["undecided", "holds", "holds", "holds"]  # rounds differ by a factor of 2


def test_missing_results_are_measured_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    name = next(iter(PAPER))
    monkeypatch.setattr(
        timing,
        "run",
        lambda suites, threads, rounds, tiny, folder, console: run(
            suites, threads, 1, True, folder, Console(quiet=True)
        ),
    )
    result = timing.steps(timing.PRESETS["paper"])[name]({})
    (kept,) = recorded.read("table1", tmp_path)
    assert kept.subject == name
    assert timing.steps(timing.PRESETS["paper"])[name]({}) == result


def test_processors_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with all networks is used, preferably this one; without any, the results of this one."""
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    monkeypatch.setattr(timing, "environment", lambda: {"cpu": "this core"})
    settings, (first, *others) = timing.PRESETS["paper"], PAPER
    this = {name: replace(synthetic_run(name), environment={**ENVIRONMENT, "cpu": "this core"}) for name in PAPER}
    recorded.write("table1", [synthetic_run(name) for name in others], tmp_path)
    recorded.write("table1", [this[first]], tmp_path)
    assert timing._recorded(settings) == {first: this[first]}
    recorded.write("table1", [synthetic_run(first)], tmp_path)
    assert timing._recorded(settings) == {name: synthetic_run(name) for name in PAPER}
    recorded.write("table1", [this[name] for name in others], tmp_path)
    assert timing._recorded(settings) == this


def test_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "RESULTS", tmp_path / "benchmarks")
    reproduce.reproduce("timing", "digits", tmp_path)
    record = read(tmp_path / "timing" / "digits")
    assert all(row["environment"]["tiny"] for row in record.results.values())
    for name, measured in timing.measured(record).items():
        assert measured.times.keys() >= timing.METHODS.keys(), name
    assert timing.claims(record) == []
    assert not (tmp_path / "benchmarks").exists()


def test_the_suite_has_the_networks_of_the_paper() -> None:
    (section,) = SUITE.sections
    assert section.subjects.keys() == PAPER.keys()
