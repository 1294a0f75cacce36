"""`ScoreTable`: columns and descriptions, CSV and Parquet files, and printing."""

import json
from functools import cache
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from fitted_cases import fitted, inputs_of
from ifcomp import ScoreTable, __version__


@cache
def table(labelled: bool = True, probes: int | None = None) -> ScoreTable:
    inputs = inputs_of("lenet")
    labels = torch.tensor([0, 1, 2, 3, 0])
    data = [(inputs, labels)] if labelled else [inputs]
    return fitted("lenet", beta=0.5).score(data, alpha=0.3, probes=probes)


TABLES = [(True, None), (False, None), (True, 2), (False, 2)]


@pytest.mark.parametrize(("labelled", "probes"), TABLES)
def test_csv_files_restore_the_table(labelled: bool, probes: int | None, tmp_path: Path) -> None:
    table(labelled, probes).to_csv(tmp_path / "scores.csv")
    frame = table(labelled, probes).frame
    restored = pd.read_csv(tmp_path / "scores.csv", dtype=str)
    pd.testing.assert_frame_equal(restored.astype(frame.dtypes.to_dict()), frame, check_exact=True)


@pytest.mark.parametrize(("labelled", "probes"), TABLES)
def test_parquet_files_restore_the_table(labelled: bool, probes: int | None, tmp_path: Path) -> None:
    scores = table(labelled, probes)
    scores.to_parquet(tmp_path / "scores.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "scores.parquet"), scores.frame, check_exact=True)
    schema = pq.read_schema(tmp_path / "scores.parquet")
    settings = json.loads(schema.metadata[b"ifcomp"])
    assert settings == json.loads(json.dumps(dict(scores.settings)))
    assert (settings["alpha"], settings["beta"], settings["probes"]) == (0.3, 0.5, probes)
    assert settings["training_examples"] == 7
    assert settings["version"] == __version__
    for field in schema:
        assert field.metadata[b"description"].decode() == scores.descriptions[field.name]


@pytest.mark.parametrize(("labelled", "probes"), TABLES)
def test_every_column_is_described(labelled: bool, probes: int | None) -> None:
    scores = table(labelled, probes)
    assert list(scores.descriptions) == list(scores.frame.columns)
    assert all(scores.descriptions.values())
    exact = [] if probes else ["bounded_complexity"]
    for name in ("expected_influence", "parametric_complexity", *exact):
        assert "larger = more surprising" in scores.descriptions[name]
    assert "nats" in scores.descriptions["parametric_complexity"]
    if labelled:
        assert "nats" in scores.descriptions["error"]
        assert "larger = more suspicious" in scores.descriptions["stochastic_complexity"]


@pytest.mark.parametrize(("labelled", "probes"), TABLES)
def test_columns_depend_on_labels_and_probes(labelled: bool, probes: int | None) -> None:
    columns = ["index", "prediction", "confidence", "expected_influence"]
    columns += ["expected_influence_error"] if probes else []
    columns += ["parametric_complexity", *([] if probes else ["bounded_complexity"])]
    if labelled:
        columns += ["label", "label_probability", "suggested_label", "suggested_probability", "error"]
        columns += ["label_complexity"]
        columns += [] if probes else ["influence", "regret"]
        columns += ["stochastic_complexity"]
    assert list(table(labelled, probes).frame.columns) == columns


def test_printed_tables_name_direction_and_unit() -> None:
    text = str(table())
    assert "5 examples" in text
    assert "larger = more surprising" in text
    assert "nats" in text
    assert all(name in text for name in table().frame.columns)


def test_printed_tables_are_shortened() -> None:
    frame = pd.concat([table().frame] * 40, ignore_index=True)
    text = str(ScoreTable(frame, table().settings))
    assert "200 examples" in text
    assert len(text.splitlines()) < 20


def test_the_length_is_the_number_of_examples() -> None:
    assert len(table()) == 5
