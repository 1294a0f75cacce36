"""The studies of hindsight models with the preset digits: oracle, and unrestricted retraining."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import pearsonr

from experiments import reproduce
from experiments.reproduce import oracle, retraining
from experiments.reproduce.record import read
from experiments.reproduce.study import Record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hindsight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IFCOMP_CACHE", str(folder / "cache"))
        patch.delenv("IFCOMP_DATA", raising=False)
        for name in ("oracle", "retraining"):
            reproduce.reproduce(name, "digits", folder)
    return folder


def test_oracle(folder: Path) -> None:
    record = read(folder / "oracle" / "digits")
    means = []
    for lam in (100, 1000):
        truth = record.results[f"digits, lambda {lam}, truth"]
        assert truth["pairs"] == 30
        assert all(0 < value < np.log(10) for value in truth["complexity"])
        means.append(np.mean(truth["complexity"]))
        correlations = oracle.correlations(record, lam)
        assert correlations.keys() == {"digits"}
        for method in oracle.METHODS:
            values = record.results[f"digits, lambda {lam}, methods"][method]
            assert correlations["digits"][method] == pytest.approx(pearsonr(truth["complexity"], values).statistic)
        assert correlations["digits"]["IF-COMP"] > 0.5
    assert means[0] > means[1]  # the larger lambda keeps the hindsight models closer
    assert len(oracle.claims(record)) == 2


def test_a_preset_has_three_values_of_lambda() -> None:
    assert len(oracle.PRESETS["mnist-lambdas"].lams) == 3


def test_retraining(folder: Path) -> None:
    record = read(folder / "retraining" / "digits")
    row = record.results["digits"]
    before, after = np.array(row["before"]), np.array(row["after"])
    assert before.shape == after.shape == (1, 10)
    assert before.sum() == pytest.approx(1, abs=1e-4)
    assert after.sum() > 4
    assert row["complexity"] == pytest.approx(np.log(after.sum(1)), abs=1e-4)


@pytest.mark.parametrize(("minimum", "verdict"), [(0.95, "holds"), (0.9, "undecided"), (0.85, "does not hold")])
def test_memorised_means_every_label(minimum: float, verdict: str) -> None:
    after = [[0.99, minimum + 0.01], [0.99, minimum], [0.99, minimum - 0.01]]
    record = Record("retraining", "digits", {}, {"digits": {"after": after}}, {}, [])
    assert retraining.claims(record)[0].verdict == verdict
