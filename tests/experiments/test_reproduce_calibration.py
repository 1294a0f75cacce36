"""The studies of calibration, reliability and ablation with the preset digits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import t
from torch.nn import functional

from experiments import reproduce
from experiments.corruptions import CORRUPTIONS, HELD_OUT
from experiments.reproduce import ablation, calibration, reliability
from experiments.reproduce.record import read
from experiments.reproduce.study import Record

KINDS = calibration.PRESETS["digits"].corruptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IFCOMP_CACHE", str(folder / "cache"))
        patch.delenv("IFCOMP_DATA", raising=False)
        for name in ("calibration", "reliability", "ablation"):
            reproduce.reproduce(name, "digits", folder)
    return folder


@pytest.fixture
def calibrated(folder: Path) -> Record:
    return read(folder / "calibration" / "digits")


def test_every_method_has_results(calibrated: Record) -> None:
    methods = calibration.methods(calibration.PRESETS["digits"])
    assert set(methods) == calibrated.results.keys() - {"tuning"} == set(calibration.METHODS)
    for name in methods:
        assert calibrated.results[name].keys() == {"0", "5"}
        assert calibrated.results[name]["0"].keys() == {"clean", "together"}
        assert calibrated.results[name]["5"].keys() == {"gaussian_noise", "pixelate", "together"}
    for severity, kinds in calibrated.results["SWA"].items():
        for kind, row in kinds.items():
            scaled = calibrated.results["SWA + temperature"][severity][kind]
            assert (
                scaled["accuracy"]
                == row["accuracy"]
                == calibrated.results[calibration.KEPT][severity][kind]["accuracy"]
            )


def test_the_tuned_settings_are_no_worse_than_the_network_on_held_out_data(calibrated: Record) -> None:
    tuned = calibrated.results["tuning"]
    for name in (calibration.IFCOMP, calibration.KEPT):
        assert tuned[name]["nll"] <= tuned["base"]["nll"]


def test_quartiles(calibrated: Record) -> None:
    values = [row["ece"] for kind, row in calibrated.results["ensemble"]["5"].items() if kind != "together"]
    low, middle, high = calibration.quartiles(calibrated, "ensemble")[5]
    assert middle == pytest.approx(np.mean(values))
    assert (low + high) / 2 == pytest.approx(middle)
    assert high - low == pytest.approx((max(values) - min(values)) / 2)


def test_all_corruptions_together(calibrated: Record) -> None:
    for name in calibration._done(calibrated):
        rows = calibrated.results[name]["5"]
        for metric in ("accuracy", "nll"):
            mean = (rows["gaussian_noise"][metric] + rows["pixelate"][metric]) / 2
            assert rows["together"][metric] == pytest.approx(mean, abs=2e-5)
        assert calibration.together(calibrated, name) == {
            0: calibrated.results[name]["0"]["clean"]["ece"],
            5: rows["together"]["ece"],
        }
    del calibrated.results["SWA"]["5"]["together"]
    assert calibration.together(calibrated, "SWA") is None
    assert "Median ECE (20 bins" in calibration.table(calibrated)
    assert len(calibration.claims(calibrated)) == 1


def test_tuning_data_and_test_data_are_disjoint() -> None:
    settings = calibration.PRESETS["digits"]
    for preset in calibration.PRESETS.values():
        assert set(preset.corruptions) <= set(CORRUPTIONS)
    assert not set(CORRUPTIONS) & set(HELD_OUT)
    clean, shifted = calibration.held_out(settings.subject, settings.tuning_images)
    assert len(clean.data) == 20
    assert len(shifted.data) == 20 * len(HELD_OUT)
    reported = calibration.corrupted(settings, "pixelate", 0)
    assert not any((reported.images == image).all((1, 2)).any() for image in clean.data.images)


def test_the_averaged_network() -> None:
    subject = calibration.PRESETS["digits"].subject
    averaged, moments = calibration.swa_network(subject)
    known, validation, _ = subject.parts()
    trained = subject.training(known, validation)
    tail = [dict(trained.model(epoch).named_parameters())["fc3.bias"] for epoch in (4, 5)]
    torch.testing.assert_close(dict(averaged.named_parameters())["fc3.bias"], (tail[0] + tail[1]) / 2)
    assert moments.count == 2


def test_reliability(folder: Path, calibrated: Record) -> None:
    record = read(folder / "reliability" / "digits")
    for name, curve in reliability.curves(record, 5).items():
        assert curve.count.sum() == 40
        assert curve.ece == pytest.approx(calibrated.results[name]["5"]["pixelate"]["ece"], abs=2e-4)


def test_ablation(folder: Path, calibrated: Record) -> None:
    record = read(folder / "ablation" / "digits")
    tuned_index = ablation.MULTIPLES.index(1.0)
    tuned = record.results["tuned beta"]["severities"]["5"]
    ours, untouched = calibrated.results[calibration.IFCOMP]["5"], calibrated.results["SWA"]["5"]
    assert tuned["ece"][tuned_index]["median"] == pytest.approx(
        np.median([ours[kind]["ece"] for kind in KINDS]), abs=2e-5
    )
    assert tuned["ece"][tuned_index]["together"] == pytest.approx(ours["together"]["ece"], abs=2e-5)
    assert tuned["accuracy"][tuned_index]["together"] == pytest.approx(ours["together"]["accuracy"], abs=2e-5)
    plain = record.results["beta 1"]["severities"]["5"]
    assert plain["ece"][0]["low"] <= plain["ece"][0]["median"] <= plain["ece"][0]["high"]
    assert plain["ece"][0]["median"] == pytest.approx(np.median([untouched[kind]["ece"] for kind in KINDS]), abs=2e-5)
    assert plain["ece"][0]["together"] == pytest.approx(untouched["together"]["ece"], abs=2e-5)
    assert (
        record.results["tuned beta"]["alphas"][tuned_index] == calibrated.results["tuning"][calibration.IFCOMP]["alpha"]
    )


def test_claims(calibrated: Record) -> None:
    (pooled,) = calibration.claims(calibrated)
    assert pooled.paper == "0.055; best other 0.085"
    values = {name: calibrated.results[name]["5"]["together"]["ece"] for name in calibration._done(calibrated)}
    del values[calibration.KEPT]
    assert f"{values.pop(calibration.IFCOMP):.3f} (" in pooled.ours
    assert f"{min(values.values()):.3f};" in pooled.ours
    assert pooled.verdict == "undecided"  # too few images for an interval
    del calibrated.results["SWA"]["5"]["together"]
    (claim,) = calibration.claims(calibrated)
    medians = {name: calibration.quartiles(calibrated, name)[5][1] for name in calibration._done(calibrated)}
    ours = medians.pop(calibration.IFCOMP)
    medians.pop(calibration.KEPT)
    assert f"{ours:.3f} (" in claim.ours
    assert f"{min(medians.values()):.3f};" in claim.ours
    assert "median ECE" in claim.claim


def test_claims_of_enough_images_have_intervals_over_corruptions(calibrated: Record) -> None:
    record = replace(calibrated, settings={**calibrated.settings, "images": 400})
    (claim,) = calibration.claims(record)
    rows, kinds = {}, calibrated.settings["corruptions"]
    for name in calibration._done(calibrated):
        rows[name] = np.array([calibrated.results[name]["5"][kind]["ece"] for kind in kinds])
    ours = rows.pop(calibration.IFCOMP)
    rows.pop(calibration.KEPT)
    gains = min(rows.values(), key=np.mean) - ours
    assert "mean ECE over corruptions" in claim.claim
    assert claim.difference.estimate == pytest.approx(gains.mean())
    size = len(kinds)
    half = (claim.difference.high - claim.difference.low) / 2
    assert half == pytest.approx(t(size - 1).isf(0.025) * gains.std(ddof=1) / size**0.5, rel=0.1)


def _best_inverse(logits: torch.Tensor, labels: torch.Tensor) -> float:
    losses = {b: float(functional.cross_entropy(b * logits, labels)) for b in np.linspace(0.2, 3, 281)}
    return min(losses, key=losses.__getitem__)


def test_beta_and_temperatures_are_selected_on_validation_images(
    monkeypatch: pytest.MonkeyPatch, folder: Path, calibrated: Record
) -> None:
    monkeypatch.setenv("IFCOMP_CACHE", str(folder / "cache"))
    settings, tuned = calibration.PRESETS["digits"], calibrated.results["tuning"]
    subject, (_, validation, _) = settings.subject, settings.subject.parts()
    clean, shifted = calibration.held_out(subject, settings.tuning_images)
    selected = {}
    for name, data in (("SWA", [*subject.batches(validation)]), ("shifted", [*clean, *shifted])):
        with torch.no_grad():
            logits = torch.cat([calibration.base_network(subject)(x) for x, _ in data]).double()
        selected[name] = _best_inverse(logits, torch.cat([y for _, y in data]))
        assert tuned["inverse_temperature"][name] == pytest.approx(selected[name], abs=0.011)
    assert selected["SWA"] != pytest.approx(selected["shifted"], rel=1e-2)
    beta = tuned["inverse_temperature"]["SWA"]
    assert tuned[calibration.IFCOMP]["beta"] == tuned[calibration.KEPT]["beta"] == beta


def test_published_weights_omit_methods_that_need_training(calibrated: Record) -> None:
    settings = calibration.PRESETS["cifar10"]
    assert settings.subject.recipe is None
    done = {name: calibrated.results[name] for name in ("tuning", *calibration.methods(settings))}
    subject = {**calibrated.settings["subject"], "recipe": None}
    left = replace(calibrated, results=done, settings={**calibrated.settings, "subject": subject})
    page = calibration.table(left)
    assert "Not run: SWA, SWA + temperature, SWAG-D, MC dropout, ensemble, ACNML + SWAG-D: published weights" in page
    assert "ensemble has" not in page
    assert "softmax" in calibration.claims(left)[0].ours
    curves = {name: {"5": {"confidence": [0.5], "accuracy": [0.7], "count": [3]}} for name in done if name != "tuning"}
    assert "a last-layer Laplace" in reliability.claims(replace(left, results=curves))[0].claim
