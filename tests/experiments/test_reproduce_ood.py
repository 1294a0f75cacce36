"""The study of OOD detection with the preset digits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from experiments import reproduce
from experiments.reproduce import ood, ood_page
from experiments.reproduce.cached_arrays import CachedArrays
from experiments.reproduce.ood_scores import BOUNDED, CAPPED, PARAMETRIC, Choice, Scores, complexity, rank_sum
from experiments.reproduce.record import read, run
from experiments.reproduce.study import Record
from ifcomp import IFComp, Relative


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("ood")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IFCOMP_CACHE", str(folder / "cache"))
        patch.delenv("IFCOMP_DATA", raising=False)
        reproduce.reproduce("ood", "digits", folder)
        yield folder


@pytest.fixture(scope="module")
def record(folder: Path) -> Record:
    assert (folder / "ood" / "digits" / "figure.svg").stat().st_size > 1000
    return read(folder / "ood" / "digits")


def test_digits(record: Record) -> None:
    assert record.results["network"]["test_accuracy"] > 0.9
    aurocs = ood_page.summary(record)
    assert aurocs[ood_page.TUNED[PARAMETRIC]]["far"] > 85
    assert {"MSP", "Energy", "KNN", "ViM", *ood_page.OURS} < aurocs.keys()
    sets = record.results["detector MSP"]["sets"]
    by_hand = 50 * (sets["made-inverted"]["auroc"] + sets["made-clouds"]["auroc"])
    assert aurocs["MSP"]["far"] == pytest.approx(by_hand, abs=1e-9)


def test_one_beta_and_damping_for_all_forms(record: Record) -> None:
    grid = {name: rows for name, rows in record.results.items() if name.startswith("tuning, ")}
    assert len(grid) == 2 * 2
    quality = {
        name: sum(
            max(row["auroc"]["made-halves"] + row["auroc"]["made-noise"] for row in rows if row["form"] == form)
            for form in (PARAMETRIC, CAPPED, BOUNDED)
        )
        for name, rows in grid.items()
    }
    tuned = record.results["tuning"]
    assert len({(row["beta"], row["damping"]) for row in tuned.values()}) == 1
    row = tuned[PARAMETRIC]
    best = f"tuning, beta {row['beta']:g}, damping {row['damping']:g}"
    assert quality[best] == max(quality.values())
    assert tuned[CAPPED]["alpha"] in (0.1, 1.0)


def test_intervals_contain_the_estimates(record: Record) -> None:
    comparison, aurocs = record.results["comparison"], ood_page.summary(record)
    for method, rows in comparison["intervals"].items():
        for key, (estimate, low, high) in rows.items():
            assert estimate == pytest.approx(aurocs[method][key], abs=1e-3)
            assert low <= estimate <= high
    table = (ood_page.table(record)).splitlines()
    assert any(line.startswith(f"| *{ood_page.JOIN}* |") for line in table)


def test_interrupted_scores_are_not_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run with the arrays in the cache gives the same results without a fit or an influence."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("experiments.reproduce.ood_scores.fit_grid", refused)
    monkeypatch.setattr(IFComp, "influence", refused)
    ood._scores.cache_clear()
    again = run(ood.STUDY, "digits", folder / "again")
    assert again.results == read(folder / "ood" / "digits").results


def test_cached_arrays(tmp_path: Path) -> None:
    arrays = CachedArrays(tmp_path)
    first = arrays.get("some set", lambda: {"values": np.arange(3)})
    second = arrays.get("some set", lambda: pytest.fail("computed again"))
    assert first["values"].tolist() == second["values"].tolist() == [0, 1, 2]


def test_complexity_agrees_with_the_library() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3), torch.randn(8, 5)
    ifc = IFComp(model, 0.7, fisher="exact").fit([x])
    damping = Relative(0.01)
    influence, mean = ifc.influence(x, damping=damping), ifc.factors.effective_parameters(damping)
    expected = {
        Choice(PARAMETRIC, 0.7, 0.01): ifc.parametric_complexity(x, damping=damping),
        Choice(CAPPED, 0.7, 0.01, 2.0): ifc.parametric_complexity(x, damping=damping, alpha=2.0, capped=True),
        Choice(BOUNDED, 0.7, 0.01): ifc.bounded_complexity(x, damping=damping),
    }
    for choice, values in expected.items():
        found = complexity(choice, model(x).detach(), influence, 8, mean)
        assert found == pytest.approx(values.numpy(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:100 held-out examples are few")
def test_the_default_is_that_of_the_library(folder: Path) -> None:
    scores = Scores(replace(ood.PRESETS["digits"], fit_examples=None))  # the library's reference set is that of the fit
    held_out, x = (torch.cat([inputs for (inputs,) in scores.inputs(name)]) for name in ("held out", "made-clouds"))
    ifc = IFComp(scores.network, fisher="exact").fit(list(scores.known(None)))
    gate = ifc.ood_detector(held_out)
    assert scores.default("made-clouds") == pytest.approx(gate.score(x).numpy(), rel=1e-3, abs=1e-3)


def test_rank_sum_by_hand() -> None:
    held_out = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 0.0, 1.0, 1.0])
    values = np.array([2.5, 4.0, 9.0]), np.array([0.0, 0.5, 1.0])
    assert rank_sum(values, held_out).tolist() == [0.5 + 0.25, 0.875 + 0.5, 1 + 0.75]


def test_tuning_sets_and_test_sets_are_disjoint() -> None:
    for settings in ood.PRESETS.values():
        assert not set(settings.test_sets) & set(settings.tuning_sets)
        assert settings.subject.data not in settings.test_sets + settings.tuning_sets
        assert settings.tuning_near
        assert settings.tuning_far


def test_every_step_has_a_duration() -> None:
    for settings in ood.PRESETS.values():
        assert ood.durations(settings).keys() == ood.steps(settings).keys()
    small, large = (sum(ood.durations(ood.PRESETS[name]).values()) for name in ("cifar10", "cifar10-resnet18"))
    assert 5 * small < large


def test_claims_compare_with_the_best_other(record: Record) -> None:
    aurocs = ood_page.summary(record)
    near = max(values["near"] for name, values in aurocs.items() if name not in ood_page.OURS)
    for claim, name in zip(ood_page.claims(record), ood_page.OURS, strict=False):
        assert claim.difference.estimate == pytest.approx(aurocs[name]["near"] - near, abs=1e-3)
        assert claim.verdict == claim.difference.verdict
        assert f"{near:.2f}" in claim.ours
        assert "100 images per set" in claim.size


def test_published_numbers() -> None:
    mnist = Record("ood", "mnist", {"subject": {"data": "mnist"}}, {}, {}, [])
    assert ood_page._paper(mnist, ood_page.AS_PAPER) == (99.40, 99.97)
    assert ood_page._paper(mnist, "RMD") == (98.00, 98.12)
    assert ood_page._paper(mnist, "GEN") is None


def test_rows_of_openood() -> None:
    cifar10 = Record("ood", "cifar10", {"subject": {"data": "cifar10"}}, {}, {}, [])
    assert ood_page._paper(cifar10, "ASH") == (75.3, 78.5)
    assert ood_page._paper(cifar10, "MSP") == (88.03, 90.73)
    assert ood_page._paper(cifar10, ood_page.DETECTOR) is None
