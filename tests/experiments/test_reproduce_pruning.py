"""The study of pruning with the preset digits."""

import base64

import numpy as np
import pytest
import torch

from experiments import reproduce
from experiments.reproduce import pruning
from experiments.reproduce.record import read
from experiments.reproduce.study import Record


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("pruning")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IFCOMP_CACHE", str(folder / "cache"))
        patch.delenv("IFCOMP_DATA", raising=False)
        reproduce.reproduce("pruning", "digits", folder)
    trainings = list((folder / "cache").glob("*-first300*"))
    assert len(trainings) == 2 + 6 * 2  # seed 1 on all data resumes the short run
    return read(folder / "pruning" / "digits")


def test_digits(record: Record) -> None:
    summary = pruning.summary(record)
    assert summary.keys() == set(pruning.METHODS)
    rows = [record.results[f"IF-COMP, 0.5, seed {seed}"] for seed in (0, 1)]
    accuracies = [row["accuracy"] for row in rows]
    assert pruning.correct(record, "IF-COMP, 0.5").mean(1) == pytest.approx(100 * np.array(accuracies))
    assert summary["IF-COMP"][0.5] == pytest.approx((100 * np.mean(accuracies), 50 * abs(np.subtract(*accuracies))))
    assert record.results["none, seed 0"]["accuracy"] > 0.3
    for ranks in record.results["ranks"].values():
        assert sorted(ranks) == list(range(300))


def test_the_lowest_are_dropped() -> None:
    assert pruning.kept([3, 0, 2, 1, 4], torch.zeros(5, dtype=torch.long), 0.4).tolist() == [0, 2, 4]


def test_claims(record: Record) -> None:
    similar, better = pruning.claims(record)
    assert "IF-COMP 94.86" in similar.paper
    assert "random 93.29" in better.paper


@pytest.mark.parametrize(("chance", "verdict"), [(0.70, "holds"), (0.80, "undecided"), (0.90, "does not hold")])
def test_verdicts_need_an_interval_on_one_side(chance: float, verdict: str) -> None:
    generator, results = np.random.default_rng(0), {}
    for method in pruning.METHODS:
        accuracy = {"IF-COMP": 0.8, "random": chance}.get(method, 0.95)
        for seed in (0, 1, 2):
            hits = generator.random(1000) < accuracy
            packed = base64.b64encode(np.packbits(hits).tobytes()).decode()
            results[f"{method}, 0.5, seed {seed}"] = {"accuracy": hits.mean(), "images": 1000, "correct": packed}
    settings = {"fractions": [0.5], "seeds": [0, 1, 2], "subject": {"data": "toy"}}
    similar, better = pruning.claims(Record("pruning", "digits", settings, results, {}, []))
    assert better.verdict == verdict
    assert similar.verdict == "does not hold"
    assert better.difference.estimate == pytest.approx(100 * (0.8 - chance), abs=3)
    assert better.size == "3 seeds, 1,000 test images"
