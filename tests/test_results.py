"""Results have a one-line answer, HTML without markup of the data, a CSV file and settings."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from ifcomp import IFComp
from ifcomp.errors import SettingError
from ifcomp.explanation import Explanation
from ifcomp.scores import ScoreTable
from ifcomp.tables import SHOWN_ROWS, TableResult

HOSTILE = "<script>alert(1)</script>"


@cache
def predictor() -> IFComp:
    torch.manual_seed(0)
    x, y = data()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return IFComp(model.eval()).fit((x, y))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
    return x, x[:, :3].argmax(1)


def results() -> dict[str, Any]:
    ifc, (x, y) = predictor(), data()
    return {
        "audit": ifc.audit((x, y)).with_names([HOSTILE, "b", "c"]),
        "calibration": ifc.calibrate((x, y)),
        "detector": ifc.ood_detector(x),
        "coverage": ifc.coverage,
        "unfitted coverage": IFComp(ifc.model).coverage,
        "explanation": ifc.explain(x[:2], y[:2], (x, y), k=3),
        "scores": ifc.score((x, y)),
        "unlabelled scores": ifc.score(x),
    }


ANSWERS = {
    "audit": r"LabelAudit\(\d+ suspects among 90 labels, noise rate [\d.]+%, memorised [\d.]+%\)",
    "calibration": r"Calibration\((temperature .* ECE .*|no gain: keep the softmax, NLL .*)\)",
    "detector": r"OODDetector\(complexity \+ energy \+ neighbours, threshold \S+ accepts 0\.95 of 90 held-out inputs\)",
    "coverage": r"FittedCoverage\(67 of 67 parameters covered, 100 %, \d of 2 layers healthy\)",
    "unfitted coverage": r"Coverage\(67 of 67 parameters covered, 100 %\)",
    "explanation": r"Explanation\(\d supporting and \d contradicting training examples of 2 queries\)",
    "scores": r"ScoreTable\(90 examples, stochastic complexity \S+ nats in the median, \S+ at 95 %\)",
    "unlabelled scores": r"ScoreTable\(90 examples, parametric complexity \S+ nats in the median, \S+ at 95 %\)",
}


@pytest.mark.filterwarnings("ignore:90 held-out examples are few", "ignore:The audit relies on only")
def test_results(tmp_path: Path) -> None:
    made = results()
    assert made.keys() == ANSWERS.keys()
    for name, result in made.items():
        assert re.fullmatch(ANSWERS[name], repr(result)), repr(result)
        page = result._repr_html_()
        assert page.startswith("<p>")
        assert 2 <= page.count("<tr") <= (SHOWN_ROWS + 1 if name != "detector" else len(result.settings))
        assert "<script" not in page
        result.to_csv(tmp_path / "table.csv")
        written = pd.read_csv(tmp_path / "table.csv")
        assert list(written.columns) == list(result.frame.columns)
        assert len(written) == len(result.frame)
        assert isinstance(result.settings, dict)
        if "coverage" not in name:
            assert result.plot().axes
            assert result.settings["version"]


@pytest.mark.filterwarnings("ignore:90 held-out examples are few")
def test_the_frame_of_a_detector_has_the_held_out_scores() -> None:
    gate = predictor().ood_detector(data()[0], tpr=0.9)
    frame = gate.frame
    assert frame["index"].tolist() == list(range(90))
    assert list(frame[list(gate.members)].mean()) == [gate.rule.held_out[name].mean() for name in gate.members]
    assert (frame["score"] == gate.rule.held_out_scores).all()
    assert frame["is_ood"].sum() == 9
    assert frame["score"][~frame["is_ood"]].max() <= gate.threshold


def test_rows_of_the_data_are_escaped() -> None:
    frame = pd.DataFrame({"name": [HOSTILE] * 3, "stochastic_complexity": [1.0, 2.0, 3.0]})
    page = ScoreTable(frame, {})._repr_html_()
    assert "&lt;script&gt;" in page
    assert HOSTILE not in page

    class Named(TableResult):
        frame, answer = pd.DataFrame({HOSTILE: [1]}), HOSTILE

    assert HOSTILE not in Named()._repr_html_()


def test_notebooks_show_few_rows() -> None:
    frame = pd.DataFrame({"stochastic_complexity": range(1234)})
    assert "1,224 more rows" in ScoreTable(frame, {})._repr_html_()


def test_settings_of_explanations_and_scores_name_fit_and_damping() -> None:
    ifc, (x, y) = predictor(), data()
    settings = ifc.explain(x[:2], y[:2], (x, y), k=3, damping=0.5).settings
    assert (settings["damping"], settings["k"], settings["queries"], settings["training_examples"]) == ("0.5", 3, 2, 90)
    one, other = ifc.score(x).settings["model"], IFComp(nn.Linear(4, 3)).fit((x, y)).score(x).settings["model"]
    assert one == ifc.score(x, damping=1.0).settings["model"] != other


def test_plots_of_explanations_name_the_query() -> None:
    frame = pd.DataFrame({"query": [0, 1], "role": "supports", "rank": 1, "index": 5, "label": 1, "effect": [0.5, 0.1]})
    explanation = Explanation(frame, {"queries": 2})
    (axis,) = explanation.plot(1).axes
    assert [bar.get_width() for bar in axis.patches] == [0.1]
    with pytest.raises(SettingError, match=r"0 \.\.\. 1, but is 2"):
        explanation.plot(2)


def test_plots_of_scores_count_the_examples() -> None:
    (axis,) = ScoreTable(pd.DataFrame({"parametric_complexity": [0.0, 1.0, 1.0]}), {}).plot().axes
    assert sum(bar.get_height() for bar in axis.patches) == 3
