"""The study of OOD detection with the preset digits."""

import pytest
import torch
from torch import nn

from experiments import reproduce
from experiments.reproduce import ood
from experiments.reproduce.record import read
from experiments.reproduce.study import Record
from ifcomp import IFComp, Relative


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
    aurocs = ood.summary(record)
    assert aurocs[ood.IFCOMP]["far"] > 85
    assert {"MSP", "Energy", "KNN", "ViM"} < aurocs.keys()
    sets = record.results["detector MSP"]["sets"]
    by_hand = 50 * (sets["made-inverted"]["auroc"] + sets["made-clouds"]["auroc"])
    assert aurocs["MSP"]["far"] == pytest.approx(by_hand, abs=1e-9)


def test_the_best_of_the_grid_is_chosen(record: Record) -> None:
    tuned = record.results["tuning"]
    assert len(tuned["grid"]) == 2 * 2 * 3
    for name, plain in ((ood.IFCOMP, True), (ood.CAPPED, False)):
        rows = [row for row in tuned["grid"] if (row["alpha"] is None) == plain]
        best = max(row["auroc"]["made-halves"] + row["auroc"]["made-noise"] for row in rows)
        assert tuned[name]["near"] + tuned[name]["far"] == best
        assert record.results["ifcomp"][name]["beta"] == tuned[name]["beta"]
        assert record.results["ifcomp"][name]["alpha"] == tuned[name]["alpha"]


def test_complexity_agrees_with_the_library() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3), torch.randn(8, 5)
    ifc = IFComp(model, 0.7, fisher="exact").fit([x])
    hindsight = ood._hindsight(ifc, [(x,)], Relative(0.01))
    for alpha, options in ((None, {}), (2.0, {"alpha": 2.0, "capped": True})):
        expected = ifc.parametric_complexity(x, damping=Relative(0.01), **options)
        assert ood.complexity(*hindsight, 8, alpha) == pytest.approx(expected.numpy(), rel=1e-9)


def test_tuning_sets_and_test_sets_are_disjoint() -> None:
    for settings in ood.PRESETS.values():
        assert not set(settings.test_sets) & set(settings.tuning_sets)
        assert settings.subject.data not in settings.test_sets + settings.tuning_sets
        assert settings.tuning_near
        assert settings.tuning_far


def test_claims_compare_with_the_best_other(record: Record) -> None:
    aurocs = ood.summary(record)
    near = max(values["near"] for name, values in aurocs.items() if not name.startswith("IF-COMP"))
    for claim, name in zip(ood.claims(record)[:2], (ood.IFCOMP, ood.CAPPED), strict=True):
        assert claim.difference.estimate == pytest.approx(aurocs[name]["near"] - near)
        assert claim.size == "100 images per set, 1 sets"
        assert f"{near:.2f}" in claim.ours


def test_published_numbers(record: Record) -> None:
    mnist = Record("ood", "mnist", {"subject": {"data": "mnist"}}, {}, {}, [])
    assert ood._paper(mnist, ood.IFCOMP) == (99.40, 99.97)
    assert ood._paper(mnist, "RMD") == (98.00, 98.12)
    assert ood._paper(mnist, "GEN") is None
