"""Kill ``ifcomp`` processes at random times, run them again, and compare every byte of their output.

``python tests/faults/kill_many.py`` prints one JSON object. It exits with 1 if a byte differs or a file is left over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas  # noqa: F401  (imported before the fork, for all processes)
import sklearn.datasets  # noqa: F401
import torch
from safetensors import SafetensorError, safe_open

from ifcomp.cli.main import app
from ifcomp.cli.output import GATE

#: Largest number of kills before a process may finish.
MAX_CONSECUTIVE_KILLS = 4

#: Seconds after which a process counts as hanging.
TIMEOUT = 600

MODULE = """
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn


def build():
    torch.manual_seed(0)
    wide = [nn.Linear(64, 600), nn.LayerNorm(600), nn.ReLU(), nn.Linear(600, 10)]
    return nn.Sequential(nn.Flatten(), *wide)


class Digits:
    def __len__(self):
        return 16

    def __iter__(self):
        found = load_digits()
        x, y = torch.tensor(found.images / 16, dtype=torch.float32), torch.tensor(found.target)
        for batch in zip(x[:800].split(50), y[:800].split(50)):
            Path("started").touch()
            time.sleep(0.03)
            yield batch
"""

FIT = ["fit", "net:build", "net:Digits", "--checkpoint-every", "0.1"]
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "fit": (FIT, ["run.ifcomp"]),
    "score": (["score", "run.ifcomp", "--checkpoint-every", "0.1"], ["scores.csv"]),
    "audit": (["audit", "run.ifcomp", "--checkpoint-every", "0.1"], ["audit.csv"]),
    "reproduce": (["reproduce", "pruning", "--out", "results"], ["results/pruning/digits/result.json"]),
}


@dataclass
class Tally:
    """Counts of one command.

    Attributes:
        kills: Number of killed processes.
        episodes: Number of comparisons after kills.
        identical: Number of comparisons with identical bytes.
        stages: Number of kills by stage of the last checkpoint.
        while_writing: Number of kills that left a partially written file.
        left_over: Unexpected files after an episode.
    """

    kills: int = 0
    episodes: int = 0
    identical: int = 0
    stages: dict[str, int] = field(default_factory=dict)
    while_writing: int = 0
    left_over: list[str] = field(default_factory=list)


def kill_repeatedly(command: str, kills: int, seed: int, folder: Path) -> Tally:
    """Kill one command repeatedly and compare its final output.

    Args:
        command: Name in `COMMANDS`.
        kills: Number of kills.
        seed: Seed of the times of the kills.
        folder: Empty working folder.
    """
    moments, tally = random.Random(f"{command} {seed}"), Tally()
    (folder / "net.py").write_text(MODULE)
    if command in ("score", "audit"):
        Process(FIT, folder).end()
    kept = _names(folder)
    arguments, outputs = COMMANDS[command]
    process = Process(arguments, folder)
    start = process.wait_for_work(folder)
    process.end()
    duration = time.monotonic() - start
    expected = [content(folder / name) for name in outputs]
    while tally.kills < kills:
        _clean(folder, kept)
        for _ in range(moments.randint(1, min(MAX_CONSECUTIVE_KILLS, kills - tally.kills))):
            process = Process(arguments, folder)
            process.wait_for_work(folder)
            time.sleep(moments.uniform(0, duration))
            if process.ended():
                break  # it finished before the kill
            process.kill()
            tally.kills += 1
            stage = _stage(folder)
            tally.stages[stage] = tally.stages.get(stage, 0) + 1
            tally.while_writing += any(_scratch(folder))
        Process(arguments, folder).end()
        tally.episodes += 1
        tally.identical += [content(folder / name) for name in outputs] == expected
        allowed = kept | {"started", "run.ifcomp.cache", *(name.split("/")[0] for name in outputs)}
        tally.left_over += sorted(_names(folder) - allowed)
    return tally


def content(path: Path) -> object:
    """Return the bytes of a file; for a result of a study, its content without dates, durations and runs."""
    if path.name != "result.json":
        return path.read_bytes()
    record = json.loads(path.read_text())
    return {name: record[name] for name in ("study", "preset", "settings", "results")}


class Process:
    """A command in a forked process, so that kills do not mostly hit the import of torch."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        (folder / "started").unlink(missing_ok=True)
        self.log = folder.parent / "log.txt"
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(arguments, folder)

    def _run(self, arguments: list[str], folder: Path) -> None:
        code = 1
        try:
            handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            os.chdir(folder)
            os.environ |= {"XDG_CONFIG_HOME": str(folder.parent), "IFCOMP_CACHE": str(folder / "cache")}
            app(arguments, prog_name="ifcomp")
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            os._exit(code)

    def ended(self) -> bool:
        """Return whether the process has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None

    def wait_for_work(self, folder: Path) -> float:
        """Wait for the first batch (or the cache folder of a study), and return the time."""
        while not self.ended() and not ((folder / "started").exists() or (folder / "cache").exists()):
            time.sleep(0.002)
        return time.monotonic()

    def kill(self) -> None:
        """Kill the process."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def end(self) -> None:
        """Wait for the end of the process, and raise RuntimeError if it fails."""
        deadline = time.monotonic() + TIMEOUT
        while not self.ended():
            time.sleep(0.01)
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError("The process hangs.")
        if self.code not in (0, GATE):  # the accuracy of a network that was not trained is near chance
            raise RuntimeError(f"The process ended with {self.code}:\n{self.log.read_text()}")


def _stage(folder: Path) -> str:
    for path in folder.glob("*.partial"):
        try:
            with safe_open(path, framework="np") as file:
                return str(json.loads(file.metadata()["ifcomp-checkpoint"])["stage"])
        except (SafetensorError, OSError) as error:
            raise RuntimeError(f"{path} is not complete") from error
    return "no checkpoint yet"


def _scratch(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob(".*.????????") if path.is_dir())


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name not in ("__pycache__", "cache")}


def _clean(folder: Path, kept: set[str]) -> None:
    for name in {*_names(folder), "cache"} - kept:
        path = folder / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def main(write: Callable[[str], object] = sys.stdout.write) -> int:
    """Kill all commands repeatedly and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=25, help="number of kills per command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default="fit,score,audit", help=f"commands to kill, of {', '.join(COMMANDS)}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tallies = {}
    for command in arguments.commands.split(","):
        with tempfile.TemporaryDirectory() as folder:
            workdir = Path(folder) / "work"
            workdir.mkdir()
            tallies[command] = kill_repeatedly(command, arguments.kills, arguments.seed, workdir)
    counts = {name: asdict(tally) for name, tally in tallies.items()}
    write(json.dumps({"seed": arguments.seed, **counts}, indent=2) + "\n")
    return int(any(tally.identical < tally.episodes or tally.left_over for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
