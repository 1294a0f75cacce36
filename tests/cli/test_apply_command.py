"""`ifcomp apply` carries out decisions, and writes nothing if one of them is invalid."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from project import Project, check_refused, files, ifcomp, run_json, run_text

HEADER = "index,decision,label,given\n"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve examples with three classes in every format, and a file of decisions."""
    monkeypatch.chdir(tmp_path)
    names = [("cat", "dog", "eel")[label] for label in np.arange(12) % 3]
    np.savez("t.npz", x=np.ones((12, 2)), y=np.arange(12) % 3, classes=np.array(["cat", "dog", "eel"]))
    table = pd.DataFrame({"a": np.arange(12.0), "label": names, "note": "text"})
    table.to_csv("t.csv", index=False)
    table.to_parquet("t.parquet")
    for number, name in enumerate(names):
        Path("images", name).mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(f"images/{name}/{number:02}.png")
    Path("d.csv").write_text(f"{HEADER}0,relabel,dog,cat\n4,drop,,1\n5,keep,,eel\n7,relabel,dog,dog\n")


def labels(path: str) -> list[str]:
    if path.endswith(".npz"):
        with np.load(path) as arrays:
            return [str(arrays["classes"][label]) for label in arrays["y"]]
    table = pd.read_csv(path) if path.endswith(".csv") else pd.read_parquet(path)
    return table["label"].tolist()


EXPECTED = ["dog", "dog", "eel", "cat", "eel", "cat", "dog", "eel", "cat", "dog", "eel"]
KINDS = ("npz", "csv", "parquet")


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("kind", KINDS)
def test_corrected_data(kind: str) -> None:
    before = Path(f"t.{kind}").read_bytes()
    content = run_json("apply", "d.csv", "--data", f"{kind}:t.{kind}", "--out", f"o.{kind}")
    assert labels(f"o.{kind}") == EXPECTED
    assert Path(f"t.{kind}").read_bytes() == before
    counts = {name: content[name] for name in ("examples", "changed", "dropped", "kept", "unchanged", "remaining")}
    assert counts == {"examples": 12, "changed": 1, "dropped": 1, "kept": 1, "unchanged": 1, "remaining": 11}
    assert (content["written"], content["in_place"], content["moved"]) == ([f"o.{kind}"], False, 0)


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("kind", KINDS)
def test_in_place(kind: str) -> None:
    os.rename(f"t.{kind}", "real")
    os.chmod("real", 0o600)
    os.symlink("real", f"t.{kind}")
    content = run_json("apply", "d.csv", "--data", f"{kind}:t.{kind}", "--in-place")
    assert labels(f"t.{kind}") == EXPECTED
    assert Path(f"t.{kind}").is_symlink()
    assert Path("real").stat().st_mode & 0o777 == 0o600
    assert (content["in_place"], [os.path.basename(path) for path in content["written"]]) == (True, ["real"])
    check_refused("apply", "d.csv", "--data", f"{kind}:t.{kind}", "--in-place", message="or were applied already")


@pytest.mark.usefixtures("data")
def test_output() -> None:
    text = run_text("apply", "d.csv", "--data", "npz:t.npz", "--out", "o.npz")
    assert text.startswith(
        "1 label changed, 1 example dropped, 1 kept, 1 already with the new label. 11 of 12 examples"
    )
    assert "Wrote o.npz the corrected data, 11 examples" in text
    assert "Next ifcomp audit --model MODEL --data npz:o.npz" in text


@pytest.mark.usefixtures("data")
def test_another_label_column() -> None:
    pd.read_csv("t.csv").rename(columns={"label": "kind"}).to_csv("k.csv", index=False)
    arguments = ("apply", "d.csv", "--data", "csv:k.csv", "--out", "o.csv")
    check_refused(*arguments, message="has no labels, so examples can be kept and dropped only. Name their column with")
    text = run_text(*arguments, "--label-column", "kind")
    assert "Next ifcomp audit --model MODEL --data csv:o.csv --label-column kind audit it again" in text


