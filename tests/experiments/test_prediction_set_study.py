"""The study of prediction sets: one situation, and the page of the committed results."""

import json
from pathlib import Path

import pytest

from experiments.datasets import MNIST
from experiments.prediction_sets import run

PAGE = Path(__file__).parents[2] / "docs/results/prediction-sets.md"


@pytest.mark.filterwarnings("ignore:.* held-out examples are few")
def test_a_situation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IFCOMP_CACHE", str(tmp_path))
    found = run.measure(run.Situation("digits", MNIST, 300, 15, 200, 200), 3, (0.6, 0.9))
    assert found["accuracy"]["test"] > 0.15
    assert abs(found["0.6"]["coverage"] - 0.6) < 0.15 < abs(found["0.9"]["coverage"] - 0.6)
    assert 1 <= found["0.6"]["size"] < found["0.9"]["size"] <= 10


def test_the_page_shows_the_results_and_coverage_is_nominal() -> None:
    results = json.loads(run.RESULTS.read_text())
    assert run.table(results) in PAGE.read_text()
    assert list(results) == [situation.name for situation in run.SITUATIONS]
    for result in results.values():
        for level in run.COVERAGES:
            assert result[str(level)]["coverage"] >= level - 0.015
