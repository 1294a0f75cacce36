"""`ifcomp report` and `ifcomp audit --report` pass the right parts to `build_report`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from project import Project, check_refused, ifcomp, run_json

from ifcomp import IFComp
from ifcomp.cli.report import _apply_command
from ifcomp.data.sources.base import Source
from ifcomp.tasks.audit import AUDIT_DAMPING


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of `build_report`, recorded while it writes the page."""
    from ifcomp import report

    recorded: dict[str, Any] = {}
    build_report = report.build_report

    def record(path: str, **arguments: Any) -> Path:
        recorded.update(arguments)
        return build_report(path, **arguments)

    monkeypatch.setattr("ifcomp.report.build_report", record)
    return recorded


@pytest.mark.filterwarnings("ignore:100 held-out examples are few")
def test_all_parts(run: Project, parts: dict[str, Any]) -> None:
    assert ifcomp("calibrate", "run.ifcomp", "npz:valid.npz").exit_code == 0
    assert ifcomp("ood", "run.ifcomp", "npz:inverted.npz", "--held-out", "npz:valid.npz").exit_code == 0
    options = ["--held-out", "npz:valid.npz", "--ood", "npz:inverted.npz", "--ood", "npz:unlabelled.npz"]
    content = run_json("report", "run.ifcomp", *options, "--title", "My <digits>")
    page = Path("report.html").read_text()
    assert content["headline"] == parts["audit"].headline
    assert content["headline"] in page
    assert content["suspects"] == len(parts["audit"].suspects) > 5
    assert "My &lt;digits&gt;" in page
    assert "digit 3" in page
    assert str(run.folder) not in page
    audit = parts["audit"].ranked
    assert list(parts["previews"]) == audit["index"].tolist()[:200]
    index = audit["index"].iloc[7]
    np.testing.assert_array_equal(parts["previews"][index].content, run.arrays("train")[0][index].numpy())
    ifc = IFComp.load("run.ifcomp", run.network())
    groups, gate = parts["ood"].groups, ifc.detector
    assert list(groups) == ["held-out inputs", "npz:inverted.npz", "npz:unlabelled.npz"]
    np.testing.assert_array_equal(groups["held-out inputs"], gate.rule.held_out_scores)
    np.testing.assert_allclose(groups["npz:inverted.npz"], gate.score(run.arrays("inverted")[0]), rtol=1e-3)
    assert parts["ood"].threshold == gate.threshold
    flagged = int((groups["npz:inverted.npz"] > gate.threshold).sum())
    assert f"{flagged:.3g}% flagged" in page  # of 100 inputs
    examples = parts["ood"].examples
    assert {example.data for example in examples} <= {"npz:inverted.npz", "npz:unlabelled.npz"}
    table = gate.table([run.arrays("inverted")[0]])
    shown = [example for example in examples if example.data == "npz:inverted.npz"]
    assert [example.index for example in shown] == table.flagged["index"].tolist()[:12]
    x, y = run.arrays("train")
    for example in shown:
        assert [near.index for near in example.nearest] == table.nearest[example.index].tolist()
        assert [near.label for near in example.nearest] == y[table.nearest[example.index]].tolist()
        np.testing.assert_array_equal(example.preview.content, run.arrays("inverted")[0][example.index].numpy())
        np.testing.assert_array_equal(example.nearest[0].preview.content, x[example.nearest[0].index].numpy())
    predicted = run.network()(x).argmax(1)
    assert parts["predictions"].tolist() == predicted.tolist()
    assert parts["apply_command"] == "ifcomp apply decisions.csv --data npz:train.npz --out train-corrected.npz"
    valid, labels = run.arrays("valid")
    softmax = run.network()(valid).softmax(1).max(1)
    before = parts["calibration"].before
    assert float(np.average(before.accuracy, weights=before.count)) == pytest.approx(
        float((softmax.indices == labels).double().mean())
    )
    confidence = IFComp.load("run.ifcomp", run.network()).predict_proba(valid).amax(1)
    after = parts["calibration"].after
    assert float(np.average(after.confidence, weights=after.count)) == pytest.approx(float(confidence.mean()), rel=1e-4)


def test_explanations_of_the_suspects(run: Project, parts: dict[str, Any]) -> None:
    assert ifcomp("report", "run.ifcomp").exit_code == 0
    suspects = parts["audit"].suspects["index"].tolist()
    assert list(parts["explanations"]) == suspects
    x, y = run.arrays("train")
    expected = IFComp.load("run.ifcomp", run.network()).explain(
        x[suspects[:1]], y[suspects[:1]], [(x, y)], k=4, positions=suspects[:1], damping=AUDIT_DAMPING
    )
    examples = parts["explanations"][suspects[0]]
    assert [example.index for example in examples] == expected.frame["index"].tolist()
    np.testing.assert_allclose([example.influence for example in examples], expected.frame["effect"], rtol=1e-3)
    assert all(example.label == y[example.index] and example.index != suspects[0] for example in examples)
    np.testing.assert_array_equal(examples[0].preview.content, x[examples[0].index].numpy())


def test_neighbours_of_the_suspects(run: Project, parts: dict[str, Any]) -> None:
    assert ifcomp("report", "run.ifcomp").exit_code == 0
    audit, (x, y) = parts["audit"], run.arrays("train")
    assert list(parts["neighbours"]) == audit.suspects["index"].tolist()
    suspect, layers = next(iter(parts["neighbours"].items()))
    expected = audit.neighbours(suspect)
    assert [layer.layer for layer in layers] == expected["layer"].tolist()
    assert [layer.weight for layer in layers] == expected["weight"].tolist()
    for layer, near in zip(layers, expected["neighbours"], strict=True):
        assert [example.index for example in layer.examples] == near[:4]
        assert all(example.label == y[example.index] for example in layer.examples)
        np.testing.assert_array_equal(layer.examples[0].preview.content, x[near[0]].numpy())


