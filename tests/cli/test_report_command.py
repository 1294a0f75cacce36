"""`ifcomp report` and `ifcomp audit --report` hand the right parts to the page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workshop import Workshop, ifcomp

from ifcomp import IFComp, Relative
from ifcomp.tasks.mislabel import AUDIT_DAMPING
from ifcomp.tasks.ood import OOD_DAMPING


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `build_report` is given; the page is written all the same."""
    from ifcomp import report

    given: dict[str, Any] = {}
    real = report.build_report

    def spy(path: str, **parts: Any) -> Path:
        given.update(parts)
        return real(path, **parts)

    monkeypatch.setattr("ifcomp.cli.auditing.build_report", spy)
    return given


def test_all_parts(run: Workshop, handed: dict[str, Any]) -> None:
    assert ifcomp("calibrate", "run.ifcomp", "npz:valid.npz", "--betas", "2").exit_code == 0
    given = ["--held-out", "npz:valid.npz", "--strange", "npz:strange.npz", "--calibrated", "calibrated.ifcomp"]
    found = ifcomp("report", "run.ifcomp", *given, "--fraction", "0.05", "--title", "My <digits>", "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["suspects"] == 10
    page = Path("report.html").read_text()
    assert "My &lt;digits&gt;" in page
    assert "digit 3" in page
    assert str(run.folder) not in page
    audit = handed["audit"].frame
    assert list(handed["previews"]) == audit["index"].tolist()[:200]
    index = audit["index"][7]
    np.testing.assert_array_equal(handed["previews"][index].content, run.arrays("train")[0][index].numpy())
    ifc = IFComp.load("run.ifcomp", run.network())
    groups = handed["complexity"].groups
    assert list(groups) == ["npz:valid.npz", "npz:strange.npz"]
    expected = ifc.bounded_complexity(run.arrays("strange")[0], damping=OOD_DAMPING)
    np.testing.assert_allclose(groups["npz:strange.npz"], expected, rtol=1e-3)
    valid, labels = run.arrays("valid")
    own = run.network()(valid).softmax(1).max(1)
    before = handed["calibration"].before
    assert float(np.average(before.accuracy, weights=before.count)) == pytest.approx(
        float((own.indices == labels).double().mean())
    )
    record = json.loads(Path("calibrated.ifcomp.json").read_text())
    best = IFComp.load("calibrated.ifcomp", run.network()).predict_proba(valid, record["alpha"]).amax(1)
    after = handed["calibration"].after
    assert float(np.average(after.confidence, weights=after.count)) == pytest.approx(float(best.mean()), rel=1e-4)


def test_suspects_come_with_the_training_examples_behind_their_labels(run: Workshop, handed: dict[str, Any]) -> None:
    assert ifcomp("report", "run.ifcomp", "--fraction", "0.05").exit_code == 0
    suspects = handed["audit"].suspects["index"].tolist()
    assert list(handed["explanations"]) == suspects
    x, y = run.arrays("train")
    explained = IFComp.load("run.ifcomp", run.network()).explain(
        x[suspects[:1]], y[suspects[:1]], [(x, y)], k=4, positions=suspects[:1], damping=AUDIT_DAMPING
    )
    found = handed["explanations"][suspects[0]]
    assert [example.index for example in found] == explained.frame["index"].tolist()
    np.testing.assert_allclose([example.influence for example in found], explained.frame["effect"], rtol=1e-3)
    assert all(example.label == y[example.index] and example.index != suspects[0] for example in found)
    np.testing.assert_array_equal(found[0].preview.content, x[found[0].index].numpy())


def test_they_are_explained_with_the_damping_of_the_audit(run: Workshop, handed: dict[str, Any]) -> None:
    arguments = ("--fraction", "0.05", "--damping", "relative:0.01", "--report", "a.html")
    assert ifcomp("audit", "run.ifcomp", *arguments).exit_code == 0
    suspect = handed["audit"].suspects["index"].tolist()[:1]
    x, y = run.arrays("train")
    ifc = IFComp.load("run.ifcomp", run.network())
    effects = [
        ifc.explain(x[suspect], y[suspect], [(x, y)], k=4, positions=suspect, damping=damping).frame["effect"]
        for damping in (Relative(0.01), AUDIT_DAMPING)
    ]
    found = [example.influence for example in handed["explanations"][suspect[0]]]
    np.testing.assert_allclose(found, effects[0], rtol=1e-3)
    assert not np.allclose(found, effects[1], rtol=0.1)


def test_other_data_comes_without_them(run: Workshop, handed: dict[str, Any]) -> None:
    assert ifcomp("report", "run.ifcomp", "npz:valid.npz").exit_code == 0
    assert handed["explanations"] is None


def test_labels_alone(run: Workshop, handed: dict[str, Any]) -> None:
    found = ifcomp("report", "run.ifcomp")
    assert found.exit_code == 0, found.output
    assert "Wrote report.html" in " ".join(found.stdout.split())
    assert (handed.get("complexity"), handed["calibration"]) == (None, None)
    assert handed["title"] == "Labels of npz:train.npz"
    assert handed["coverage"].covered == 910


def test_the_audit_writes_it_too(run: Workshop, handed: dict[str, Any]) -> None:
    found = ifcomp("audit", "run.ifcomp", "--report", "a.html", "--json")
    assert json.loads(found.stdout)["written"] == ["audit.csv", "a.html"]
    assert handed["audit"].settings["damping"] == "Relative(multiple=10.0)"
    assert Path("a.html").read_text().startswith("<!")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "run.ifcomp", "--out", "report.pdf"], "must end in .html"),
        (["report", "run.ifcomp", "--calibrated", "run.ifcomp"], "--calibrated needs --held-out"),
        (["report", "run.ifcomp", "--calibrated", "run.ifcomp", "--held-out", "npz:valid.npz"], "is not calibrated"),
        (["report", "run.ifcomp", "--held-out", "npz:gone.npz"], "no file 'gone.npz'"),
        (["report", "run.ifcomp", "--strange", "npz:gone.npz"], "no file 'gone.npz'"),
        (["report", "run.ifcomp", "--fraction", "0.1", "--noise-rate", "0.1"], "not both"),
        (["report", "run.ifcomp", "npz:bare.npz"], "has no labels"),
        (["audit", "run.ifcomp", "--report", "gone/a.html"], "there is no folder 'gone'"),
    ],
)
def test_bad_input_ends_with_2_and_writes_nothing(run: Workshop, arguments: list[str], words: str) -> None:
    np.savez("bare.npz", x=run.arrays("valid")[0].numpy())
    before = {path.name for path in Path().iterdir()}
    found = ifcomp(*arguments)
    assert found.exit_code == 2, found.output
    assert words in " ".join(found.stderr.split())
    assert {path.name for path in Path().iterdir()} == before


@pytest.mark.filterwarnings("always")
def test_texts_of_different_lengths_are_shown_without_explanations(workshop: Workshop, handed: dict[str, Any]) -> None:
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
        "    made = torch.Generator().manual_seed(0)\n"
        "    return [{'input_ids': torch.randint(9, (5, 3 + step), generator=made), 'labels': torch.arange(5) % 2}\n"
        "            for step in range(4)]\n"
    )
    assert ifcomp("fit", "texts:Mean", "texts:data").exit_code == 0
    found = ifcomp("report", "run.ifcomp", "--fraction", "0.5")
    assert found.exit_code == 0, found.output
    assert "Warning: The report does not explain suspects: inputs of 'texts:data'" in found.stderr
    assert handed["explanations"] == {}
    assert handed["previews"][int(handed["audit"].frame["index"][0])].kind == "text"
