"""The command as a process of its own: quick help, clean streams, time left, an interruption, a whole workflow."""

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

import pandas as pd
import pytest
from workshop import Workshop

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
"""


def process(*arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ifcomp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["fit", "--help"], ["audit", "--help"]])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    lines = [
        "import sys",
        "from ifcomp.cli.main import app",
        f"try: app({arguments!r})",
        "except SystemExit as done: assert not done.code",
        "print(sorted({'torch', 'numpy', 'pandas', 'sklearn', 'matplotlib'} & set(sys.modules)))",
    ]
    found = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_from_a_trained_model_to_suspects_in_two_lines(workshop: Workshop) -> None:
    found = process(*workshop.fit_arguments(), "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["examples"] == 200
    assert found.stderr == "the user's own words\n"
    found = process("audit", "run.ifcomp", "--fraction", "0.05", "--max-suspects", "5")
    assert found.returncode == 3, found.stderr
    assert "10 of 200 labels" in found.stdout
    assert pd.read_csv("audit.csv")["is_suspect"].sum() == 10


def test_bad_input_is_a_message_and_2(workshop: Workshop) -> None:
    found = process("fit", workshop.model, "npz:gone.npz")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "Error: There is no file 'gone.npz'.\n"


def test_an_interruption_is_one_line(workshop: Workshop) -> None:
    Path("slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "ifcomp", "fit", workshop.model, "slow:Slow", "--weights", "net.safetensors"]
    heard = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, preexec_fn=heard) as running:
        deadline = time.monotonic() + 60
        while not Path("started").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        stdout, stderr = running.communicate(timeout=60)
    assert (running.returncode, stdout) == (130, "")
    assert stderr.splitlines()[-1] == "Stopped. Files are either complete or as they were before."
    assert "Traceback" not in stderr
    assert not list(Path().glob("*run.ifcomp*"))


def test_terminals_see_the_time_left(workshop: Workshop) -> None:
    Path("slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "ifcomp", "fit", workshop.model, "slow:Slow", "--weights", "net.safetensors"]
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=follower, env=environment) as running:
        os.close(follower)
        seen = b""
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:  # the other end is closed
                break
            seen += part
        running.wait(timeout=60)
    os.close(leader)
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert running.returncode == 0, words
    for title in ("pass 1 of 2", "pass 2 of 2"):
        assert re.search(rf"{title}[^\r\n]* left 0:00:0[1-9]", words), words
