"""The study of pruning with the preset digits."""

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
    accuracies = [record.results[f"IF-COMP, 0.5, seed {seed}"] for seed in (0, 1)]
    assert summary["IF-COMP"][0.5] == pytest.approx((100 * np.mean(accuracies), 50 * abs(np.subtract(*accuracies))))
    assert record.results["none, seed 0"] > 0.3
    for ranks in record.results["ranks"].values():
        assert sorted(ranks) == list(range(300))


def test_the_lowest_are_dropped() -> None:
    assert pruning.kept([3, 0, 2, 1, 4], torch.zeros(5, dtype=torch.long), 0.4).tolist() == [0, 2, 4]


def test_claims(record: Record) -> None:
    similar, better = pruning.claims(record)
    assert "IF-COMP 94.86" in similar.paper
    assert "random 93.29" in better.paper


@pytest.mark.parametrize(("chance", "holds"), [((0.70, 0.72), True), ((0.79, 0.81), None), ((0.88, 0.90), False)])
def test_a_difference_within_a_standard_error_is_inconclusive(chance: tuple[float, float], holds: bool | None) -> None:
    accuracies = dict.fromkeys(pruning.METHODS, (0.90, 0.90)) | {"IF-COMP": (0.80, 0.82), "random": chance}
    results = {f"{name}, 0.5, seed {seed}": row[seed] for name, row in accuracies.items() for seed in (0, 1)}
    settings = {"fractions": [0.5], "seeds": [0, 1], "subject": {"data": "toy"}}
    similar, better = pruning.claims(Record("pruning", "digits", settings, results, {}, []))
    assert better.holds is holds
    assert similar.holds is False
