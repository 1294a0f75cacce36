"""`ifcomp score`, `audit`, `ood` and `prune` give what the library gives, in files, as words and as JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from workshop import Workshop, ifcomp

from ifcomp import IFComp, Relative
from ifcomp.tasks.metrics import auroc
from ifcomp.tasks.mislabel import AUDIT_DAMPING
from ifcomp.tasks.ood import OOD_DAMPING


def facts(*arguments: str, code: int = 0) -> dict[str, Any]:
    found = ifcomp(*arguments, "--json")
    assert found.exit_code == code, found.output
    content: dict[str, Any] = json.loads(found.stdout)
    assert (content["command"], content["exit_code"]) == (arguments[0], code)
    return content


def said(*arguments: str) -> str:
    found = ifcomp(*arguments)
    assert found.exit_code == 0, found.output
    return " ".join(found.stdout.split())


def predictor(workshop: Workshop) -> IFComp:
    return IFComp.load("run.ifcomp", workshop.network())


def test_scores_of_the_training_data(run: Workshop) -> None:
    content = facts("score", "run.ifcomp", "--batch-size", "37")
    assert (content["examples"], content["data"], content["written"]) == (200, "npz:train.npz", ["scores.parquet"])
    assert content["settings"]["seen"] is True
    expected = predictor(run).score([run.arrays("train")])
    found = pd.read_parquet("scores.parquet")
    pd.testing.assert_frame_equal(found, expected.frame, rtol=1e-4, atol=1e-8)
    assert content["summary"]["surprise"]["largest"] == pytest.approx(found["surprise"].max())
    assert content["summary"]["error"]["median"] == pytest.approx(found["error"].median())


def test_scores_of_other_data_are_of_labels_not_seen(run: Workshop) -> None:
    given = ["--alpha", "0.5", "--damping", "relative:0.01", "--linearized", "--out", "s.csv"]
    content = facts("score", "run.ifcomp", "npz:valid.npz", *given)
    assert content["settings"]["seen"] is False
    data = [run.arrays("valid")]
    expected = predictor(run).score(data, seen=False, alpha=0.5, damping=Relative(0.01), linearized=True)
    pd.testing.assert_frame_equal(pd.read_csv("s.csv"), expected.frame, rtol=1e-4, atol=1e-8)
    assert facts("score", "run.ifcomp", "npz:valid.npz", "--seen")["settings"]["seen"] is True
    assert facts("score", "run.ifcomp", "npz:train.npz")["settings"]["seen"] is True


def test_scores_from_probes(run: Workshop) -> None:
    content = facts("score", "run.ifcomp", "--probes", "10")
    found = pd.read_parquet("scores.parquet")
    assert "regret" not in found
    expected = predictor(run).score([run.arrays("train")])
    np.testing.assert_allclose(found["expected_influence"], expected.frame["expected_influence"], rtol=1e-3)
    assert content["settings"]["probes"] == 10
    found = ifcomp("score", "run.ifcomp", "npz:valid.npz", "--probes", "2")
    assert found.exit_code == 2
    assert "which probes do not give" in found.stderr


def test_the_audit_is_that_of_the_library(run: Workshop) -> None:
    content = facts("audit", "run.ifcomp", "--fraction", "0.05", "--top", "3")
    expected = predictor(run).score([run.arrays("train")], damping=AUDIT_DAMPING).frame
    order = expected["label_complexity"].to_numpy().argsort()[::-1]
    found = pd.read_csv("audit.csv")
    assert found["index"].tolist() == order.tolist()
    assert (content["suspects"], content["examples"], found["is_suspect"].sum()) == (10, 200, 10)
    assert [row["index"] for row in content["top"]] == order[:3].tolist()
    assert content["threshold"] == pytest.approx(found["label_complexity"][9])
    flipped = np.arange(200) % 20 == 0
    assert auroc(found["label_complexity"], flipped[found["index"]]) > 0.9


def test_words_of_the_audit(run: Workshop) -> None:
    words = said("audit", "run.ifcomp", "--noise-rate", "0.05", "--top", "2")
    assert "10 of 200 labels of npz:train.npz are suspects: label complexity of at least" in words
    assert "estimated" not in words
    assert "digit" in words
    assert "Wrote audit.csv all 200 labels" in words
    words = said("audit", "run.ifcomp", "--fraction", "0")
    assert "0 of 200 labels of npz:train.npz are suspects. An estimated" in words
    assert "worth a look all the same" in words
    words = said("audit", "run.ifcomp")
    contradicted = (pd.read_csv("audit.csv")["label_complexity"] > np.log(2)).sum()
    assert f"{contradicted} of 200 labels of npz:train.npz are suspects: the model finds another label more" in words
    assert facts("audit", "run.ifcomp", "--fraction", "0")["threshold"] is None
    assert ifcomp(*run.fit_arguments(), "--beta", "0.5").exit_code == 0
    assert "fitted at beta 0.5; audits work best at 1" in said("audit", "run.ifcomp")


def test_inputs_that_are_hardly_told_apart_come_with_advice(run: Workshop) -> None:
    words = said("ood", "run.ifcomp", "npz:valid.npz", "--reference", "npz:strange.npz")
    assert "If they should be told apart better, fit again with another --beta, such as 0.1" in words
    assert "--beta" not in said("ood", "run.ifcomp", "npz:strange.npz", "--reference", "npz:valid.npz")


def test_the_gate_of_the_audit(run: Workshop) -> None:
    assert facts("audit", "run.ifcomp", "--fraction", "0.05", "--max-suspects", "9", code=3)["suspects"] == 10
    assert facts("audit", "run.ifcomp", "--fraction", "0.05", "--max-suspects", "10")["suspects"] == 10


def test_strange_inputs_are_flagged(run: Workshop) -> None:
    content = facts("ood", "run.ifcomp", "npz:strange.npz", "--reference", "npz:valid.npz", "--tpr", "0.9")
    ifc = predictor(run)
    usual = ifc.bounded_complexity(run.arrays("valid")[0], damping=OOD_DAMPING)
    given = ifc.bounded_complexity(run.arrays("strange")[0], damping=OOD_DAMPING)
    assert content["threshold"] == pytest.approx(float(usual.sort().values[89]), rel=1e-3)
    found = pd.read_csv("ood.csv")
    assert found["index"].tolist() == given.argsort(descending=True).tolist()
    assert content["flagged"] == int((given > content["threshold"]).sum()) == found["is_ood"].sum()
    assert content["flagged"] > 50
    truth = torch.arange(200) >= 100
    assert content["separation"]["auroc"] == pytest.approx(auroc(torch.cat([usual, given]), truth), abs=1e-3)
    assert facts("ood", "run.ifcomp", "npz:strange.npz", "--max-flagged", "5", code=3)["max_flagged"] == 5


def test_strange_inputs_by_other_scores(run: Workshop) -> None:
    given = ("ood", "run.ifcomp", "npz:strange.npz", "--reference", "npz:valid.npz")
    assert facts(*given)["score"] == "bounded_complexity"
    assert "are flagged: bounded complexity above" in said(*given)
    content = facts(*given, "--capped", "0.3")
    expected = predictor(run).parametric_complexity(
        run.arrays("strange")[0], alpha=0.3, capped=True, damping=OOD_DAMPING
    )
    found = pd.read_csv("ood.csv").sort_values("index")
    np.testing.assert_allclose(found["parametric_complexity"], expected, rtol=1e-3)
    assert content["score"] == "parametric_complexity"
    assert content["flagged"] == int((found["parametric_complexity"] > content["threshold"]).sum())
    assert facts(*given, "--probes", "2")["score"] == "parametric_complexity"
    failed = ifcomp(*given, "--capped", "0.3", "--probes", "2")
    assert failed.exit_code == 2
    assert "needs every label" in failed.stderr


def test_words_about_strange_inputs(run: Workshop) -> None:
    words = said("ood", "run.ifcomp", "npz:strange.npz", "--probes", "2")
    assert "of 100 inputs of npz:strange.npz are flagged" in words
    assert "better take held-out data as --reference" in words
    assert "held-out" not in said("ood", "run.ifcomp", "npz:strange.npz", "--reference", "npz:valid.npz")
    assert "confidence" not in said("ood", "run.ifcomp", "npz:strange.npz", "--top", "0")


def test_what_to_keep(run: Workshop) -> None:
    content = facts("prune", "run.ifcomp", "--drop", "0.25,0.5")
    found = pd.read_csv("keep.csv")
    assert content["lists"] == [{"drop": 0.25, "kept": 150, "dropped": 50}, {"drop": 0.5, "kept": 100, "dropped": 100}]
    order = found["stochastic_complexity"].to_numpy().argsort()
    assert sorted(order[50:]) == found["index"][found["keep_0.25"]].tolist()
    assert sorted(order[100:]) == found["index"][found["keep_0.5"]].tolist()
    facts("prune", "run.ifcomp", "--drop", "0.5", "--balanced", "--out", "b.parquet")
    balanced = pd.read_parquet("b.parquet")
    kept, all_of_them = balanced[balanced["keep_0.5"]].groupby("label").size(), balanced.groupby("label").size()
    assert (kept == all_of_them - all_of_them // 2).all()
    assert "share to drop" in said("prune", "run.ifcomp")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["score", "run.ifcomp", "--out", "scores.txt"], "must end in .csv or .parquet"),
        (["score", "run.ifcomp", "--out", "gone/scores.csv"], "there is no folder 'gone'"),
        (["score", "run.ifcomp", "--alpha", "-1"], "--alpha"),
        (["score", "run.ifcomp", "--alpha", "inf"], "alpha must be a finite number"),
        (["score", "run.ifcomp", "--probes", "0"], "--probes"),
        (["score", "run.ifcomp", "npz:strange.npz"], "label 99"),
        (["audit", "run.ifcomp", "--fraction", "0.1", "--noise-rate", "0.1"], "not both"),
        (["audit", "run.ifcomp", "--fraction", "1.5"], "--fraction"),
        (["audit", "run.ifcomp", "npz:bare.npz"], "'npz:bare.npz' has no labels"),
        (["audit", "run.ifcomp", "--damping", "relative:x"], "--damping"),
        (["ood", "run.ifcomp"], "DATA"),
        (["ood", "run.ifcomp", "npz:strange.npz", "--tpr", "0"], "tpr must be in (0, 1]"),
        (["ood", "run.ifcomp", "npz:gone.npz"], "no file 'gone.npz'"),
        (["ood", "run.ifcomp", "npz:strange.npz", "--reference", "npz:gone.npz"], "no file 'gone.npz'"),
        (["ood", "run.ifcomp", "npz:flat.npz"], "fails on the first examples of 'npz:flat.npz'"),
        (["ood", "run.ifcomp", "npz:strange.npz", "--reference", "npz:flat.npz"], "fails on the first examples"),
        (["prune", "run.ifcomp", "--drop", "1"], "below 1, but got '1'"),
        (["prune", "run.ifcomp", "--drop", "x"], "--drop takes numbers"),
        (["prune", "run.ifcomp", "npz:bare.npz"], "has no labels"),
    ],
)
def test_bad_input_ends_with_2_and_writes_nothing(run: Workshop, arguments: list[str], words: str) -> None:
    np.savez("bare.npz", x=run.arrays("valid")[0].numpy())
    np.savez("flat.npz", x=np.ones((5, 3)))
    before = {path.name for path in Path().iterdir()}
    found = ifcomp(*arguments)
    assert found.exit_code == 2, found.output
    assert words in " ".join(found.stderr.replace("│", " ").split())
    assert found.stdout == ""
    assert {path.name for path in Path().iterdir()} == before


def save_images(folder: str, x: torch.Tensor, labels: list[str]) -> None:
    for number, (image, label) in enumerate(zip(x, labels, strict=True)):
        Path(folder, label).mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * image[0].numpy()).astype(np.uint8)).save(Path(folder, label, f"{number:03}.png"))


def test_folders_keep_names_of_files_and_numbers_of_classes(workshop: Workshop) -> None:
    x, y = workshop.arrays("train")
    save_images("images", x, [f"digit {label}" for label in y.tolist()])
    given = ["--weights", "net.safetensors", "--grey"]
    assert ifcomp("fit", workshop.model, "folder:images", *given).exit_code == 0
    found = facts("audit", "run.ifcomp", "--top", "1")
    table = pd.read_csv("audit.csv")
    assert found["top"][0]["name"] == table["name"][0]
    assert table["name"][0].startswith(f"digit {table['label'][0]}/")
    save_images("some", x[y >= 5], [f"digit {label}" for label in y[y >= 5].tolist()])
    facts("score", "run.ifcomp", "folder:some", "--out", "some.parquet")
    scored = pd.read_parquet("some.parquet")
    assert [f"digit {label}" for label in scored["label"]] == [name.split("/")[0] for name in scored["name"]]
    save_images("strange", 1 - x[:20], ["weird things"] * 20)
    content = facts("ood", "run.ifcomp", "folder:strange", "--reference", "npz:valid.npz")
    assert content["top"][0]["name"].startswith("weird things/")


def test_brackets_in_names_are_no_markup(workshop: Workshop) -> None:
    x, y = workshop.arrays("train")
    np.savez("train.npz", x=x.numpy(), y=y.numpy(), classes=np.array([f"[red]{label}[/red]" for label in range(10)]))
    assert ifcomp(*workshop.fit_arguments()).exit_code == 0
    assert "[red]" in said("audit", "run.ifcomp", "--top", "1")