@pytest.mark.usefixtures("data")
def test_folder() -> None:
    Path("d.csv").write_text("index,decision,label,name\n0,relabel,dog,cat/00.png\n4,drop,,dog/01.png\n8,keep,,\n")
    before = sorted(map(str, Path("images").rglob("*.png")))
    text = run_text("apply", "d.csv", "--data", "folder:images", "--out", "moves.csv")
    assert text.startswith(
        "1 label changed, 1 example dropped, 1 kept. 11 of 12 examples of folder:images are left. Noth"
    )
    assert "Next ifcomp apply d.csv --data folder:images --out moves.csv --move move the images" in text
    assert sorted(map(str, Path("images").rglob("*.png"))) == before
    content = run_json("apply", "d.csv", "--data", "folder:images", "--out", "moves.csv", "--move")
    assert (content["moved"], content["in_place"], content["written"]) == (2, True, ["moves.csv"])
    table = pd.read_csv("moves.csv")
    assert table["to"].tolist() == ["images/dog/00.png", "images_dropped/dog/01.png"]
    assert not any(Path(path).exists() for path in table["from"])
    assert all(Path(path).exists() for path in table["to"])
    check_refused(
        *("apply", "d.csv", "--data", "folder:images", "--out", "moves.csv", "--move"),
        message="example 0 was 'cat/00.png', but is 'cat/03.png' in 'images'. The decisions belong to other data",
    )


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "npz:t.npz"], "Name the file to write with --out FILE, or add --in-place"),
        (["--data", "folder:images"], "Name the file to write with --out FILE."),
        (["--data", "npz:t.npz", "--out", "t.npz"], "'t.npz' is the data itself"),
        (["--data", "npz:t.npz", "--out", "link.npz"], "'link.npz' is the data itself"),
        (["--data", "csv:t.csv", "--out", "./d.csv"], "'./d.csv' is the file of the decisions"),
        (["--data", "csv:d.csv", "--in-place"], "is the file of the decisions"),
        (["--data", "folder:images", "--out", "d.csv"], "is the file of the decisions"),
        (["--data", "npz:t.npz", "--out", "o.npz", "--in-place"], "not both"),
        (["--data", "npz:t.npz", "--out", "o.csv"], "must end in .npz"),
        (["--data", "folder:images", "--out", "moves.txt"], "must end in .csv"),
        (["--data", "folder:images", "--in-place"], "Move the images of a folder with --move"),
        (["--data", "npz:t.npz", "--out", "o.npz", "--move"], "--move applies to folder:DIR"),
        (["--data", "npz:t.npz", "--out", "gone/o.npz"], "there is no folder 'gone'"),
        (["--data", "npz:t.npz", "--out", "o.npz", "--label-column", "y"], "--label-column does not apply"),
        (["--data", "csv:t.csv", "--out", "o.csv", "--label-column", "kind"], "has no column 'kind'"),
        (["--data", "digits", "--out", "o.npz"], "can be corrected, but the data is 'digits'"),
        (["--out", "o.npz"], "Missing option '--data'"),
    ],
)
def test_invalid_arguments(arguments: list[str], message: str) -> None:
    os.symlink("t.npz", "link.npz")
    check_refused("apply", "d.csv", *arguments, message=message)


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("kind", [*KINDS, "folder"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,relabel,dog,\n12,drop,,\n", "Line 3 of 'd.csv': there is no index 12"),
        ("0,relabel,dog,\n1,relabel,3,\n", "Line 3 of 'd.csv': '3' is not one of the classes"),
        ("0,relabel,../dog,\n", "Line 2 of 'd.csv': '../dog' is not one of the classes"),
        ("0,relabel,dog,\n0,drop,,\n", "Lines 2 and 3 of 'd.csv' decide about the same index 0"),
        ("0,remove,,\n", "the decision must be keep, relabel or drop, but is 'remove'"),
        ("0,drop,,eel\n", "example 0 was 'eel', but is 'cat'"),
    ],
)
def test_nothing_is_written_if_a_decision_is_invalid(kind: str, rows: str, message: str) -> None:
    Path("d.csv").write_text(HEADER + rows)
    name, out = ("images", "o.csv") if kind == "folder" else (f"t.{kind}", f"o.{kind}")
    move = ["--move"] if kind == "folder" else []
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    check_refused("apply", "d.csv", "--data", f"{kind}:{name}", "--out", out, *move, message=message)
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("data")
def test_class_names() -> None:
    Path("n.csv").write_text("a,label\n1,2\n2,0\n3,2\n")
    Path("d.csv").write_text(f"{HEADER}0,relabel,dog,eel\n")
    arguments = ("apply", "d.csv", "--data", "csv:n.csv", "--out", "o.csv")
    check_refused(*arguments, message="'eel' is not one of the classes: 0 to 2")
    run_json(*arguments, "--class-names", "cat,dog,eel")
    assert pd.read_csv("o.csv")["label"].tolist() == [1, 0, 2]


@pytest.mark.usefixtures("data")
def test_labels_that_are_names_and_indices() -> None:
    for number, name in enumerate(("10", "2", "1", "10", "2", "1")):
        Path("numbered", name).mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(f"numbered/{name}/{number}.png")
    Path("d.csv").write_text("index,decision,label\n5,relabel,1\n")  # the classes are 1, 10, 2
    arguments = ("apply", "d.csv", "--data", "folder:numbered", "--out", "moves.csv")
    check_refused(
        *arguments, message="'1' is the name of class 0 and the index of class 1. Add --by-name or --by-index"
    )
    run_json(*arguments, "--by-name")
    assert pd.read_csv("moves.csv")["to"].tolist() == ["numbered/1/4.png"]
    run_json(*arguments, "--by-index")
    assert pd.read_csv("moves.csv")["to"].tolist() == ["numbered/10/4.png"]


@pytest.mark.usefixtures("data")
@pytest.mark.filterwarnings("always:No example")
def test_classes_without_examples_are_a_warning() -> None:
    Path("d.csv").write_text("".join([HEADER, *(f"{index},drop,,eel\n" for index in range(2, 12, 3))]))
    result = ifcomp("apply", "d.csv", "--data", "csv:t.csv", "--out", "o.csv")
    assert (result.exit_code, labels("o.csv")) == (0, ["cat", "dog"] * 4)
    assert "Warning: No example of class 'eel' is left." in " ".join(result.stderr.split())


def test_suggestions_of_an_audit_are_applied(project: Project) -> None:
    """The decisions are columns of the table that the audit writes; the corrected data has fewer suspects."""
    arguments = ("--model", project.model, "--weights", "net.safetensors", "--out", "audit.csv")
    before = run_json("audit", *arguments, "--data", "npz:train.npz")["suspects"]
    table = pd.read_csv("audit.csv")
    table = table[table["is_suspect"]]
    decisions = pd.DataFrame(
        {"index": table["index"], "decision": "relabel", "label": table["suggested_name"], "given": table["label_name"]}
    )
    decisions.to_csv("decisions.csv", index=False, sep=";", encoding="utf-8-sig")
    content = run_json("apply", "decisions.csv", "--data", "npz:train.npz", "--out", "clean.npz")
    assert content["changed"] == before > 5
    assert run_json("audit", *arguments, "--data", "npz:clean.npz")["suspects"] < before
    assert {"clean.npz", "train.npz"} <= files()
