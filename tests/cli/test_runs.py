"""A run's record spares typing to the one who wrote it, and runs no code for anyone else."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workshop import Workshop, ifcomp

from ifcomp.cli.record import Record, read_record, write_record
from ifcomp.errors import StorageError

RECORD = Record("net:build", "net.safetensors", "npz:train.npz", {"mean": [0.5]}, ["a", "b"], 10)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_written_and_read_again(here: Path, configuration: Path) -> None:
    assert write_record("run", RECORD) == "run.json"
    found = read_record("run")
    assert found is not None
    assert found.is_own
    assert {**vars(found), "signature": ""} == vars(RECORD)
    key = configuration / "ifcomp" / "run-key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert key.read_bytes().hex() not in Path("run.json").read_text()


@pytest.mark.parametrize(
    "change", [{"model": "evil:build"}, {"data": "evil:data"}, {"weights": None}, {"signature": ""}, {"signature": "é"}]
)
def test_a_changed_record_is_not_believed(here: Path, change: dict[str, Any]) -> None:
    write_record("run", RECORD)
    content = json.loads(Path("run.json").read_text())
    Path("run.json").write_text(json.dumps({**content, **change}))
    found = read_record("run")
    assert found is not None
    assert not found.is_own


def test_another_folder_or_user_does_not_believe_it(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record("run", RECORD)
    found = read_record("run")
    assert found is not None
    (here / "sub").mkdir()
    monkeypatch.chdir("sub")
    assert not found.is_own
    monkeypatch.chdir(here)
    assert found.is_own
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("nobody")))
    assert not found.is_own
    write_record("other", RECORD)
    assert not found.is_own


def test_without_a_place_for_the_key_records_are_not_believed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "file"))
    write_record("run", RECORD)
    found = read_record("run")
    assert found is not None
    assert (found.signature, found.is_own) == ("", False)


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


# What the commands make of it --------------------------------------------------------------------------------------


def leave_trap(name: str) -> None:
    """A module that leaves a file behind when it is imported."""
    Path(f"{name}.py").write_text(f"from pathlib import Path\nPath('sprung').touch()\nfrom {name[5:]} import *\n")


def test_code_that_a_foreign_record_names_is_not_imported(run: Workshop) -> None:
    leave_trap(f"trap_{run.module}")
    content = json.loads(Path("run.ifcomp.json").read_text())
    Path("run.ifcomp.json").write_text(json.dumps({**content, "model": f"trap_{run.module}:build"}))
    found = ifcomp("audit", "run.ifcomp")
    assert found.exit_code == 2
    assert "was not written by you in this folder" in found.stderr
    assert f"--model trap_{run.module}:build --weights net.safetensors" in found.stderr
    given = ["npz:train.npz", "--model", run.model, "--weights", "net.safetensors"]
    assert ifcomp("audit", "run.ifcomp", *given).exit_code == 0
    assert ifcomp("audit", "run.ifcomp", "npz:train.npz").exit_code == 2
    assert not Path("sprung").exists()
    assert ifcomp("audit", "run.ifcomp", "--trust-run").exit_code == 0
    assert Path("sprung").exists()


def test_data_that_a_foreign_record_names_is_not_opened(run: Workshop) -> None:
    content = json.loads(Path("run.ifcomp.json").read_text())
    Path("run.ifcomp.json").write_text(json.dumps({**content, "data": "nowhere:data"}))
    found = ifcomp("audit", "run.ifcomp", "--model", run.model, "--weights", "net.safetensors")
    assert found.exit_code == 2
    assert "was not written by you" in found.stderr


def test_a_run_without_a_record_needs_everything(run: Workshop) -> None:
    Path("run.ifcomp.json").unlink()
    found = ifcomp("score", "run.ifcomp")
    assert found.exit_code == 2
    assert "no record 'run.ifcomp.json' beside the run, so name the data yourself" in found.stderr
    found = ifcomp("score", "run.ifcomp", "npz:train.npz")
    assert "so name the model with --model yourself" in found.stderr
    given = ["npz:train.npz", "--model", run.model, "--weights", "net.safetensors", "--out", "s.csv"]
    assert ifcomp("score", "run.ifcomp", *given).exit_code == 0


def test_damaged_options_in_a_trusted_record(run: Workshop) -> None:
    content = json.loads(Path("run.ifcomp.json").read_text())
    Path("run.ifcomp.json").write_text(json.dumps({**content, "options": {"unheard": 1}}))
    found = ifcomp("audit", "run.ifcomp", "--trust-run")
    assert found.exit_code == 2
    assert "The record of the run is damaged" in found.stderr


def test_other_weights_than_those_of_the_fit_are_refused(run: Workshop) -> None:
    found = ifcomp("audit", "run.ifcomp", "--model", f"{run.module}:build", "--weights", "net.pt")
    assert found.exit_code == 0, found.output
    from safetensors.torch import load_file, save_file

    state = load_file("net.safetensors")
    save_file({name: value + 1e-3 for name, value in state.items()}, "net.safetensors")
    found = ifcomp("audit", "run.ifcomp")
    assert found.exit_code == 2
    assert "different values: 1.bias, 1.weight, 3.bias, 3.weight" in found.stderr


def test_data_that_changed_its_length_is_refused(run: Workshop) -> None:
    x, y = run.arrays("train")
    np.savez("train.npz", x=x[:-1].numpy(), y=y[:-1].numpy())
    found = ifcomp("audit", "run.ifcomp")
    assert found.exit_code == 2
    assert "has 199 examples now, but the run was fitted on 200" in found.stderr


def test_how_the_data_was_read_is_remembered(workshop: Workshop) -> None:
    found = ifcomp(*workshop.fit_arguments(), "--mean", "0.2", "--std", "0.5", "--batch-size", "64")
    assert found.exit_code == 0, found.output
    options = json.loads(Path("run.ifcomp.json").read_text())["options"]
    assert options == {"batch_size": 64, "mean": [0.2], "std": [0.5]}
    found = ifcomp("score", "run.ifcomp", "npz:valid.npz", "--out", "a.csv")
    assert found.exit_code == 0, found.output
    found = ifcomp("score", "run.ifcomp", "npz:valid.npz", "--mean", "0", "--std", "1", "--out", "b.csv")
    assert found.exit_code == 0, found.output
    assert Path("a.csv").read_text() != Path("b.csv").read_text()


@pytest.mark.parametrize("command", ["score", "audit", "prune"])
def test_runs_that_are_none(workshop: Workshop, command: str) -> None:
    found = ifcomp(command, "gone.ifcomp")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "There is no run 'gone.ifcomp'. Make one with 'ifcomp fit MODEL DATA --out gone.ifcomp'" in found.stderr
    Path("text.ifcomp").write_text("hello")
    given = ["npz:train.npz", "--model", workshop.model, "--weights", "net.safetensors"]
    found = ifcomp(command, "text.ifcomp", *given)
    assert found.exit_code == 2
    assert "not a safetensors file" in found.stderr


def test_the_folder_counts_however_it_is_reached(run: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    os.symlink(run.folder, "again")
    monkeypatch.chdir("again")
    assert ifcomp("audit", "run.ifcomp").exit_code == 0
