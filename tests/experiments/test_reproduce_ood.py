"""The study of inputs from elsewhere, at the size of digits."""

import numpy as np
import pytest

from experiments import reproduce
from experiments.reproduce import ood
from experiments.reproduce.record import read
from experiments.reproduce.study import Record


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("ood")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IFCOMP_CACHE", str(folder / "cache"))
        patch.delenv("IFCOMP_DATA", raising=False)
        reproduce.reproduce("ood", "digits", folder)
    assert (folder / "ood" / "digits" / "figure.svg").stat().st_size > 1000
    return read(folder / "ood" / "digits")


def test_digits(record: Record) -> None:
    assert record.results["network"]["test_accuracy"] > 0.9
    found = ood.summary(record)
    assert found[ood.IFCOMP]["far"] > 85
    assert {"MSP", "Energy", "KNN", "ViM"} < found.keys()
    sets = record.results["detector MSP"]["sets"]
    by_hand = 50 * (sets["made-inverted"]["auroc"] + sets["made-clouds"]["auroc"])
    assert found["MSP"]["far"] == pytest.approx(by_hand, abs=1e-9)


def test_the_best_of_the_grid_is_chosen(record: Record) -> None:
    tuned = record.results["tuning"]
    means = [row["auroc"]["made-halves"] + row["auroc"]["made-noise"] for row in tuned["grid"]]
    best = tuned["grid"][int(np.argmax(means))]
    assert (tuned["beta"], tuned["damping"]) == (best["beta"], best["damping"])
    assert record.results["ifcomp"][ood.IFCOMP]["beta"] == tuned["beta"]
    assert len(means) == 4


def test_nothing_is_tuned_on_what_is_reported() -> None:
    for settings in ood.PRESETS.values():
        assert not set(settings.test_sets) & set(settings.tuning_sets)
        assert settings.subject.data not in settings.test_sets + settings.tuning_sets
        assert settings.tuning_near
        assert settings.tuning_far


def test_claims_compare_with_the_best_other(record: Record) -> None:
    found = ood.summary(record)
    near = max(values["near"] for name, values in found.items() if not name.startswith("IF-COMP"))
    assert ood.claims(record)[0].holds == (found[ood.IFCOMP]["near"] > near)
    assert f"{near:.2f}" in ood.claims(record)[0].ours


def test_the_papers_numbers_are_beside_ours(record: Record) -> None:
    mnist = Record("ood", "mnist", {"subject": {"data": "mnist"}}, {}, {}, [])
    assert ood._paper(mnist, ood.IFCOMP) == (99.40, 99.97)
    assert ood._paper(mnist, "RMD") == (98.00, 98.12)
    assert ood._paper(mnist, "GEN") is None
