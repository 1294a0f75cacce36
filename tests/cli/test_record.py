"""The record of a run is trusted wherever its owner takes it, and runs no code for anyone else."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from project import Project, change_record, ifcomp, remove_record, run_json, stored_record, write_record
from safetensors.torch import load_file, save_file

import ifcomp as package
from ifcomp.cli.keys import key_path
from ifcomp.cli.record import Record, folder_of_fit, read_record
from ifcomp.errors import IfcompWarning, StorageError
from ifcomp.io.tensor_files import write_tensors

RECORD = Record("net:build", "net.safetensors", "npz:train.npz", {"mean": [0.5]}, ["a", "b"], 10, "0")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_tensors("run", {"a": torch.arange(3.0)}, "ifcomp", {"other": "text"})
    return tmp_path


def read(run: str = "run") -> Record:
    record = read_record(run)
    assert record is not None
    return record


def test_write_and_read(here: Path, configuration: Path) -> None:
    assert read_record("run") is None
    write_record("run", RECORD.signed())
    record = read()
    assert record.is_trusted
    assert {**vars(record), "signature": ""} == vars(RECORD)
    key = configuration / "ifcomp" / "run-key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert key.read_bytes().hex().encode() not in Path("run").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "evil:build"},
        {"data": "evil:data"},
        {"weights": None},
        {"options": {}},
        {"digest": "1"},
        {"folder": ".."},
        {"signature": ""},
        {"signature": "é"},
    ],
)
def test_changed_record_is_not_trusted(here: Path, change: dict[str, Any]) -> None:
    write_record("run", RECORD.signed())
    change_record("run", **change)
    assert not read().is_trusted


def test_record_of_another_user_is_not_trusted(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record("run", RECORD.signed())
    (here / "sub").mkdir()
    shutil.move("run", "sub/moved")
    assert read("sub/moved").is_trusted
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("another_user")))
    assert not read("sub/moved").is_trusted
    RECORD.signed()  # creates a key of this user
    assert not read("sub/moved").is_trusted


def test_folder_of_the_fit_is_stored_without_names(here: Path) -> None:
    assert [folder_of_fit(name) for name in ("run", "./a/run", "a/b/run", str(here / "a" / "run"))] == [
        ".",
        "..",
        "../..",
        "..",
    ]
    assert folder_of_fit("../run") == folder_of_fit("/tmp/elsewhere/run") == "."


# The key -------------------------------------------------------------------------------------------------------------


def test_records_without_a_key_are_not_trusted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "file"))
    record = RECORD.signed()
    assert (record.signature, record.is_trusted) == ("", False)


@pytest.mark.parametrize("value", ["", ".", "config", None])
def test_key_is_never_read_from_the_current_folder(
    here: Path, value: str | None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    if value is not None:
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
    for folder in ("ifcomp", "config/ifcomp"):
        Path(folder).mkdir(parents=True)
        Path(folder, "run-key").write_bytes(bytes(32))
        Path(folder, "run-key").chmod(0o600)
    assert key_path() == home / ".config" / "ifcomp" / "run-key"
    assert RECORD.signed().is_trusted
    assert key_path().read_bytes() != bytes(32)


@pytest.mark.parametrize("home", ["", "home"])
def test_key_path_is_absolute_whatever_home_is(here: Path, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", home)
    assert key_path().is_absolute()
    assert not key_path().is_relative_to(here)


@pytest.mark.parametrize("how", ["readable", "link", "pipe", "folder", "short"])
def test_key_that_is_not_private_is_not_used(
    here: Path, how: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("configuration")))
    record = RECORD.signed()
    assert record.is_trusted
    path = key_path()
    if how == "readable":
        path.chmod(0o644)
        with pytest.warns(IfcompWarning, match="readable by others"):
            assert not record.is_trusted
        return
    path.rename(path.with_name("other"))
    if how == "link":
        path.symlink_to("other")
    elif how == "pipe":
        os.mkfifo(path, 0o600)
    elif how == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"short")
        path.chmod(0o600)
    assert not record.is_trusted


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_key_of_another_user_is_not_used(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("configuration")))
    record = RECORD.signed()
    os.chown(key_path(), 12345, -1)
    with pytest.warns(IfcompWarning, match="belongs to another user"):
        assert not record.is_trusted


# Damaged records -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [[], {}, "text", {"schema": 1}, {"schema": 2, "model": 5}])
def test_damaged_records(here: Path, content: Any) -> None:
    write_record("run", content)
    with pytest.raises(StorageError, match=r"Cannot read the record in 'run'"):
        read_record("run")


@pytest.mark.parametrize("text", ["", "[]", "\xff", "{" * 10])
def test_damaged_headers(here: Path, text: str) -> None:
    save_file({"a": torch.arange(3.0)}, "run", {"ifcomp": text})
    with pytest.raises(StorageError, match=r"Cannot read the run 'run'"):
        read_record("run")


def test_wrong_types_are_refused(here: Path) -> None:
    changes = [{"model": 1}, {"options": []}, {"class_names": [1]}, {"examples": "many"}, {"more": 1}]
    for change in [*changes, {"folder": "../a"}, {"folder": "/"}, {"folder": "a"}, {"digest": None}]:
        write_record("run", RECORD.signed())
        change_record("run", **change)
        with pytest.raises(StorageError, match="Cannot read the record"):
            read_record("run")


@pytest.mark.parametrize("change", [{"data": "a\nError: b\x1b[2J"}, {"a\nError: b": 1}, {"model": "a\nError: b:c"}])
def test_line_breaks_of_a_foreign_record_are_not_printed(run: Project, change: dict[str, Any]) -> None:
    change_record(**change)
    result = ifcomp("audit", "run.ifcomp")
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "\\nError: b" in result.stderr
    assert "\x1b" not in result.stderr


def test_flipped_bits_of_a_trusted_record_are_refused(run: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of the run covers its record, also where the signature is not checked."""
    monkeypatch.setenv("IFCOMP_TRUST_RUN", "1")
    content = bytearray(Path("run.ifcomp").read_bytes())
    content[content.index(b"digit 3")] ^= 1
    Path("run.ifcomp").write_bytes(content)
    result = ifcomp("predict", "run.ifcomp", "valid.npz")
    assert result.exit_code == 2
    assert "SHA-256 digest differs" in " ".join(result.stderr.split())


