"""`ifcomp audit` writes the audit of the library, with a run and without."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from project import Project, check_refused, ifcomp, run_json, run_text

from ifcomp import IFComp
from ifcomp.tasks.audit import AUDIT_DAMPING, LabelAudit

COLUMNS = ["index", "label", "label_name", "suggested", "suggested_name", "score", "p_label", "p_suggested"]


def without_a_run(project: Project, data: str = "npz:train.npz") -> tuple[str, ...]:
    return ("audit", "--model", project.model, "--weights", "net.safetensors", "--data", data)


def expected_audit(project: Project) -> LabelAudit:
    return IFComp(project.network()).audit([project.arrays("train")])


def test_no_run_is_needed(project: Project) -> None:
    content = run_json(*without_a_run(project), "--top", "3")
    expected, table = expected_audit(project), pd.read_csv("audit.csv")
    assert list(table.columns) == [*COLUMNS, "is_suspect"]
    assert table["index"].tolist() == list(range(200))  # the order of the data
    np.testing.assert_allclose(table["score"], expected.frame["score"], rtol=1e-4)
    assert table["label_name"].tolist() == [f"digit {label}" for label in table["label"]]
    assert table["suggested_name"].tolist() == [f"digit {label}" for label in table["suggested"]]
    assert (content["run"], content["examples"], content["written"]) == (None, 200, ["audit.csv"])
    assert content["suspects"] == table["is_suspect"].sum() == len(expected.suspects)
    assert [row["index"] for row in content["top"]] == expected.ranked["index"].head(3).tolist()
    assert not Path("run.ifcomp").exists()


def test_planted_errors_are_found(project: Project) -> None:
    """Every twentieth label is wrong; the next digit is its label."""
    top = run_json(*without_a_run(project), "--top", "12")["top"]
    assert {row["index"] for row in top} >= set(range(0, 200, 20))
    planted = [row for row in top if row["index"] % 20 == 0]
    assert all((row["suggested"] + 1) % 10 == row["label"] for row in planted)
    table = pd.read_csv("audit.csv")
    assert (table["index"][table["is_suspect"]] % 20 == 0).mean() > 0.8


def test_a_run_adds_label_complexity(run: Project) -> None:
    content = run_json("audit", "run.ifcomp")
    table = pd.read_csv("audit.csv")
    assert list(table.columns) == [*COLUMNS, "is_suspect", "label_complexity"]
    scores = IFComp.load("run.ifcomp", run.network()).score([run.arrays("train")], damping=AUDIT_DAMPING, probes=2)
    np.testing.assert_allclose(table["label_complexity"], scores.column("label_complexity"), rtol=1e-3)
    assert (content["run"], content["data"]) == ("run.ifcomp", "npz:train.npz")
    np.testing.assert_allclose(table["score"], expected_audit(run).frame["score"], rtol=1e-4)


def test_the_headline_is_the_first_line(run: Project) -> None:
    result = ifcomp("audit", "run.ifcomp", "--top", "2")
    assert result.exit_code == 0, result.output
    headline = expected_audit(run).headline
    assert result.stdout.startswith(headline[:70])
    text = " ".join(result.stdout.split())
    assert text.startswith(headline)
    assert "None of" not in text
    assert "Wrote audit.csv all 200 labels in the order of the data" in text
    assert run_json("audit", "run.ifcomp")["headline"] == headline


def test_no_suspects(project: Project) -> None:
    x, y = project.arrays("valid")
    np.savez("few.npz", x=np.repeat(x[:20].numpy(), 2, 0), y=np.repeat(y[:20].numpy(), 2))
    text = run_text(*without_a_run(project, "npz:few.npz"))
    assert "0 of 40 labels are suspects" in text
    assert "None of" not in text


def test_table_shows_the_neighbours(run: Project) -> None:
    content = run_json("audit", "run.ifcomp", "--top", "1")
    first, labels = content["top"][0], run.arrays("train")[1]
    layers = first["neighbours"]
    assert [layer["weight"] for layer in layers] == sorted((layer["weight"] for layer in layers), reverse=True)
    for layer in layers:
        assert layer["neighbour_labels"] == labels[layer["neighbours"]].tolist()
    near = [label for layer in layers for label in layer["neighbour_labels"]]
    disagreeing = sum(label != first["label"] for label in near)
    assert disagreeing > len(near) / 2
    text = run_text("audit", "run.ifcomp", "--top", "1")
    row = f"{first['p_label']:.3f} {first['p_suggested']:.3f} {first['score']:.2f} {disagreeing} of {len(near)}"
    assert f"{first['index']} digit {first['label']} digit {first['suggested']} {row}" in text
    assert "every layer that carries the audit" in text


def test_reference(run: Project) -> None:
    content = run_json("audit", "run.ifcomp", "--reference", "npz:valid.npz", "--top", "1")
    assert content["settings"]["has_reference"]
    expected = IFComp(run.network()).audit([run.arrays("train")], reference=[run.arrays("valid")])
    np.testing.assert_allclose(pd.read_csv("audit.csv")["score"], expected.frame["score"], rtol=1e-4)
    labels = run.arrays("valid")[1]
    layer = content["top"][0]["neighbours"][0]
    assert layer["neighbour_labels"] == labels[layer["neighbours"]].tolist()


@pytest.mark.filterwarnings("ignore:Only")
def test_wrong_order_of_classes_is_questioned(project: Project) -> None:
    """Every label is the next digit, but the reference has the true ones."""
    x, y = project.arrays("train")
    np.savez("shifted.npz", x=x.numpy(), y=(y.numpy() + 1) % 10)
    arguments = [*without_a_run(project, "npz:shifted.npz"), "--reference", "npz:valid.npz"]
    content = run_json(*arguments, "--max-suspects", "1", code=3)
    assert content["headline"].startswith("The layers contradict")
    assert "check the preprocessing, the weights of the model and the order of the classes" in content["headline"]
    reason = f"model and data probably do not match, see above; {content['suspects']} suspects, but --max-suspects"
    assert content["exit_reason"] == f"Exit code 3: {reason} allows 1."
    result = ifcomp(*arguments)
    assert result.exit_code == 3
    assert "Exit code 3: model and data probably do not match, see above." in result.stdout
    assert Path("audit.csv").exists()


def test_gate(run: Project) -> None:
    suspects = run_json("audit", "run.ifcomp")["suspects"]
    assert suspects > 2
    content = run_json("audit", "run.ifcomp", "--max-suspects", str(suspects - 1), code=3)
    reason = f"Exit code 3: {suspects} suspects, but --max-suspects allows {suspects - 1}."
    assert content["exit_reason"] == reason
    result = ifcomp("audit", "run.ifcomp", "--max-suspects", str(suspects - 1))
    assert result.exit_code == 3
    assert reason in " ".join(result.stdout.split())
    content = run_json("audit", "run.ifcomp", "--max-suspects", str(suspects))
    assert content["exit_reason"] is None


def test_parquet(run: Project) -> None:
    run_json("audit", "run.ifcomp", "--out", "audit.parquet")
    schema = pq.read_schema("audit.parquet")
    assert schema.names == [*COLUMNS, "is_suspect", "label_complexity"]
    assert b"larger = more suspicious" in schema.field("score").metadata[b"description"]
    assert json.loads(schema.metadata[b"ifcomp"])["has_reference"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["npz:unlabelled.npz"], "'npz:unlabelled.npz' has no labels"),
        (["--reference", "npz:unlabelled.npz"], "'npz:unlabelled.npz' has no labels"),
        (["npz:train.npz", "--data", "npz:train.npz"], "Give the data once"),
        (["--report", "gone/a.html"], "there is no folder 'gone'"),
        (["--out", "audit.txt"], "must end in .csv or .parquet"),
        (["--fraction", "0.1"], "No such option: --fraction"),
        (["--damping", "1"], "No such option: --damping"),
    ],
)
def test_invalid_arguments(run: Project, arguments: list[str], message: str) -> None:
    check_refused("audit", "run.ifcomp", *arguments, message=message)


@pytest.mark.parametrize("arguments", [[], ["--model", "net:build"], ["--data", "npz:train.npz"]], ids=str)
def test_a_run_or_a_model_and_data_are_needed(project: Project, arguments: list[str]) -> None:
    check_refused("audit", *arguments, message="Give a run, or a model and data: --model package.module:factory")


def test_help_shows_both_forms() -> None:
    text = " ".join(ifcomp("audit", "-h").stdout.replace("│", " ").split())
    assert "ifcomp audit run.ifcomp --top 20" in text
    assert "--model net:build --weights net.safetensors --data npz:train.npz" in text


def test_texts_are_names(project: Project) -> None:
    Path("named_texts.py").write_text(
        "import torch\n\n"
        "class Data(torch.utils.data.Dataset):\n"
        f"    texts = ['=text ' + str(number) + 50 * 'x' for number in range(200)]\n"
        "    def __init__(self):\n"
        f"        import {project.module} as module\n"
        "        self.x, self.y = (torch.cat(part) for part in zip(*module.batches()))\n"
        "    def __len__(self):\n"
        "        return 200\n"
        "    def __getitem__(self, index):\n"
        "        return self.x[index], self.y[index]\n"
    )
    content = run_json(*without_a_run(project, "named_texts:Data"), "--top", "1")
    table = pd.read_csv("audit.csv")
    assert table["name"][7] == "'=text 7" + 50 * "x"
    assert content["top"][0]["name"] == f"=text {content['top'][0]['index']}" + 50 * "x"
    assert "label_name" not in table.columns
    assert 40 * "x" not in run_text(*without_a_run(project, "named_texts:Data"), "--top", "1")


def save_images(folder: str, x: torch.Tensor, labels: list[str]) -> None:
    for number, (image, label) in enumerate(zip(x, labels, strict=True)):
        Path(folder, label).mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 * image[0].numpy()).astype(np.uint8)).save(Path(folder, label, f"{number:03}.png"))


@pytest.mark.filterwarnings("ignore:100 held-out examples are few")
def test_folders_keep_file_names_and_class_numbers(project: Project) -> None:
    x, y = project.arrays("train")
    save_images("images", x, [f"digit {label}" for label in y.tolist()])
    assert ifcomp("fit", project.model, "folder:images", "--weights", "net.safetensors", "--grey").exit_code == 0
    content = run_json("audit", "run.ifcomp", "--top", "1")
    audit, top = pd.read_csv("audit.csv"), content["top"][0]
    assert top["name"] == audit["name"][top["index"]]
    assert all(audit["name"].str.split("/").str[0] == audit["label_name"])
    save_images("half", x[y >= 5], [f"digit {label}" for label in y[y >= 5].tolist()])
    run_json("score", "run.ifcomp", "folder:half", "--out", "half.parquet")
    scores = pd.read_parquet("half.parquet")
    assert [f"digit {label}" for label in scores["label"]] == [name.split("/")[0] for name in scores["name"]]
    save_images("inverted", 1 - x[:20], ["another class"] * 20)
    content = run_json("ood", "run.ifcomp", "folder:inverted", "--held-out", "npz:valid.npz")
    assert content["top"][0]["name"].startswith("another class/")


def test_brackets_in_class_names_are_not_markup(project: Project) -> None:
    x, y = project.arrays("train")
    np.savez("train.npz", x=x.numpy(), y=y.numpy(), classes=np.array([f"[red]{label}[/red]" for label in range(10)]))
    assert "[red]" in run_text(*without_a_run(project), "--top", "1")
