"""Outputs never replace inputs, and pipes, links and loops in the way are refused at once."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from project import Project, check_refused, ifcomp

from ifcomp.errors import StorageError
from ifcomp.io.files import atomic_write, file_lock

LOST = "is an input of the command"


def refused_unchanged(path: str, *arguments: str) -> None:
    before = Path(path).read_bytes()
    check_refused(*arguments, message=LOST)
    assert Path(path).read_bytes() == before


def write_table(project: Project, path: str) -> None:
    x, y = project.arrays("train")
    pd.DataFrame(x.flatten(1).numpy()).add_prefix("p").assign(label=y.numpy()).to_csv(path, index=False)


def test_a_fit_does_not_replace_its_inputs(project: Project) -> None:
    for path in ("net.safetensors", "train.npz", f"{project.module}.py"):
        before = Path(path).read_bytes()
        check_refused(*project.fit_arguments(), "--out", path, message="must end in .ifcomp")
        assert Path(path).read_bytes() == before
    os.link("train.npz", "link.ifcomp")
    os.link("net.safetensors", "net.ifcomp")
    for path in ("link.ifcomp", "net.ifcomp"):
        refused_unchanged(path, *project.fit_arguments(), "--out", path)


def test_figures_do_not_replace_images(run: Project) -> None:
    Path("images").mkdir()
    Path("images/1.png").write_bytes(b"image")
    for path in ("images/1.png", "link.png"):
        Path("link.png").symlink_to("images/1.png") if path == "link.png" else None
        refused_unchanged(path, "calibrate", "run.ifcomp", "folder:images", "--figure", path)
    os.link("valid.npz", "data.svg")
    refused_unchanged("data.svg", "calibrate", "run.ifcomp", "npz:data.svg", "--figure", "data.svg")


def test_tables_do_not_replace_inputs(run: Project) -> None:
    """Also the default table, where it is the data; and files that only the record names."""
    model = ["--model", run.model, "--weights", "net.safetensors"]
    for command, table in (("score", "scores.csv"), ("prune", "keep.csv"), ("audit", "audit.csv")):
        write_table(run, table)
        refused_unchanged(table, command, "run.ifcomp", f"csv:{table}", *model)
    write_table(run, "audit.csv")
    refused_unchanged("audit.csv", "audit", *model, "--data", "audit.csv")
    refused_unchanged("audit.csv", "audit", *model, "--data", "train.npz", "--reference", "audit.csv")
    for command, table in (("predict", "predictions.csv"), ("ood", "ood.csv")):
        write_table(run, table)
        refused_unchanged(table, command, "run.ifcomp", table)
    refused_unchanged("ood.csv", "ood", "run.ifcomp", "valid.npz", "--held-out", "ood.csv")
    os.link("train.npz", "data.csv")
    os.link("net.safetensors", "net.csv")
    os.link("run.ifcomp", "run.csv")
    for table in ("data.csv", "net.csv", "run.csv"):
        refused_unchanged(table, "score", "run.ifcomp", "--out", table)
    os.link("net.safetensors", "net.html")
    for command in ("audit", "report"):
        option = "--out" if command == "report" else "--report"
        refused_unchanged("net.html", command, "run.ifcomp", option, "net.html")


def make_dangling(path: Path) -> None:
    path.symlink_to("elsewhere")


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [os.mkfifo, make_dangling, make_loop, os.mkdir])
def test_lock_files_of_another_kind_are_refused_at_once(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / ".run.lock")
    code = "import sys; from ifcomp.io.files import file_lock\nwith file_lock(sys.argv[1]): pass"
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=False, timeout=60
    )
    assert "StorageError: Cannot write" in result.stderr
    assert not (tmp_path / "elsewhere").exists()


def test_pipes_in_the_place_of_folders_of_a_checkpoint_are_left_alone(tmp_path: Path) -> None:
    """shutil.rmtree waits for ever at a pipe without a writer."""
    names = ("scores.csv.partial.files", ".scores.csv.partial.0123abcd", ".scores.csv.0123abcd")
    for name in names:
        os.mkfifo(tmp_path / name)
    code = (
        "from ifcomp import Checkpoint; from ifcomp.io.files import remove_scratch_files\n"
        "with Checkpoint('scores.csv.partial'): remove_scratch_files('scores.csv')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_a_lock_file_that_is_a_pipe_with_a_reader_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".run.lock")
    reader = os.open(tmp_path / ".run.lock", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(StorageError, match=r"is not a file\. Remove it"), file_lock(tmp_path / "run"):
        pass
    os.close(reader)


@pytest.mark.parametrize("make", [os.mkfifo, make_loop])
def test_pipes_and_loops_are_not_replaced(make: Callable[[Path], None], run: Project, tmp_path: Path) -> None:
    make(Path("out.csv"))
    result = ifcomp("score", "run.ifcomp", "--out", "out.csv")
    assert result.exit_code == 2
    assert "Cannot write 'out.csv'" in result.stderr
    with pytest.raises(StorageError, match="Cannot write"), atomic_write("out.csv"):
        pass
    assert os.path.lexists("out.csv")
    assert not Path("out.csv").is_file()