# Commands ------------------------------------------------------------------------------------------------------------


def in_new_process(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder that is not on Python's path, except as ``python -m`` puts it there."""
    environment = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])}
    command = [sys.executable, "-m", "ifcomp", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def write_trap(name: str) -> None:
    """Write a module that creates the file 'imported' when it is imported."""
    Path(f"{name}.py").write_text(f"from pathlib import Path\nPath('imported').touch()\nfrom {name[5:]} import *\n")


def test_code_named_in_an_untrusted_record_is_not_imported(run: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trap(f"trap_{run.module}")
    change_record(model=f"trap_{run.module}:build")
    result = ifcomp("audit", "run.ifcomp")
    assert result.exit_code == 2
    assert "You did not write the run 'run.ifcomp' on this computer" in result.stderr
    assert f"--model trap_{run.module}:build --weights net.safetensors" in result.stderr
    arguments = ["npz:train.npz", "--model", run.model, "--weights", "net.safetensors"]
    assert ifcomp("audit", "run.ifcomp", *arguments).exit_code == 0
    assert ifcomp("audit", "run.ifcomp", "npz:train.npz").exit_code == 2
    assert not Path("imported").exists()
    assert ifcomp("audit", "run.ifcomp", "--trust-run").exit_code == 0
    assert Path("imported").exists()
    monkeypatch.setenv("IFCOMP_TRUST_RUN", "1")
    assert ifcomp("audit", "run.ifcomp").exit_code == 0


def test_data_named_in_an_untrusted_record_is_not_opened(run: Project) -> None:
    change_record(data="nowhere:data")
    result = ifcomp("audit", "run.ifcomp", "--model", run.model, "--weights", "net.safetensors")
    assert result.exit_code == 2
    assert "You did not write the run" in result.stderr


def test_run_without_a_record(run: Project) -> None:
    remove_record()
    result = ifcomp("score", "run.ifcomp")
    assert result.exit_code == 2
    assert "'run.ifcomp' was not written by 'ifcomp fit' and does not contain the names" in result.stderr
    result = ifcomp("score", "run.ifcomp", "npz:train.npz")
    assert "Add the model with --model to the command." in result.stderr
    arguments = ["npz:train.npz", "--model", run.model, "--weights", "net.safetensors", "--out", "s.csv"]
    assert ifcomp("score", "run.ifcomp", *arguments).exit_code == 0


def test_run_is_moved_used_from_another_folder_and_copied(run: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_json("audit", "run.ifcomp")
    shutil.move("run.ifcomp", "renamed.ifcomp")
    assert run_json("audit", "renamed.ifcomp")["suspects"] == expected["suspects"]
    Path("runs").mkdir()
    assert ifcomp(*run.fit_arguments(), "--out", "runs/run.ifcomp").exit_code == 0
    shutil.copytree(run.folder, run.folder / "copy", ignore=shutil.ignore_patterns("copy"))
    for folder, path in {"runs": "run.ifcomp", "copy": "../runs/run.ifcomp", "copy/runs": "run.ifcomp"}.items():
        monkeypatch.chdir(run.folder / folder)
        result = run_json("audit", path, "--out", "moved.csv")
        assert result["suspects"] == expected["suspects"]
        assert result["data"] == "npz:../train.npz"
    monkeypatch.chdir(run.folder)
    shutil.move("renamed.ifcomp", run.folder.parent / f"{run.folder.name}.ifcomp")  # the files stay in this folder
    assert run_json("audit", f"../{run.folder.name}.ifcomp")["suspects"] == expected["suspects"]


def test_module_is_found_in_the_current_folder_if_the_run_was_moved_alone(run: Project) -> None:
    Path("archive").mkdir()
    shutil.move("run.ifcomp", "archive")
    result = in_new_process("audit", "archive/run.ifcomp", folder=run.folder)
    assert result.returncode == 0, result.stderr


def test_data_in_the_place_of_a_run(run: Project) -> None:
    Path("images").mkdir()
    for name in ("train.npz", "images"):
        result = ifcomp("audit", name)
        assert result.exit_code == 2
        assert f"'{name}' is data, not a run" in result.stderr


def test_module_of_a_run_is_imported_from_the_folder_of_the_fit(run: Project, tmp_path: Path) -> None:
    """In a separate process, where the module is not imported yet; another module of that name is not used."""
    (tmp_path / "other").mkdir()
    Path("other", f"{run.module}.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    result = in_new_process("audit", "../run.ifcomp", "-q", folder=tmp_path / "other")
    assert result.returncode == 0, result.stderr
    assert not Path("other", "imported").exists()


def test_files_of_the_current_folder_do_not_replace_installed_modules(run: Project) -> None:
    for name in ("sympy", "pandas", "sklearn", "json"):
        Path(f"{name}.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    result = in_new_process("audit", "run.ifcomp", folder=run.folder)
    assert result.returncode == 0, result.stderr
    assert not Path("imported").exists()


def test_current_folder_is_on_the_path_only_during_the_import(run: Project) -> None:
    before = list(sys.path)
    Path("looks.py").write_text(
        "import os, sys\nfrom torch import nn\nassert sys.path[-1] == os.getcwd()\nassert os.getcwd() not in "
        f"sys.path[:-1]\ndef build():\n    import {run.module} as net\n    return net.build()\n"
    )
    arguments = ["npz:train.npz", "--model", "looks:build", "--weights", "net.safetensors"]
    result = ifcomp("audit", "run.ifcomp", *arguments)
    assert result.exit_code == 0, result.output
    assert sys.path == before


def test_run_keeps_its_data_when_it_replaces_another(run: Project) -> None:
    """``mv A.ifcomp B.ifcomp`` with runs of the same weights and as many examples."""
    x, y = run.arrays("train")
    np.savez("other.npz", x=x.flip(0).numpy(), y=y.flip(0).numpy())
    assert ifcomp(*run.fit_arguments("npz:other.npz"), "--out", "other.ifcomp").exit_code == 0
    shutil.move("run.ifcomp", "other.ifcomp")
    assert run_json("audit", "other.ifcomp")["data"] == "npz:train.npz"
    assert stored_record("other.ifcomp")["data"] == "npz:train.npz"


@pytest.mark.filterwarnings("ignore:100 held-out examples are few")
def test_every_command_that_writes_the_run_keeps_its_record(run: Project) -> None:
    before = stored_record()
    for command in (
        ["calibrate", "run.ifcomp", "npz:valid.npz"],
        ["ood", "run.ifcomp", "npz:inverted.npz", "--held-out", "npz:valid.npz"],
    ):
        result = ifcomp(*command)
        assert result.exit_code == 0, result.output
        assert stored_record() == before


def test_damaged_options_in_a_trusted_record(run: Project) -> None:
    change_record(options={"unknown": 1})
    result = ifcomp("audit", "run.ifcomp", "--trust-run")
    assert result.exit_code == 2
    assert "The record of the run is damaged" in result.stderr


def test_other_weights_are_refused(run: Project) -> None:
    result = ifcomp("audit", "run.ifcomp", "--model", f"{run.module}:build", "--weights", "net.pt")
    assert result.exit_code == 0, result.output
    state = load_file("net.safetensors")
    save_file({name: value + 1e-3 for name, value in state.items()}, "net.safetensors")
    result = ifcomp("audit", "run.ifcomp")
    assert result.exit_code == 2
    assert "different values: 1.bias, 1.weight, 3.bias, 3.weight" in result.stderr


def test_other_data_under_the_same_name_is_refused(run: Project) -> None:
    x, y = run.arrays("train")
    np.savez("train.npz", x=x[:-1].numpy(), y=y[:-1].numpy())
    result = ifcomp("audit", "run.ifcomp")
    assert result.exit_code == 2
    assert "has 199 examples now, but the run was fitted on 200" in result.stderr
    y[0] = (y[0] + 1) % 10
    np.savez("train.npz", x=x.numpy(), y=y.numpy())
    result = ifcomp("audit", "run.ifcomp")
    assert result.exit_code == 2
    assert "'npz:train.npz' differs from the data of the fit" in result.stderr
    assert ifcomp("audit", "run.ifcomp", "npz:train.npz").exit_code == 0


def test_data_options_are_stored(project: Project) -> None:
    result = ifcomp(*project.fit_arguments(), "--mean", "0.2", "--std", "0.5", "--batch-size", "64")
    assert result.exit_code == 0, result.output
    assert stored_record()["options"] == {"batch_size": 64, "mean": [0.2], "std": [0.5]}
    result = ifcomp("score", "run.ifcomp", "npz:valid.npz", "--out", "a.csv")
    assert result.exit_code == 0, result.output
    result = ifcomp("score", "run.ifcomp", "npz:valid.npz", "--mean", "0", "--std", "1", "--out", "b.csv")
    assert result.exit_code == 0, result.output
    assert Path("a.csv").read_text() != Path("b.csv").read_text()
    assert ifcomp("score", "run.ifcomp", "--batch-size", "33", "--out", "c.csv").exit_code == 0


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


def test_record_is_json_without_the_name_of_the_folder(run: Project) -> None:
    text = json.dumps(stored_record())
    assert str(run.folder) not in text
    assert stored_record()["folder"] == "."
