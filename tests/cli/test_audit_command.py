"""`ifcomp audit` writes the audit of the library."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from project import Project, check_refused, ifcomp, run_json, run_text

from ifcomp import IFComp
from ifcomp.tasks.metrics import auroc
from ifcomp.tasks.mislabel import AUDIT_DAMPING


def test_table_and_json(run: Project) -> None:
    content = run_json("audit", "run.ifcomp", "--fraction", "0.05", "--top", "3")
    scores = IFComp.load("run.ifcomp", run.network()).score([run.arrays("train")], damping=AUDIT_DAMPING).frame
    order = scores["label_complexity"].to_numpy().argsort()[::-1]
    audit = pd.read_csv("audit.csv")
    assert audit["index"].tolist() == order.tolist()
    assert (content["suspects"], content["examples"], audit["is_suspect"].sum()) == (10, 200, 10)
    assert [row["index"] for row in content["top"]] == order[:3].tolist()
    assert content["threshold"] == pytest.approx(audit["label_complexity"][9])
    flipped = np.arange(200) % 20 == 0
    assert auroc(audit["label_complexity"], flipped[audit["index"]]) > 0.9


def test_known_noise_rate(run: Project) -> None:
    text = run_text("audit", "run.ifcomp", "--noise-rate", "0.05", "--top", "2")
    assert "10 of 200 labels of npz:train.npz are suspects: label complexity of at least" in text
    assert "estimated" not in text
    assert "digit" in text
    assert "Wrote audit.csv all 200 labels" in text


def test_no_suspects(run: Project) -> None:
    text = run_text("audit", "run.ifcomp", "--fraction", "0")
    assert "0 of 200 labels of npz:train.npz are suspects. An estimated" in text
    assert "still worth checking" in text
    assert run_json("audit", "run.ifcomp", "--fraction", "0")["threshold"] is None


def test_default_suspects_are_labels_that_the_model_contradicts(run: Project) -> None:
    text = run_text("audit", "run.ifcomp")
    contradicted = (pd.read_csv("audit.csv")["label_complexity"] > np.log(2)).sum()
    assert f"{contradicted} of 200 labels of npz:train.npz are suspects: the model finds another label more" in text


def test_another_beta_is_mentioned(project: Project) -> None:
    assert ifcomp(*project.fit_arguments(), "--beta", "0.5").exit_code == 0
    assert "fitted at beta 0.5; audits work best at 1" in run_text("audit", "run.ifcomp")


def test_gate(run: Project) -> None:
    arguments = ("audit", "run.ifcomp", "--fraction", "0.05", "--max-suspects")
    assert run_json(*arguments, "9", code=3)["suspects"] == 10
    assert run_json(*arguments, "10")["suspects"] == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fraction", "0.1", "--noise-rate", "0.1"], "not both"),
        (["--fraction", "1.5"], "--fraction"),
        (["npz:unlabelled.npz"], "'npz:unlabelled.npz' has no labels"),
        (["--damping", "relative:x"], "--damping"),
        (["--report", "gone/a.html"], "there is no folder 'gone'"),
    ],
)
def test_invalid_arguments(run: Project, arguments: list[str], message: str) -> None:
    check_refused("audit", "run.ifcomp", *arguments, message=message)


def save_images(folder: str, x: torch.Tensor, labels: list[str]) -> None:
    for number, (image, label) in enumerate(zip(x, labels, strict=True)):
        Path(folder, label).mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * image[0].numpy()).astype(np.uint8)).save(Path(folder, label, f"{number:03}.png"))


def test_folders_keep_file_names_and_class_numbers(project: Project) -> None:
    x, y = project.arrays("train")
    save_images("images", x, [f"digit {label}" for label in y.tolist()])
    assert ifcomp("fit", project.model, "folder:images", "--weights", "net.safetensors", "--grey").exit_code == 0
    content = run_json("audit", "run.ifcomp", "--top", "1")
    audit = pd.read_csv("audit.csv")
    assert content["top"][0]["name"] == audit["name"][0]
    assert audit["name"][0].startswith(f"digit {audit['label'][0]}/")
    save_images("half", x[y >= 5], [f"digit {label}" for label in y[y >= 5].tolist()])
    run_json("score", "run.ifcomp", "folder:half", "--out", "half.parquet")
    scores = pd.read_parquet("half.parquet")
    assert [f"digit {label}" for label in scores["label"]] == [name.split("/")[0] for name in scores["name"]]
    save_images("inverted", 1 - x[:20], ["another class"] * 20)
    content = run_json("ood", "run.ifcomp", "folder:inverted", "--reference", "npz:valid.npz")
    assert content["top"][0]["name"].startswith("another class/")


def test_brackets_in_class_names_are_not_markup(project: Project) -> None:
    x, y = project.arrays("train")
    np.savez("train.npz", x=x.numpy(), y=y.numpy(), classes=np.array([f"[red]{label}[/red]" for label in range(10)]))
    assert ifcomp(*project.fit_arguments()).exit_code == 0
    assert "[red]" in run_text("audit", "run.ifcomp", "--top", "1")
