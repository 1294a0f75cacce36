"""The record of a run is trusted in the folder and by the user that wrote it, and runs no code for anyone else."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from project import Project, ifcomp

from ifcomp.cli.record import Record, read_record, write_record
from ifcomp.errors import StorageError

RECORD = Record("net:build", "net.safetensors", "npz:train.npz", {"mean": [0.5]}, ["a", "b"], 10)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_write_and_read(here: Path, configuration: Path) -> None:
    assert write_record("run", RECORD) == "run.json"
    record = read_record("run")
    assert record is not None
    assert record.is_trusted
    assert {**vars(record), "signature": ""} == vars(RECORD)
    key = configuration / "ifcomp" / "run-key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert key.read_bytes().hex() not in Path("run.json").read_text()


@pytest.mark.parametrize(
    "change", [{"model": "evil:build"}, {"data": "evil:data"}, {"weights": None}, {"signature": ""}, {"signature": "é"}]
)
def test_changed_record_is_not_trusted(here: Path, change: dict[str, Any]) -> None:
    write_record("run", RECORD)
    content = json.loads(Path("run.json").read_text())
    Path("run.json").write_text(json.dumps({**content, **change}))
    record = read_record("run")
    assert record is not None
    assert not record.is_trusted


def test_record_of_another_folder_or_user_is_not_trusted(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record("run", RECORD)
    record = read_record("run")
    assert record is not None
    (here / "sub").mkdir()
    monkeypatch.chdir("sub")
    assert not record.is_trusted
    monkeypatch.chdir(here)
    assert record.is_trusted
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("another_user")))
    assert not record.is_trusted
    write_record("other", RECORD)
    assert not record.is_trusted


def test_records_without_a_key_are_not_trusted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "file"))
    write_record("run", RECORD)
    record = read_record("run")
    assert record is not None
    assert (record.signature, record.is_trusted) == ("", False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 2}',
        '{"schema": 1, "version": "0", "model": 5}',
        "\xff",
        '{"schema": 1, "version": 1}',
    ],
)
def test_damaged_records(here: Path, text: str) -> None:
    Path("run.json").write_text(text, encoding="latin-1")
    with pytest.raises(StorageError, match=r"Cannot read the record 'run.json'"):
        read_record("run")


def test_wrong_types_are_refused(here: Path) -> None:
    write_record("run", RECORD)
    content = json.loads(Path("run.json").read_text())
    for change in ({"model": 1}, {"options": []}, {"class_names": [1]}, {"examples": "many"}, {"more": 1}):
        Path("run.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(StorageError, match="Cannot read the record"):
            read_record("run")


# Commands ------------------------------------------------------------------------------------------------------------


def write_trap(name: str) -> None:
    """Write a module that creates the file 'imported' when it is imported."""
    Path(f"{name}.py").write_text(f"from pathlib import Path\nPath('imported').touch()\nfrom {name[5:]} import *\n")


def test_code_named_in_an_untrusted_record_is_not_imported(run: Project) -> None:
    write_trap(f"trap_{run.module}")
    content = json.loads(Path("run.ifcomp.json").read_text())
    Path("run.ifcomp.json").write_text(json.dumps({**content, "model": f"trap_{run.module}:build"}))
    result = ifcomp("audit", "run.ifcomp")
    assert result.exit_code == 2
    assert "was not written by you in this folder" in result.stderr
    assert f"--model trap_{run.module}:build --weights net.safetensors" in result.stderr
    arguments = ["npz:train.npz", "--model", run.model, "--weights", "net.safetensors"]
    assert ifcomp("audit", "run.ifcomp", *arguments).exit_code == 0
    assert ifcomp("audit", "run.ifcomp", "npz:train.npz").exit_code == 2
    assert not Path("imported").exists()
    assert ifcomp("audit", "run.ifcomp", "--trust-run").exit_code == 0
    assert Path("imported").exists()


def test_data_named_in_an_untrusted_record_is_not_opened(run: Project) -> None:
    content = json.loads(Path("run.ifcomp.json").read_text())
    Path("run.ifcomp.json").write_text(json.dumps({**content, "data": "nowhere:data"}))
    result = ifcomp("audit", "run.ifcomp", "--model", run.model, "--weights", "net.safetensors")
    assert result.exit_code == 2
    assert "was not written by you" in result.stderr


def test_run_without_a_record(run: Project) -> None:
    Path("run.ifcomp.json").unlink()
    result = ifcomp("score", "run.ifcomp")
    assert result.exit_code == 2
    assert "no record 'run.ifcomp.json' beside the run, so name the data yourself" in result.stderr
    result = ifcomp("score", "run.ifcomp", "npz:train.npz")
    assert "so name the model with --model yourself" in result.stderr
    arguments = ["npz:train.npz", "--model", run.model, "--weights", "net.safetensors", "--out", "s.csv"]
    assert ifcomp("score", "run.ifcomp", *arguments).exit_code == 0


def test_damaged_options_in_a_trusted_record(run: Project) -> None:
    content = json.loads(Path("run.ifcomp.json").read_text())
    Path("run.ifcomp.json").write_text(json.dumps({**content, "options": {"unknown": 1}}))
    result = ifcomp("audit", "run.ifcomp", "--trust-run")
    assert result.exit_code == 2
    assert "The record of the run is damaged" in result.stderr


def test_other_weights_are_refused(run: Project) -> None:
    result = ifcomp("audit", "run.ifcomp", "--model", f"{run.module}:build", "--weights", "net.pt")
    assert result.exit_code == 0, result.output
    from safetensors.torch import load_file, save_file

    state = load_file("net.safetensors")
    save_file({name: value + 1e-3 for name, value in state.items()}, "net.safetensors")
    result = ifcomp("audit", "run.ifcomp")
    assert result.exit_code == 2
    assert "different values: 1.bias, 1.weight, 3.bias, 3.weight" in result.stderr


def test_data_of_another_length_is_refused(run: Project) -> None:
    x, y = run.arrays("train")
    np.savez("train.npz", x=x[:-1].numpy(), y=y[:-1].numpy())
    result = ifcomp("audit", "run.ifcomp")
    assert result.exit_code == 2
    assert "has 199 examples now, but the run was fitted on 200" in result.stderr


def test_data_options_are_stored(project: Project) -> None:
    result = ifcomp(*project.fit_arguments(), "--mean", "0.2", "--std", "0.5", "--batch-size", "64")
    assert result.exit_code == 0, result.output
    options = json.loads(Path("run.ifcomp.json").read_text())["options"]
    assert options == {"batch_size": 64, "mean": [0.2], "std": [0.5]}
    result = ifcomp("score", "run.ifcomp", "npz:valid.npz", "--out", "a.csv")
    assert result.exit_code == 0, result.output
    result = ifcomp("score", "run.ifcomp", "npz:valid.npz", "--mean", "0", "--std", "1", "--out", "b.csv")
    assert result.exit_code == 0, result.output
    assert Path("a.csv").read_text() != Path("b.csv").read_text()


@pytest.mark.parametrize("command", ["score", "audit", "prune"])
def test_files_that_are_not_runs(project: Project, command: str) -> None:
    result = ifcomp(command, "gone.ifcomp")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "There is no run 'gone.ifcomp'. Create one with 'ifcomp fit MODEL DATA --out gone.ifcomp'" in result.stderr
    Path("text.ifcomp").write_text("hello")
    arguments = ["npz:train.npz", "--model", project.model, "--weights", "net.safetensors"]
    result = ifcomp(command, "text.ifcomp", *arguments)
    assert result.exit_code == 2
    assert "not a safetensors file" in result.stderr


def test_folder_reached_through_a_link(run: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    os.symlink(run.folder, "link")
    monkeypatch.chdir("link")
    assert ifcomp("audit", "run.ifcomp").exit_code == 0
