"""Corrections of image folders: lists of moves, and the moves."""

import os
from pathlib import Path

import pandas as pd
import pytest

from ifcomp.data.corrections import Corrections, LabelledFile, Move, carry_out, open_labels
from ifcomp.data.corrections.moves import check_plain_name
from ifcomp.errors import DataError, StorageError

FILES = ("cat/1.png", "cat/2.png", "cat/deep/3.png", "dog/1.png", "dog/4.png")


def create(*files: str) -> None:
    """Create files that contain their path."""
    for name in files:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)


def contents(*folders: str) -> dict[str, str]:
    """Return the text of every file by path."""
    return {str(path): path.read_text() for folder in folders for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def data() -> LabelledFile:
    create(*(f"f/{name}" for name in FILES))
    return open_labels("folder:f")


def test_list_of_moves(data: LabelledFile) -> None:
    assert (data.names, data.class_names) == (FILES, ("cat", "dog"))
    before = contents("f")
    moves = data.write(Corrections({0: 1, 2: 1, 4: 0}, frozenset({1, 3})), "moves.csv")
    expected = {
        "f/cat/1.png": "f/dog/1_from_cat.png",  # the folder has a file with this name
        "f/cat/2.png": "f_dropped/cat/2.png",
        "f/cat/deep/3.png": "f/dog/deep/3.png",
        "f/dog/1.png": "f_dropped/dog/1.png",
        "f/dog/4.png": "f/cat/4.png",
    }
    table = pd.read_csv("moves.csv")
    assert dict(zip(table["from"], table["to"], strict=True)) == expected
    assert contents("f") == before
    assert not Path("f_dropped").exists()
    carry_out(moves)
    assert contents("f", "f_dropped") == {target: source for source, target in expected.items()}
    assert open_labels("folder:f").class_names == ("cat", "dog")


def test_names_that_are_taken_twice(data: LabelledFile) -> None:
    create("f/eel/1.png", "f/cat/1_from_dog.png", "f/cat/1_from_eel_2.txt", "f_dropped/cat/1.png")
    data = open_labels("folder:f")
    assert data.names is not None
    index = {name: position for position, name in enumerate(data.names)}
    before = contents("f", "f_dropped")
    labels = {index["dog/1.png"]: 0, index["eel/1.png"]: 0}
    moves = data.write(Corrections(labels, frozenset({index["cat/1.png"]})), "moves.csv")
    carry_out(moves)
    targets = {str(move.source): str(move.target) for move in moves}
    assert targets == {
        "f/cat/1.png": "f_dropped/cat/1_from_cat.png",
        "f/dog/1.png": "f/cat/1_from_dog_2.png",
        "f/eel/1.png": "f/cat/1_from_eel.png",
    }
    assert contents("f", "f_dropped") == {targets.get(path, path): text for path, text in before.items()}


def test_two_images_swap_their_classes(data: LabelledFile) -> None:
    carry_out(data.write(Corrections({0: 1, 3: 0}, frozenset()), "moves.csv"))
    after = contents("f")
    assert after["f/dog/1_from_cat.png"] == "f/cat/1.png"
    assert after["f/cat/1_from_dog.png"] == "f/dog/1.png"
    assert len(after) == len(FILES)


@pytest.mark.parametrize("spec", ["folder:.", "folder:../f", "folder:f/", "folder:link"])
def test_forms_of_the_folder(spec: str, data: LabelledFile, monkeypatch: pytest.MonkeyPatch) -> None:
    os.symlink("f", "link")
    top = Path.cwd()
    if "." in spec:
        monkeypatch.chdir("f")
    carry_out(open_labels(spec).write(Corrections({0: 1}, frozenset({1})), "../moves.csv" if "." in spec else "m.csv"))
    monkeypatch.chdir(top)
    after = contents("f", "link_dropped" if "link" in spec else "f_dropped")
    assert after["f/dog/1_from_cat.png"] == "f/cat/1.png"
    assert sorted(after.values()) == sorted(f"f/{name}" for name in FILES)


def test_images_without_classes_can_be_dropped() -> None:
    create("f/1.png", "f/2.png")
    carry_out(open_labels("folder:f").write(Corrections({}, frozenset({0})), "moves.csv"))
    assert contents("f", "f_dropped") == {"f/2.png": "f/2.png", "f_dropped/1.png": "f/1.png"}


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "",
        "../evil",
        "a/b",
        "/tmp",
        "a\\b",
        "..\\evil",
        ".hidden",
        "a\0b",
        "a\nb",
        "C:evil",
        "x" * 300,
        "\u202e",
    ],
)
def test_names_of_classes_are_no_paths(name: str, data: LabelledFile) -> None:
    with pytest.raises(DataError, match="cannot be that of a folder"):
        check_plain_name(name)
    before = contents(".")
    if name:
        hostile = open_labels("folder:f", class_names=["cat", "dog", name])
        with pytest.raises(DataError, match="cannot be that of a folder"):
            hostile.write(Corrections({0: 2}, frozenset()), "moves.csv")
    assert contents(".") == before


def test_new_classes_get_a_folder(data: LabelledFile) -> None:
    opened = open_labels("folder:f", class_names=["ant", "cat", "dog"])
    carry_out(opened.write(Corrections({0: 0}, frozenset()), "moves.csv"))
    assert Path("f/ant/1.png").read_text() == "f/cat/1.png"


def test_links_are_refused(data: LabelledFile) -> None:
    create("other/1.txt")
    os.symlink("1.png", "f/cat/0.png")
    linked = open_labels("folder:f")
    with pytest.raises(DataError, match="is a link, which may not work in another folder"):
        linked.write(Corrections({0: 1}, frozenset()), "moves.csv")
    os.symlink("other", "f_dropped")
    with pytest.raises(DataError, match="'f_dropped', the folder of dropped images, is a link"):
        linked.write(Corrections({}, frozenset({1})), "moves.csv")
    Path("f_dropped").unlink()
    Path("f_dropped").mkdir()
    os.symlink(Path("other").resolve(), "f_dropped/cat")
    with pytest.raises(DataError, match=r"A link leads 'f_dropped/cat/1.png' out of 'f_dropped'"):
        linked.write(Corrections({}, frozenset({1})), "moves.csv")
    assert not Path("moves.csv").exists()


def test_failed_moves_are_undone(data: LabelledFile) -> None:
    moves = [*data.write(Corrections({0: 1, 4: 0}, frozenset({1})), "moves.csv")]
    before = contents("f")
    create("f/cat/4.png")  # another process was faster
    with pytest.raises(
        StorageError, match=r"Cannot move 'f/dog/4.png' to 'f/cat/4.png': .*All files are where they were"
    ):
        carry_out(moves)
    assert contents("f", "f_dropped") == {**before, "f/cat/4.png": "f/cat/4.png"}


def test_files_are_never_overwritten_without_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    create("a.png", "b.png")
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match=r"Cannot move 'a.png' to 'b.png'"):
        carry_out([Move(Path("a.png"), Path("b.png"))])
    assert contents(".") == {"a.png": "a.png", "b.png": "b.png"}
    carry_out([Move(Path("a.png"), Path("c/a.png"))])
    assert contents(".") == {"c/a.png": "a.png", "b.png": "b.png"}


def test_names_in_the_list_never_start_a_formula() -> None:
    create("=f/cat/1.png", "=f/dog/1.png")
    open_labels("folder:=f").write(Corrections({0: 1}, frozenset()), "moves.csv")
    assert Path("moves.csv").read_text().splitlines()[1] == "'=f/cat/1.png,'=f/dog/1_from_cat.png"
