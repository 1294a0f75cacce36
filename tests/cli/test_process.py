"""The command as a separate process: fast help, clean streams, progress, Ctrl-C, a workflow."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pandas as pd
import pytest
from project import Project

SLOW = """
import time
from pathlib import Path
import torch

class Slow:
    def __len__(self):
        return 12

    def __iter__(self):
        for number in range(12):
            Path("started").touch()
            time.sleep(0.12)
            yield torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(number))

class Labelled(Slow):
    def __iter__(self):
        return ((x, torch.arange(4)) for x in super(Labelled, self).__iter__())
"""


def process(*arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ifcomp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["fit", "--help"], ["audit", "-h"]])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    lines = [
        "import sys",
        "from ifcomp.cli.main import app",
        f"try: app({arguments!r})",
        "except SystemExit as done: assert not done.code",
        "print(sorted({'torch', 'numpy', 'pandas', 'sklearn', 'matplotlib'} & set(sys.modules)))",
    ]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_fit_and_audit(project: Project) -> None:
    result = process(*project.fit_arguments(), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["examples"] == 200
    assert result.stderr == "printed by the user's code\n"
    result = process("audit", "run.ifcomp", "--max-suspects", "5")
    assert result.returncode == 3, result.stderr
    suspects = pd.read_csv("audit.csv")["is_suspect"].sum()
    assert f"{suspects} of 200 labels" in result.stdout.splitlines()[0]


def test_invalid_input(project: Project) -> None:
    result = process("fit", project.model, "npz:gone.npz")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "Error: There is no file 'gone.npz'.\n"


def test_terminals_without_a_character_and_closed_pipes(project: Project) -> None:
    x, y = project.arrays("train")
    np.savez("named.npz", x=x.numpy(), y=y.numpy(), classes=np.array([f"\u00e9 {label} \u2026" for label in range(10)]))
    audit = ["audit", "--model", project.model, "--weights", "net.safetensors", "--data", "named.npz"]
    result = process(*audit, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0, result.stderr
    assert "\\xe9" in result.stdout
    with subprocess.Popen([sys.executable, "-m", "ifcomp", *audit], stdout=PIPE, stderr=PIPE, text=True) as closed:
        assert closed.stdout is not None
        closed.stdout.close()
        assert closed.stderr is not None
        assert "Traceback" not in closed.stderr.read()


def test_errors_of_the_model_name_the_batch(project: Project) -> None:
    Path("late.py").write_text(
        f"""
from torch import nn
import {project.module} as own

class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = own.build()

    def forward(self, x):
        if len(x) == 37:
            raise KeyError("no entry for these")
        return self.net(x)

def batches():
    first, second, *_ = own.batches()
    return [first, tuple(value[:37] for value in second)]
"""
    )
    result = process("fit", "late:Late", "late:batches")
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert "Traceback" not in result.stderr
    assert "Error: KeyError: 'no entry for these'. The model failed on batch 1." in " ".join(result.stderr.split())
    result = process("fit", "late:Late", "late:batches", "--json")
    assert json.loads(result.stdout)["exit_code"] == result.returncode == 2


def test_interruption(project: Project) -> None:
    Path("slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "ifcomp", "fit", project.model, "slow:Slow", "--weights", "net.safetensors"]
    restore_sigint = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, preexec_fn=restore_sigint) as running:
        deadline = time.monotonic() + 60
        while not Path("started").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        stdout, stderr = running.communicate(timeout=60)
    assert (running.returncode, stdout) == (130, "")
    assert stderr.splitlines()[-1] == "Stopped. Files are either complete or unchanged."
    assert "Traceback" not in stderr
    assert not list(Path().glob("*run.ifcomp*"))


@pytest.mark.parametrize(
    ("name", "titles"), [("fit", ("pass 1 of 2", "pass 2 of 2")), ("audit", ("statistics of the data", "features of the data"))]
)
def test_progress_shows_the_remaining_time(project: Project, name: str, titles: tuple[str, ...]) -> None:
    Path("slow.py").write_text(SLOW)
    forms = {"fit": [project.model, "slow:Slow"], "audit": ["--model", project.model, "--data", "slow:Labelled"]}
    command = [sys.executable, "-m", "ifcomp", name, *forms[name], "--weights", "net.safetensors"]
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=follower, env=environment) as running:
        os.close(follower)
        seen = b""
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:  # the process has exited
                break
            seen += part
        running.wait(timeout=60)
    os.close(leader)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert running.returncode == (3 if name == "audit" else 0), text  # the labels of slow:Labelled are not digits
    for title in titles:
        assert re.search(rf"{title}[^\r\n]* left 0:00:0[1-9]", text), text
