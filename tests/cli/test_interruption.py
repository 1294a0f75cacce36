"""Commands that are interrupted and repeated, and two commands that write the same file."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from project import Project, ifcomp, stored_record

from ifcomp import IFComp

#: Data that waits before its fourth batch until the file 'go' exists.
GATED = """
import time
from pathlib import Path
import numpy as np
import torch

class Gated:
    def __iter__(self):
        with np.load("train.npz") as file:
            x, y = torch.tensor(file["x"]), torch.tensor(file["y"])
        for number, batch in enumerate(zip(x.split(40), y.split(40))):
            if number == 3 and not Path("go").exists():
                Path("reached").touch()
                while not Path("go").exists():
                    time.sleep(0.01)
            yield batch
"""


def wait_for(path: str, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not Path(path).exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Path(path).exists(), running.communicate(timeout=10)


def start(*arguments: str) -> subprocess.Popen[str]:
    restore_sigint = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    command = [sys.executable, "-m", "ifcomp", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, preexec_fn=restore_sigint, env=environment)


def commands(project: Project) -> dict[str, tuple[list[str], list[str]]]:
    Path("gated.py").write_text(GATED)
    fit = ["fit", project.model, "gated:Gated", "--weights", "net.safetensors"]
    return {
        "fit": (fit, ["run.ifcomp"]),
        "score": (["score", "run.ifcomp", "gated:Gated"], ["scores.csv"]),
        "audit": (
            ["audit", "--model", project.model, "--weights", "net.safetensors", "--data", "gated:Gated"],
            ["audit.csv"],
        ),
    }


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("name", ["fit", "score", "audit"])
def test_repeated_command_resumes(run: Project, name: str, how: signal.Signals) -> None:
    command, outputs = commands(run)[name]
    every = ["--checkpoint-every", "0" if how is signal.SIGKILL else "3600"]
    Path("go").touch()
    assert ifcomp(*command).exit_code == 0
    expected = {output: Path(output).read_bytes() for output in outputs}
    before = {path.name for path in Path().iterdir()} - {"__pycache__"}
    for path in [*outputs, "go"] if name != "fit" else ["go"]:
        Path(path).unlink()
    with start(*command, *every) as running:
        wait_for("reached", running)
        running.send_signal(how)
        if how is signal.SIGINT:
            assert running.stderr is not None
            while "Stopping after this batch" not in running.stderr.readline():
                assert running.poll() is None
        Path("go").touch()
        stdout, stderr = running.communicate(timeout=120)
    if how is signal.SIGINT:
        assert (running.returncode, stdout) == (130, "")
        partial_file = f"{outputs[0]}.partial"
        assert stderr.splitlines()[-1] == (
            "Stopped. Files are either complete or unchanged. The work so far is saved in "
            f"'{partial_file}'. Repeat the same command or call to resume it."
        )
        assert "Traceback" not in stderr
    assert Path(f"{outputs[0]}.partial").exists()
    result = ifcomp(*command, *every)
    assert result.exit_code == 0, result.output
    assert {output: Path(output).read_bytes() for output in outputs} == expected
    assert {path.name for path in Path().iterdir()} - {"__pycache__", "reached"} == before


def test_second_command_that_writes_the_same_file_is_refused(project: Project) -> None:
    command, _ = commands(project)["fit"]
    with start(*command) as running:
        wait_for("reached", running)
        result = ifcomp(*project.fit_arguments(), "--beta", "0.5")
        assert result.exit_code == 2
        assert "Another process is working on 'run.ifcomp.partial'" in result.stderr
        assert ifcomp(*project.fit_arguments(), "--out", "other.ifcomp").exit_code == 0
        Path("go").touch()
        assert running.wait(timeout=120) == 0, running.communicate()
    assert IFComp.load("run.ifcomp", project.network()).beta == 1.0
    assert stored_record()["data"] == "gated:Gated"


def test_other_settings_are_refused_while_a_checkpoint_exists(project: Project) -> None:
    fit = project.fit_arguments(f"{project.module}:Interrupted")
    Path("interrupt").touch()
    assert ifcomp(*fit, "--checkpoint-every", "0").exit_code == 130
    Path("interrupt").unlink()
    result = ifcomp(*fit, "--beta", "0.5")
    assert result.exit_code == 2
    assert "settings: [{'beta': 1.0" in result.stderr
    assert "Repeat the same" not in result.stderr
    assert Path("run.ifcomp.partial").exists()
    assert ifcomp(*fit).exit_code == 0
    assert not Path("run.ifcomp.partial").exists()


def test_command_killed_before_it_replaces_the_run(run: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    before = Path("run.ifcomp").read_bytes()
    monkeypatch.setattr("ifcomp.io.files.os.replace", killed)
    with pytest.raises(Killed):
        ifcomp(*run.fit_arguments(), "--beta", "0.5")
    assert Path("run.ifcomp").read_bytes() == before


def test_failed_write_keeps_the_old_run_and_its_record(run: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path("run.ifcomp").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ifcomp.io.tensor_files.save_file", full)
    result = ifcomp(*run.fit_arguments(), "--beta", "0.5")
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert Path("run.ifcomp").read_bytes() == before


def test_full_disk_is_detected_before_the_fit(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("ifcomp.io.files.shutil.disk_usage", lambda _: usage)
    result = ifcomp(*project.fit_arguments(f"{project.module}:FirstBatchOnly"))
    assert result.exit_code == 2
    assert "only 100 are free" in result.stderr
