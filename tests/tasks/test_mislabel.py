"""Label audits: tables by hand, and digits with planted label errors."""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from ifcomp import ScoreTable
from ifcomp.errors import DataError, SettingError
from ifcomp.tasks.metrics import auroc
from ifcomp.tasks.mislabel import AUDIT_BETA, AUDIT_COLUMN, AUDIT_DAMPING, LabelAudit, audit_labels, estimate_noise_rate
from tasks.digits import flipped_labels, images_and_labels, score_digits
from tasks.tables import SETTINGS, table_of

COMPLEXITY = [0.5, 2.0, 0.1, 2.0, 0.3]
LABELS = [0, 1, 0, 1, 1]


def audit(**how: float) -> LabelAudit:
    table = table_of(COMPLEXITY, LABELS)
    return audit_labels(ScoreTable(table.frame.assign(stochastic_complexity=range(5)), table.settings), **how)


def test_the_most_suspicious_come_first_and_ties_in_order() -> None:
    found = audit(fraction=0.4)
    assert found.frame["index"].tolist() == [1, 3, 0, 4, 2]
    assert found.frame["rank"].tolist() == [1, 2, 3, 4, 5]
    assert found.frame["label_complexity"].tolist() == [2.0, 2.0, 0.5, 0.3, 0.1]
    assert found.frame["stochastic_complexity"].tolist() == [1, 3, 0, 4, 2]
    assert found.frame["label"].tolist() == [1, 1, 0, 1, 0]
    assert found.frame["suggested_label"].tolist() == [0, 0, 1, 0, 1]
    assert found.suspects["index"].tolist() == [1, 3]
    assert found.threshold == 2.0
    assert found.settings == {**SETTINGS, "fraction": 0.4, "noise_rate": found.noise_rate, "noise_rate_estimated": True}


@pytest.mark.parametrize(("share", "count", "threshold"), [(0.0, 0, math.inf), (0.6, 3, 0.5), (1.0, 5, 0.1)])
def test_the_share_sets_the_threshold(share: float, count: int, threshold: float) -> None:
    for found in (audit(fraction=share), audit(noise_rate=share)):
        assert len(found.suspects) == count
        assert found.threshold == threshold
        assert found.frame["is_suspect"].tolist() == [True] * count + [False] * (5 - count)
    assert found.noise_rate == share
    assert not found.settings["noise_rate_estimated"]


def test_suspects_are_what_the_model_contradicts_unless_their_share_is_given() -> None:
    found = audit_labels(table_of([0.5, 2.0, 0.69, 0.7, 0.0], LABELS))
    assert found.suspects["index"].tolist() == [1, 3]
    assert found.threshold == 0.7
    assert found.settings["noise_rate_estimated"]


def test_columns_are_described_and_error_is_called_the_plain_loss() -> None:
    found = audit()
    assert list(found.frame.columns) == [
        "rank",
        "index",
        "label",
        "suggested_label",
        "label_probability",
        "suggested_probability",
        "error",
        "parametric_complexity",
        "stochastic_complexity",
        "label_complexity",
        "surprise",
        "is_suspect",
    ]
    assert list(found.descriptions) == list(found.frame.columns)
    assert "plain loss" in found.descriptions["error"]
    assert "nats" in found.descriptions["error"]
    for column in ("stochastic_complexity", "label_complexity"):
        assert "larger = more suspicious" in found.descriptions[column]


def test_audits_come_back_from_files(tmp_path: Path) -> None:
    found = audit(fraction=0.4)
    found.to_csv(tmp_path / "audit.csv")
    found.to_parquet(tmp_path / "audit.parquet")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "audit.csv"), found.frame)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "audit.parquet"), found.frame)
    schema = pq.read_schema(tmp_path / "audit.parquet")
    assert json.loads(schema.metadata[b"ifcomp"]) == dict(found.settings)
    assert schema.field("error").metadata[b"description"].decode() == found.descriptions["error"]


def test_what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(DataError, match="Score data with labels"):
        audit_labels(table_of(COMPLEXITY))
    with pytest.raises(SettingError, match="not both"):
        audit(fraction=0.1, noise_rate=0.1)
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(SettingError, match="fraction"):
            audit(fraction=share)
        with pytest.raises(SettingError, match="noise_rate"):
            audit(noise_rate=share)


def test_noise_is_counted_where_the_model_is_confident() -> None:
    """Mean probabilities of the labels: class 0 (0.9 + 0.9 + 0.2 + 0.4) / 4 = 0.6, class 1 (0.7 + 0.5) / 2 = 0.6.

    Labelled 0: two are right, the third wrong (0.8 for class 1), and the fourth, with 0.55 for class 1, not counted.
    Labelled 1: one is right, the other not counted.
    """
    p = [[0.9, 0.1, 0], [0.9, 0.1, 0], [0.2, 0.8, 0], [0.4, 0.55, 0.05], [0.3, 0.7, 0], [0.5, 0.5, 0]]
    table = table_of([0.0] * 6, [0, 0, 0, 0, 1, 1], p)
    assert estimate_noise_rate(table) == pytest.approx((4 * 1 / 3 + 2 * 0) / 6)


def test_classes_that_nobody_is_labelled_with_are_never_confident() -> None:
    assert estimate_noise_rate(table_of([0.0] * 2, [0, 0], [[0.1, 0.9], [0.2, 0.8]])) == 0


@cache
def digits_table(rate: float) -> tuple[ScoreTable, np.ndarray]:
    labels, flipped = flipped_labels(rate, seed=0)
    return score_digits(labels, beta=AUDIT_BETA, damping=AUDIT_DAMPING), flipped


@pytest.mark.parametrize(("rate", "tolerance"), [(0.0, 0.01), (0.05, 0.015), (0.2, 0.03), (0.4, 0.03)])
def test_planted_errors_are_found_and_their_share_estimated(rate: float, tolerance: float) -> None:
    table, flipped = digits_table(rate)
    found = audit_labels(table)
    assert found.noise_rate == pytest.approx(rate, abs=tolerance)
    assert len(found.suspects) == (table.column("suggested_probability") > table.column("label_probability")).sum()
    assert flipped[found.suspects["index"]].sum() > 0.9 * flipped.sum() - 1
    if rate:
        assert auroc(table.column("label_complexity"), flipped) > 0.98
        suspects = flipped[audit_labels(table, noise_rate=rate).suspects["index"]]
        assert suspects.mean() > 0.9


@pytest.mark.parametrize(("epochs", "memorised"), [(8, False), (120, True)])
def test_asymmetric_errors_are_found_better_than_by_the_plain_loss(epochs: int, memorised: bool) -> None:
    """Every flipped digit is called the next one: before the network has learnt that by heart, and after."""
    truth = images_and_labels()[1]
    flipped = np.zeros(len(truth), dtype=bool)
    flipped[np.random.default_rng(0).choice(len(truth), round(0.3 * len(truth)), replace=False)] = True
    table = score_digits((truth + torch.tensor(flipped)) % 10, AUDIT_BETA, AUDIT_DAMPING, epochs)
    learnt = table.column("prediction") == table.column("label")
    assert (learnt[flipped].mean() > 0.5) == memorised
    found = {name: auroc(table.column(name), flipped) for name in ("error", "stochastic_complexity", AUDIT_COLUMN)}
    assert found[AUDIT_COLUMN] > found["error"] + 0.002
    assert (found["stochastic_complexity"] > found["error"]) == memorised  # why audits do not sort by it
