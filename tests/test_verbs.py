"""`IFComp.prune` and `IFComp.report` on data with known truth, and the errors of results of another model."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ifcomp import IFComp, Relative
from ifcomp.errors import DataError, EmptyDataError, IfcompWarning, LabelError, NotFittedError, SettingError
from ifcomp.report import Preview
from ifcomp.tasks.audit import LabelAudit
from test_doctests import fitted, names

TRAIN: tuple[Tensor, Tensor] = names()["train"]


@cache
def audit() -> LabelAudit:
    return fitted().audit(TRAIN)


@cache
def other() -> IFComp:
    torch.manual_seed(9)
    return IFComp(nn.Linear(64, 10).eval()).fit(TRAIN)


# Pruning ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [0.0, 0.3, 0.6])
def test_the_most_complex_examples_are_kept(drop: float) -> None:
    keep = fitted().prune(TRAIN, drop)
    complexity = fitted().stochastic_complexity(*TRAIN, damping=Relative(1.0)).numpy()
    dropped = sorted(range(400), key=lambda index: complexity[index])[: int(drop * 400)]
    assert keep.tolist() == sorted(set(range(400)) - set(dropped))


def test_pruning_is_balanced_on_request() -> None:
    labels = TRAIN[1].numpy()
    kept = np.bincount(labels[fitted().prune(TRAIN, 0.5, balanced=True)], minlength=10)
    assert kept.tolist() == [size - size // 2 for size in np.bincount(labels, minlength=10)]


def test_kept_positions_select_a_subset() -> None:
    data = TensorDataset(*TRAIN)
    subset = torch.utils.data.Subset(data, fitted().prune(data, 0.6))
    assert len(subset) == 160


@pytest.mark.parametrize(
    ("data", "drop", "kind", "message"),
    [
        (TRAIN, 1.0, SettingError, "fraction to drop"),
        (TRAIN, -0.1, SettingError, "fraction to drop"),
        (TRAIN[0], 0.3, LabelError, "labels are needed"),
        ([], 0.3, EmptyDataError, "Pruning needs at least one example"),
        (DataLoader(TensorDataset(*TRAIN), shuffle=True), 0.3, DataError, "shuffle=False"),
    ],
)
def test_pruning_refuses(data: Any, drop: float, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fitted().prune(data, drop)


def test_large_shares_are_warned_of() -> None:
    with pytest.warns(IfcompWarning, match="a share of 0.999 leaves mostly hard examples"):
        keep = fitted().prune(TRAIN, 0.999)
    assert len(keep) == 1


def test_pruning_needs_a_fit() -> None:
    with pytest.raises(NotFittedError):
        IFComp(names()["model"]).prune(TRAIN)


# Reports ------------------------------------------------------------------------------------------------------------


def page(tmp_path: Path, ifc: IFComp | None = None, **parts: Any) -> str:
    path = (ifc or fitted()).report(tmp_path / "report.html", **parts)
    assert path == tmp_path / "report.html"
    assert [found.name for found in tmp_path.iterdir()] == ["report.html"]  # nothing temporary is left
    return path.read_text()


def test_all_results_are_on_the_page(tmp_path: Path) -> None:
    ifc = fitted()
    calibration = ifc.calibrate(names()["held_out"])
    gate = ifc.ood_detector(names()["held_out"])
    ood = gate.table(TRAIN[0], ood=1 - TRAIN[0])
    text = page(tmp_path, audit=audit(), ood=ood, calibration=calibration, title="All <results>")
    assert audit().headline in text
    known = int((ood.ood_scores > gate.threshold).sum())
    assert f"{len(ood.flagged) + known} of 800 inputs are above the threshold" in text
    assert f"known OOD inputs: 400 examples, median {np.median(ood.ood_scores):.3g}, {known} flagged" in text
    assert f"{calibration.curves['softmax'].ece:.3f}" in text
    assert "All &lt;results&gt;" in text
    assert "2,410 of the model" in text
    assert "neighbours={suspect" not in text  # no hint about a missing part
    assert "explanations={suspect" not in text


def test_names_of_the_audit_are_shown(tmp_path: Path) -> None:
    named = audit().with_names([f"digit {label}" for label in range(10)], [f"file {index}.png" for index in range(400)])
    text = page(tmp_path, audit=named)
    assert "digit 7" in text
    assert f"file {named.ranked['index'].iloc[0]}.png" in text


def test_previews_are_shown(tmp_path: Path) -> None:
    text = page(tmp_path, audit=audit(), previews=lambda indices: [Preview("text", f"my {index}") for index in indices])
    assert f"my {audit().ranked['index'].iloc[0]}" in text


def test_an_audit_without_a_fit_is_reported(tmp_path: Path) -> None:
    ifc = IFComp(names()["model"])
    text = page(tmp_path, ifc, audit=ifc.audit(TRAIN))
    assert "The fit covers" not in text


def test_ood_must_be_a_table_of_a_detector(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ood must be a table of a detector"):
        fitted().report(tmp_path / "r.html", ood=[1, 2])


@pytest.mark.parametrize("name", ["run.ifcomp", "train.npz", "report"])
def test_only_pages_are_written(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("data")
    with pytest.raises(SettingError, match=r"must end in \.html"):
        fitted().report(tmp_path / name, audit=audit())
    assert (tmp_path / name).read_text() == "data"


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="nothing to report"):
        IFComp(names()["model"]).report(tmp_path / "r.html")
    assert not list(tmp_path.iterdir())


# Results of another model or fit --------------------------------------------------------------------------------------


def test_an_audit_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="LabelAudit was made with another model"):
        other().report(tmp_path / "r.html", audit=audit())


def test_ood_scores_of_another_model_are_refused(tmp_path: Path) -> None:
    table = fitted().ood_detector(names()["held_out"]).table(TRAIN[0])
    with pytest.raises(SettingError, match="OODTable was made with another model"):
        other().report(tmp_path / "r.html", ood=table)


def test_a_calibration_of_another_model_fit_or_damping_is_refused(tmp_path: Path) -> None:
    calibration = fitted().calibrate(names()["held_out"])
    model = names()["model"]
    others = {
        "model": other(),
        "fit": IFComp(model, seed=5).fit(TRAIN),
        "beta": IFComp(model, beta=0.5).fit(TRAIN),
        "damping": IFComp(model, damping=1.0).fit(TRAIN),
    }
    for difference, ifc in others.items():
        with pytest.raises(SettingError, match=rf"another model or fit: .*\b{difference} "):
            ifc.calibration = calibration
        with pytest.raises(SettingError, match="another model or fit"):
            ifc.report(tmp_path / "r.html", calibration=calibration)
    with pytest.raises(SettingError, match="calibration is for damping"):
        fitted().predict_proba(TRAIN[0], damping=1.0)
    unknown = replace(calibration, settings={})
    with pytest.raises(SettingError, match="another model or fit"):
        fitted().calibration = unknown
