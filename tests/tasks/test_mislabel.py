"""Label audits of given tables and of digits with flipped labels."""

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


def audit(**options: float) -> LabelAudit:
    table = table_of(COMPLEXITY, LABELS)
    return audit_labels(ScoreTable(table.frame.assign(stochastic_complexity=range(5)), table.settings), **options)


def test_the_most_suspicious_come_first_and_ties_in_order() -> None:
    result = audit(fraction=0.4)
    assert result.frame["index"].tolist() == [1, 3, 0, 4, 2]
    assert result.frame["rank"].tolist() == [1, 2, 3, 4, 5]
    assert result.frame["label_complexity"].tolist() == [2.0, 2.0, 0.5, 0.3, 0.1]
    assert result.frame["stochastic_complexity"].tolist() == [1, 3, 0, 4, 2]
    assert result.frame["label"].tolist() == [1, 1, 0, 1, 0]
    assert result.frame["suggested_label"].tolist() == [0, 0, 1, 0, 1]
    assert result.suspects["index"].tolist() == [1, 3]
    assert result.threshold == 2.0
    assert result.settings == {
        **SETTINGS,
        "fraction": 0.4,
        "noise_rate": result.noise_rate,
        "noise_rate_estimated": True,
    }


@pytest.mark.parametrize(("share", "count", "threshold"), [(0.0, 0, math.inf), (0.6, 3, 0.5), (1.0, 5, 0.1)])
def test_the_share_sets_the_threshold(share: float, count: int, threshold: float) -> None:
    for result in (audit(fraction=share), audit(noise_rate=share)):
        assert len(result.suspects) == count
        assert result.threshold == threshold
        assert result.frame["is_suspect"].tolist() == [True] * count + [False] * (5 - count)
    assert result.noise_rate == share
    assert not result.settings["noise_rate_estimated"]


def test_by_default_suspects_are_the_labels_that_the_model_contradicts() -> None:
    result = audit_labels(table_of([0.5, 2.0, 0.69, 0.7, 0.0], LABELS))
    assert result.suspects["index"].tolist() == [1, 3]
    assert result.threshold == 0.7
    assert result.settings["noise_rate_estimated"]


def test_columns_are_described_and_error_is_called_the_plain_loss() -> None:
    result = audit()
    assert list(result.frame.columns) == [
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
    assert list(result.descriptions) == list(result.frame.columns)
    assert "plain loss" in result.descriptions["error"]
    assert "nats" in result.descriptions["error"]
    for column in ("stochastic_complexity", "label_complexity"):
        assert "larger = more suspicious" in result.descriptions[column]


def test_audits_are_written_to_files(tmp_path: Path) -> None:
    result = audit(fraction=0.4)
    result.to_csv(tmp_path / "audit.csv")
    result.to_parquet(tmp_path / "audit.parquet")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "audit.csv"), result.frame)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "audit.parquet"), result.frame)
    schema = pq.read_schema(tmp_path / "audit.parquet")
    assert json.loads(schema.metadata[b"ifcomp"]) == dict(result.settings)
    assert schema.field("error").metadata[b"description"].decode() == result.descriptions["error"]


def test_unusable_audits_are_refused() -> None:
    with pytest.raises(DataError, match="Score data with labels"):
        audit_labels(table_of(COMPLEXITY))
    with pytest.raises(SettingError, match="not both"):
        audit(fraction=0.1, noise_rate=0.1)
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(SettingError, match="fraction"):
            audit(fraction=share)
        with pytest.raises(SettingError, match="noise_rate"):
            audit(noise_rate=share)


def test_noise_rate_by_hand() -> None:
    """Mean probabilities of the labels: class 0 (0.9 + 0.9 + 0.2 + 0.4) / 4 = 0.6, class 1 (0.7 + 0.5) / 2 = 0.6.

    Label 0: two are right, the third is wrong (0.8 for class 1), the fourth (0.55 for class 1) is not counted.
    Label 1: one is right, the other is not counted.
    """
    p = [[0.9, 0.1, 0], [0.9, 0.1, 0], [0.2, 0.8, 0], [0.4, 0.55, 0.05], [0.3, 0.7, 0], [0.5, 0.5, 0]]
    table = table_of([0.0] * 6, [0, 0, 0, 0, 1, 1], p)
    assert estimate_noise_rate(table) == pytest.approx((4 * 1 / 3 + 2 * 0) / 6)


def test_classes_without_examples_are_never_confident() -> None:
    assert estimate_noise_rate(table_of([0.0] * 2, [0, 0], [[0.1, 0.9], [0.2, 0.8]])) == 0


@cache
def digits_table(rate: float) -> tuple[ScoreTable, np.ndarray]:
    labels, flipped = flipped_labels(rate, seed=0)
    return score_digits(labels, beta=AUDIT_BETA, damping=AUDIT_DAMPING), flipped


@pytest.mark.parametrize(("rate", "tolerance"), [(0.0, 0.01), (0.05, 0.015), (0.2, 0.03), (0.4, 0.03)])
def test_flipped_labels_are_suspects_and_their_share_is_estimated(rate: float, tolerance: float) -> None:
    table, flipped = digits_table(rate)
    result = audit_labels(table)
    assert result.noise_rate == pytest.approx(rate, abs=tolerance)
    assert len(result.suspects) == (table.column("suggested_probability") > table.column("label_probability")).sum()
    assert flipped[result.suspects["index"]].sum() > 0.9 * flipped.sum() - 1
    if rate:
        assert auroc(table.column("label_complexity"), flipped) > 0.98
        suspects = flipped[audit_labels(table, noise_rate=rate).suspects["index"]]
        assert suspects.mean() > 0.9


@pytest.mark.parametrize(("epochs", "memorised"), [(8, False), (120, True)])
def test_label_complexity_beats_the_plain_loss_until_labels_are_memorised(epochs: int, memorised: bool) -> None:
    """Flipped digits get the next class as label. After the network has memorised them both scores are alike."""
    truth = images_and_labels()[1]
    flipped = np.zeros(len(truth), dtype=bool)
    flipped[np.random.default_rng(0).choice(len(truth), round(0.3 * len(truth)), replace=False)] = True
    table = score_digits((truth + torch.tensor(flipped)) % 10, AUDIT_BETA, AUDIT_DAMPING, epochs)
    fitted = table.column("prediction") == table.column("label")
    assert (fitted[flipped].mean() > 0.5) == memorised
    aurocs = {name: auroc(table.column(name), flipped) for name in ("error", "stochastic_complexity", AUDIT_COLUMN)}
    gain = aurocs[AUDIT_COLUMN] - aurocs["error"]
    assert abs(gain) < 0.005 if memorised else gain > 0.015
    assert (aurocs["stochastic_complexity"] > aurocs["error"]) == memorised  # so audits do not use it
