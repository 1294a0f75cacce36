"""The studies of wrong labels with the preset digits: mislabel detection, and components during training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.nn import functional

from experiments import reproduce
from experiments.datasets import load, separate
from experiments.reproduce import components, mislabel, noisy
from experiments.reproduce.record import read
from experiments.reproduce.study import Record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mislabel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IFCOMP_CACHE", str(folder / "cache"))
        patch.delenv("IFCOMP_DATA", raising=False)
        for name in ("mislabel", "components"):
            reproduce.reproduce(name, "digits", folder)
    return folder


@pytest.fixture(scope="module")
def mislabel_record(folder: Path) -> Record:
    return read(folder / "mislabel" / "digits")


def test_mislabel(mislabel_record: Record) -> None:
    kind = "asymmetric 0.3"
    early, late = (mislabel_record.results[f"{kind}, {stage}"] for stage in ("early", "late"))
    assert early.keys() == late.keys() == set(mislabel.METHODS)
    assert early["loss"] > 0.85
    assert 0.7 < early[mislabel.IFCOMP] < early["loss"]  # complexity misleads before asymmetric noise is memorised
    assert early["cleanlab, self-confidence"] == pytest.approx(early["loss"], abs=1e-4)
    assert early["EL2N"] == late["EL2N"]
    train = mislabel_record.results[f"{kind}, train"]
    assert train["wrong"] == pytest.approx(0.3, abs=0.05)
    assert train["early"]["epoch"] <= train["late"]["epoch"] == 12  # so few epochs that the best may be the last
    assert train["validation_accuracy"]["early"] >= train["validation_accuracy"]["late"]
    assert train["checkpoints"][str(train["late"]["epoch"])] == train["late"]["memorised"]


def test_claims_compare_with_the_best_other(mislabel_record: Record) -> None:
    for claim, stage in zip(mislabel.claims(mislabel_record), noisy.STAGES, strict=True):
        row = mislabel_record.results[f"asymmetric 0.3, {stage}"]
        others = [row[name] for name in ("TracIn", "EL2N", "GraNd", "Self-IF")]
        lead = 100 * (row[mislabel.IFCOMP] - max(others))
        assert claim.difference.estimate == pytest.approx(lead)
        assert claim.difference.high - claim.difference.low > 5  # 300 labels
        assert claim.size.startswith("300 labels, ")
    assert "95.7" in mislabel.claims(mislabel_record)[0].paper


def test_noise_belongs_to_the_examples() -> None:
    subject = mislabel.PRESETS["digits"].subject
    prepared = noisy.prepare(subject, "symmetric 0.6")
    clean, validation = separate(subject.fitted_to(load("digits", "train")), subject.held_out)
    assert torch.equal(prepared.data.images, clean.images[:300])
    assert torch.equal(prepared.wrong, prepared.data.labels != clean.labels[:300])
    assert torch.equal(prepared.validation.labels, validation.labels)
    assert 0.5 < prepared.wrong.double().mean() < 0.7


def test_a_sample_has_matching_images_labels_and_marks() -> None:
    prepared = noisy.prepare(mislabel.PRESETS["digits"].subject, "symmetric 0.6")
    part = prepared.sampled(40, 1)
    positions = [int((prepared.data.images == image).all((1, 2)).nonzero()[0]) for image in part.data.images]
    assert len(set(positions)) == 40
    assert torch.equal(part.data.labels, prepared.data.labels[positions])
    assert torch.equal(part.wrong, prepared.wrong[positions])
    assert prepared.sampled(None, 1) is prepared


def test_only_a_sample_is_scored(monkeypatch: pytest.MonkeyPatch, folder: Path, mislabel_record: Record) -> None:
    monkeypatch.setenv("IFCOMP_CACHE", str(folder / "cache"))
    kind, settings = "asymmetric 0.3", replace(mislabel.PRESETS["digits"], scored_examples=60)
    few = mislabel.steps(settings)[f"{kind}, early"](mislabel_record.results)
    prepared, trained = mislabel.run_of(settings, kind)
    part, network = prepared.sampled(60, 1), trained.model("best")
    with torch.no_grad():
        outputs = network(next(iter(settings.subject.batches(part.data, 60)))[0])
    loss = functional.cross_entropy(outputs, part.data.labels, reduction="none")
    assert few["loss"] == pytest.approx(roc_auc_score(part.wrong, loss), abs=1e-9)
    page = mislabel.table(replace(mislabel_record, settings={**mislabel_record.settings, "scored_examples": 60}))
    assert "trained on 300, of which 60 are scored" in page


def test_components(folder: Path, mislabel_record: Record) -> None:
    record = read(folder / "components" / "digits")
    epochs = components._epochs(record)
    assert list(epochs) == record.results["train"]["epochs"] == [4, 8, 12]
    assert list(epochs[4]["complexity"]) == ["1.0", "0.001"]
    shares = mislabel_record.results["asymmetric 0.3, train"]["checkpoints"]
    assert {str(epoch): row["memorised"] for epoch, row in epochs.items()} == shares
    claims = components.claims(record)
    last = epochs[12]["complexity"]
    assert claims[1].difference.estimate == pytest.approx(100 * (last["0.001"] - last["1.0"]))
    worst = min(row["sum"] - row["error"] for row in epochs.values())
    assert claims[2].difference.estimate == pytest.approx(100 * worst)
    assert claims[2].margin == 1.0
    assert [components.wrong_share(noise) for noise in ("human random1", "asymmetric 0.3")] == [0.17, 0.3]
