"""Commands that are stopped and given again, and two commands at one file."""

import json
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
from workshop import Workshop, ifcomp

from ifcomp import IFComp
from ifcomp.cli.runs import read_record

#: Batches that wait at one of them until they are let go.
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


def started(*arguments: str) -> subprocess.Popen[str]:
    heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    command = [sys.executable, "-m", "ifcomp", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, preexec_fn=heard, env=environment)


def commands(workshop: Workshop) -> dict[str, tuple[list[str], list[str]]]:
    Path("gated.py").write_text(GATED)
    fit = ["fit", workshop.model, "gated:Gated", "--weights", "net.safetensors"]
    return {
        "fit": (fit, ["run.ifcomp", "run.ifcomp.json"]),
        "score": (["score", "run.ifcomp", "gated:Gated"], ["scores.parquet"]),
        "audit": (["audit", "run.ifcomp", "gated:Gated"], ["audit.csv"]),
    }


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("name", ["fit", "score", "audit"])
def test_a_stopped_command_goes_on_when_given_again(run: Workshop, name: str, how: signal.Signals) -> None:
    command, outputs = commands(run)[name]
    every = ["--checkpoint-every", "0" if how is signal.SIGKILL else "3600"]
    Path("go").touch()
    assert ifcomp(*command).exit_code == 0
    expected = {output: Path(output).read_bytes() for output in outputs}
    before = {path.name for path in Path().iterdir()} - {"__pycache__"}
    for path in [*outputs, "go"] if name != "fit" else ["go"]:
        Path(path).unlink()
    with started(*command, *every) as running:
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
            "Stopped. Files are either complete or as they were before. The work so far is saved in "
            f"'{partial_file}'. Repeat the same command or call to resume it."
        )
        assert "Traceback" not in stderr
    assert Path(f"{outputs[0]}.partial").exists()
    found = ifcomp(*command, *every)
    assert found.exit_code == 0, found.output
    assert {output: Path(output).read_bytes() for output in outputs} == expected
    assert {path.name for path in Path().iterdir()} - {"__pycache__", "reached"} == before


def test_a_second_command_at_the_same_file_is_refused(workshop: Workshop) -> None:
    command, _ = commands(workshop)["fit"]
    with started(*command) as running:
        wait_for("reached", running)
        found = ifcomp(*workshop.fit_arguments(), "--beta", "0.5")
        assert found.exit_code == 2
        assert "Another process is working on 'run.ifcomp.partial'" in found.stderr
        assert ifcomp(*workshop.fit_arguments(), "--out", "other.ifcomp").exit_code == 0
        Path("go").touch()
        assert running.wait(timeout=120) == 0, running.communicate()
    assert IFComp.load("run.ifcomp", workshop.network()).beta == 1.0
    assert json.loads(Path("run.ifcomp.json").read_text())["data"] == "gated:Gated"


def test_another_command_is_refused_while_one_is_unfinished(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    every = ["--checkpoint-every", "0"]
    with monkeypatch.context() as patch:
        patch.setattr("ifcomp.predictor.fit_second_moments", stop)
        assert ifcomp(*workshop.fit_arguments(), *every).exit_code == 130
    found = ifcomp(*workshop.fit_arguments(), "--beta", "0.5")
    assert found.exit_code == 2
    assert "settings: [{'beta': 1.0" in found.stderr
    assert "Repeat the same command" not in found.stderr
    assert Path("run.ifcomp.partial").exists()
    assert ifcomp(*workshop.fit_arguments()).exit_code == 0
    assert not Path("run.ifcomp.partial").exists()


def test_a_run_killed_before_its_record_is_written_has_none(run: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr("ifcomp.cli.runs.write_record", killed)
    with pytest.raises(Killed):
        ifcomp(*run.fit_arguments(), "--beta", "0.5")
    assert IFComp.load("run.ifcomp", run.network()).beta == 0.5
    assert read_record("run.ifcomp") is None
    found = ifcomp("audit", "run.ifcomp")
    assert found.exit_code == 2
    assert "There is no record 'run.ifcomp.json' beside the run" in found.stderr


def test_a_run_that_cannot_be_written_leaves_the_old_one_and_its_record(
    run: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: Path(name).read_bytes() for name in ("run.ifcomp", "run.ifcomp.json")}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ifcomp.io.factor_files.save_file", full)
    found = ifcomp(*run.fit_arguments(), "--beta", "0.5")
    assert found.exit_code == 2
    assert "No space left on device" in found.stderr
    assert {name: Path(name).read_bytes() for name in before} == before


def test_a_run_that_is_replaced_while_it_is_read_is_refused(run: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    load = IFComp.load

    def replaced(path: str, model: Any) -> IFComp:
        found = load(path, model)
        record = json.loads(Path("run.ifcomp.json").read_text())
        Path("run.ifcomp.json").write_text(json.dumps({**record, "data": "npz:valid.npz"}))
        return found

    monkeypatch.setattr(IFComp, "load", replaced)
    found = ifcomp("audit", "run.ifcomp")
    assert found.exit_code == 2
    assert "was replaced by another fit while it was read" in found.stderr


def test_a_full_disk_is_found_before_the_work(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("ifcomp.io.files.shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr("ifcomp.predictor.fit_covariances", lambda *_: pytest.fail("worked"))
    found = ifcomp(*workshop.fit_arguments())
    assert found.exit_code == 2
    assert "only 100 are free" in found.stderr