def test_neighbours_are_examples_of_the_reference(run: Project, parts: dict[str, Any]) -> None:
    arguments = ("audit", "run.ifcomp", "--reference", "npz:valid.npz", "--report", "a.html")
    assert ifcomp(*arguments).exit_code == 0
    x, y = run.arrays("valid")
    near = next(iter(parts["neighbours"].values()))[0].examples[0]
    assert near.label == y[near.index]
    np.testing.assert_array_equal(near.preview.content, x[near.index].numpy())


@pytest.mark.filterwarnings("ignore:The audit relies on only 2 of 5 predictors")
def test_other_data_has_no_explanations(run: Project, parts: dict[str, Any]) -> None:
    assert ifcomp("report", "run.ifcomp", "npz:valid.npz").exit_code == 0
    assert parts["explanations"] == {}
    assert parts["apply_command"] == "ifcomp apply decisions.csv --data npz:valid.npz --out valid-corrected.npz"


@pytest.mark.parametrize(
    ("spec", "names", "column", "expected"),
    [
        ("folder:my train/", ["a", "b"], None, "--data 'folder:my train/' --out moves.csv"),
        ("csv:../t.csv", ["x"], "y", "--data csv:../t.csv --out t-corrected.csv --label-column y"),
        ("parquet:t.parquet", ["1", "2"], None, "--data parquet:t.parquet --out t-corrected.parquet --by-name"),
        ("net:data", None, None, "--data DATA --out FILE"),
    ],
)
def test_the_command_that_carries_out_decisions(
    spec: str, names: list[str] | None, column: str | None, expected: str
) -> None:
    source = Source(spec, [], lambda indices: [])
    assert _apply_command(source, names, column) == f"ifcomp apply decisions.csv {expected}"


@pytest.mark.filterwarnings("ignore:100 held-out examples are few")
def test_a_calibrated_run_shows_its_cross_validated_figures(run: Project, parts: dict[str, Any]) -> None:
    assert ifcomp("calibrate", "run.ifcomp", "npz:valid.npz").exit_code == 0
    assert ifcomp("report", "run.ifcomp").exit_code == 0
    calibration = IFComp.load("run.ifcomp", run.network()).calibration
    pair = parts["calibration"]
    assert (pair.before.ece, pair.after_name) == (calibration.curves["softmax"].ece, calibration.form)


def test_labels_only(run: Project, parts: dict[str, Any]) -> None:
    result = ifcomp("report", "run.ifcomp")
    assert result.exit_code == 0, result.output
    assert "Wrote report.html" in " ".join(result.stdout.split())
    assert (parts["ood"], parts["calibration"]) == (None, None)
    assert parts["title"] == "Labels of npz:train.npz"
    assert parts["coverage"].covered == 910


def test_audit_with_report(run: Project, parts: dict[str, Any]) -> None:
    assert run_json("audit", "run.ifcomp", "--report", "a.html")["written"] == ["audit.csv", "a.html"]
    assert parts["audit"].headline in Path("a.html").read_text()
    assert parts["audit"].frame["label_name"][3].startswith("digit ")


def test_audit_without_a_run_reports_no_fit(project: Project, parts: dict[str, Any]) -> None:
    arguments = ("--model", project.model, "--weights", "net.safetensors", "--data", "npz:train.npz")
    assert run_json("audit", *arguments, "--report", "a.html")["written"] == ["audit.csv", "a.html"]
    assert (parts["coverage"], parts["explanations"]) == (None, {})
    assert list(parts["neighbours"]) == parts["audit"].suspects["index"].tolist()
    assert "run" not in parts["provenance"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "report.pdf"], "must end in .html"),
        (["--held-out", "npz:gone.npz"], "no file 'gone.npz'"),
        (["--ood", "npz:gone.npz"], "no file 'gone.npz'"),
        (["--ood", "npz:inverted.npz"], "has no detector yet"),
        (["--held-out", "npz:valid.npz"], "is not calibrated"),
        (["--fraction", "0.1"], "No such option: --fraction"),
        (["npz:unlabelled.npz"], "has no labels"),
    ],
)
def test_invalid_arguments(run: Project, arguments: list[str], message: str) -> None:
    check_refused("report", "run.ifcomp", *arguments, message=message)


@pytest.mark.filterwarnings("always")
def test_texts_of_different_lengths_have_no_explanations(project: Project, parts: dict[str, Any]) -> None:
    Path("texts.py").write_text(
        "import torch\n"
        "from torch import nn\n\n"
        "class Mean(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        torch.manual_seed(0)\n"
        "        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)\n\n"
        "    def forward(self, input_ids):\n"
        "        return self.head(self.words(input_ids).mean(1))\n\n"
        "def data():\n"
        "    g = torch.Generator().manual_seed(0)\n"
        "    return [{'input_ids': torch.randint(9, (5, 3 + step), generator=g), 'labels': torch.arange(5) % 2}\n"
        "            for step in range(4)]\n"
    )
    assert ifcomp("fit", "texts:Mean", "texts:data").exit_code == 3  # the model is not trained
    result = ifcomp("report", "run.ifcomp")
    assert result.exit_code == 0, result.output
    assert "Warning: The audit lists no influential examples: The inputs have different shapes" in result.stderr
    assert parts["explanations"] == {}
    assert parts["previews"][int(parts["audit"].ranked["index"].iloc[0])].kind == "text"
