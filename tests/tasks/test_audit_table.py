"""The table of a label audit: names, descriptions, neighbours, headline; and audits of digits with flipped labels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ifcomp import IFComp
from ifcomp.errors import DataError
from ifcomp.evidence.members import MODEL, Evidence, Member
from ifcomp.tasks.audit import AUDIT_DAMPING, DESCRIPTIONS, LabelAudit, audit_evidence
from ifcomp.tasks.metrics import auroc
from tasks.digits import flipped_labels, images_and_labels, score_digits, train_network

CLASSES = ("ant", "bee", "cat")


def make_audit(echoes: bool = False) -> LabelAudit:
    """30 labels of three classes; label 4 is wrong. A memorised layer and the model agree with all labels."""
    truth = np.arange(30) % 3
    labels = truth.copy()
    labels[4] = 2
    good, memorised = (np.full((30, 3), 0.1) + 0.7 * np.eye(3)[given] for given in (truth, labels))
    layers = {"input": good, "conv": good, "head": memorised}
    neighbours = {name: np.stack([np.arange(5)] * 30) + place for place, name in enumerate(layers)}
    members = [Member(name, kind, layers[name]) for name in layers for kind in ("votes", "readout")]
    members = [*members, Member(MODEL, MODEL, memorised if echoes else good)]
    return audit_evidence(Evidence(labels, members, neighbours, labels, True), {"seed": 0})


@pytest.fixture
def audit() -> LabelAudit:
    return make_audit()


def test_names_are_beside_the_numbers(audit: LabelAudit, tmp_path: Path) -> None:
    files = [f"{number}.png" for number in range(30)]
    named = audit.with_names(CLASSES, files)
    assert list(named.frame.columns[:5]) == ["index", "name", "label", "label_name", "suggested"]
    assert named.frame.columns[5] == "suggested_name"
    row = named.ranked.iloc[0]
    assert tuple(row[["name", "label_name", "suggested_name"]]) == ("4.png", "cat", "bee")
    assert named.frame["name"].tolist() == files
    assert "name" not in audit.frame.columns  # the audit itself is unchanged
    named.to_csv(tmp_path / "audit.csv")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "audit.csv"), named.frame)


def test_classes_or_examples_may_be_unnamed(audit: LabelAudit) -> None:
    assert "name" not in audit.with_names(CLASSES).frame.columns
    assert "label_name" not in audit.with_names(None, ["x"] * 30).frame.columns
    pd.testing.assert_frame_equal(audit.with_names().frame, audit.frame)


def test_names_can_be_replaced(audit: LabelAudit) -> None:
    first = audit.with_names(("a", "b", "c"), ["x"] * 30)
    pd.testing.assert_frame_equal(
        first.with_names(CLASSES, ["y"] * 30).frame, audit.with_names(CLASSES, ["y"] * 30).frame
    )
    assert first.frame["name"].tolist() == ["x"] * 30


def test_names_that_do_not_fit_are_refused(audit: LabelAudit) -> None:
    with pytest.raises(DataError, match="29 names of examples, but 30 examples"):
        audit.with_names(None, ["x"] * 29)
    with pytest.raises(DataError, match="2 class names, but 3 classes"):
        audit.with_names(("a", "b"))


def test_every_column_is_described(audit: LabelAudit) -> None:
    named = audit.with_names(CLASSES, ["x"] * 30)
    assert list(named.descriptions) == list(named.frame.columns)
    assert set(named.descriptions) | {"label_complexity"} == set(DESCRIPTIONS)
    assert "larger = more suspicious" in named.descriptions["score"]


def test_neighbours_of_layers_that_carry_the_audit() -> None:
    audit = make_audit(echoes=True)
    near = audit.neighbours(4)
    weights = audit.weights.set_index(["layer", "predictor"])["weight"]
    carrying = [name for name in ("input", "conv", "head") if weights[name, "votes"] >= 0.1]
    assert 0 < len(carrying) <= 3
    assert sorted(near["layer"]) == sorted(carrying)
    assert near["weight"].tolist() == sorted(near["weight"], reverse=True)
    row = near[near["layer"] == "conv"].iloc[0]
    assert row["neighbours"] == [1, 2, 3, 4, 5]
    assert row["neighbour_labels"] == [1, 2, 0, 2, 2]


def test_the_headline_mentions_contradicted_labels_that_are_no_suspects(audit: LabelAudit) -> None:
    frame = audit.frame.assign(score=-1.0, is_suspect=False)
    frame.loc[[3, 4, 5, 6], "score"] = 1.0
    for suspects, more in (([3, 4, 5], None), ([3, 4], 2), ([], 4)):
        chosen = replace(audit, frame=frame.assign(is_suspect=frame["index"].isin(suspects)))
        expected = (
            f"The layers contradict {more} more labels, with smaller scores: hard examples, or further wrong labels."
        )
        assert (expected in chosen.headline) == (more is not None), (suspects, chosen.headline)


@pytest.mark.parametrize(("rate", "is_large"), [(0.05, False), (0.36, True)])
def test_the_headline_of_a_large_noise_rate_mentions_hard_classes(
    audit: LabelAudit, rate: float, is_large: bool
) -> None:
    """30 labels, of which 12 are contradicted. Nobody can tell from them whether labels are wrong or classes hard."""
    frame = audit.frame.assign(score=[1.0] * 12 + [-1.0] * 18)
    headline = replace(audit, frame=frame, noise_rate=rate).headline
    assert ("The layers predict 60% of the labels. If the classes are hard" in headline) == is_large


def test_ranked_rows_and_headline(audit: LabelAudit) -> None:
    assert audit.ranked["index"].iloc[0] == 4
    assert sorted(audit.ranked["index"]) == list(range(30))
    assert f"{len(audit.suspects)} of 30 labels are suspects" in audit.headline


@pytest.mark.parametrize(("rate", "tolerance"), [(0.0, 0.02), (0.05, 0.025), (0.2, 0.05), (0.4, 0.08)])
def test_flipped_digits_are_suspects(rate: float, tolerance: float) -> None:
    images = images_and_labels()[0]
    labels, flipped = flipped_labels(rate, seed=0)
    audit = IFComp(train_network(images, labels)).audit([(images, labels)], progress=False)
    assert audit.noise_rate == pytest.approx(rate, abs=tolerance)
    assert flipped[audit.suspects["index"]].sum() > 0.75 * flipped.sum() - 1
    if rate:
        assert auroc(audit.frame["score"], flipped) > 0.98
        assert flipped[audit.suspects["index"]].mean() > 0.9


def test_memorised_labels_are_still_found() -> None:
    """The loss of a network that has memorised nearly all flipped labels does not find them."""
    labels, flipped = (values[:600] for values in flipped_labels(0.3, seed=0))
    images = images_and_labels()[0][:600]
    model = train_network(images, labels, epochs=500)
    memorised = (model(images).argmax(1) == labels).numpy()
    assert memorised[flipped].mean() > 0.8
    audit = IFComp(model).audit([(images, labels)], progress=False)
    loss = torch.nn.functional.cross_entropy(model(images), labels, reduction="none").detach().numpy()
    assert auroc(audit.frame["score"], flipped) > max(0.95, auroc(loss, flipped) + 0.02)
    assert audit.memorised > 0.1
    assert "has memorised labels" in audit.headline


@pytest.mark.parametrize(("epochs", "memorised"), [(8, False), (120, True)])
def test_label_complexity_beats_the_plain_loss_until_labels_are_memorised(epochs: int, memorised: bool) -> None:
    """Flipped digits get the next class as label. After the network has memorised them both scores are alike."""
    truth = images_and_labels()[1]
    flipped = np.zeros(len(truth), dtype=bool)
    flipped[np.random.default_rng(0).choice(len(truth), round(0.3 * len(truth)), replace=False)] = True
    table = score_digits((truth + torch.tensor(flipped)) % 10, 1.0, AUDIT_DAMPING, epochs)
    fitted = table.column("prediction") == table.column("label")
    assert (fitted[flipped].mean() > 0.5) == memorised
    gain = auroc(table.column("label_complexity"), flipped) - auroc(table.column("error"), flipped)
    assert abs(gain) < 0.005 if memorised else gain > 0.015
