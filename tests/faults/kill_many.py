"""Kill real ``ifcomp`` processes at random moments, run them again, and compare every byte of what they write.

``python tests/faults/kill_many.py`` prints one JSON object; it ends with 1 if a byte differs or a file is left over.
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

import pandas  # noqa: F401  (before there are processes, each of which needs it)
import sklearn.datasets  # noqa: F401
import torch
from safetensors import SafetensorError, safe_open

from ifcomp.cli.main import app

#: Kills in a row before a process may end.
MOST_IN_A_ROW = 4

#: Seconds after which a process is taken to hang.
PATIENCE = 600

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
    "fit": (FIT, ["run.ifcomp", "run.ifcomp.json"]),
    "score": (["score", "run.ifcomp", "--checkpoint-every", "0.1"], ["scores.parquet"]),
    "audit": (["audit", "run.ifcomp", "--checkpoint-every", "0.1"], ["audit.csv"]),
    "reproduce": (["reproduce", "pruning", "--out", "results"], ["results/pruning/digits/result.json"]),
}


@dataclass
class Tally:
    """What happened.

    Attributes:
        kills: Processes that were killed.
        episodes: Times that the result was compared after kills.
        identical: Times that it was the same.
        stages: What the last checkpoint was of when a process was killed.
        while_writing: Kills that left a file half written.
        left_over: Files that were there in the end and should not be.
    """

    kills: int = 0
    episodes: int = 0
    identical: int = 0
    stages: dict[str, int] = field(default_factory=dict)
    while_writing: int = 0
    left_over: list[str] = field(default_factory=list)


def torture(command: str, kills: int, seed: int, folder: Path) -> Tally:
    """Kill one command again and again.

    Args:
        command: Of `COMMANDS`.
        kills: How often.
        seed: Of the moments.
        folder: To work in, empty.
    """
    moments, tally = random.Random(f"{command} {seed}"), Tally()
    (folder / "net.py").write_text(MODULE)
    if command in ("score", "audit"):
        Process(FIT, folder).end()
    kept = _names(folder)
    arguments, outputs = COMMANDS[command]
    process = Process(arguments, folder)
    began = process.wait_for_work(folder)
    process.end()
    duration = time.monotonic() - began
    expected = [content(folder / name) for name in outputs]
    while tally.kills < kills:
        _clean(folder, kept)
        for _ in range(moments.randint(1, min(MOST_IN_A_ROW, kills - tally.kills))):
            process = Process(arguments, folder)
            process.wait_for_work(folder)
            time.sleep(moments.uniform(0, duration))
            if process.ended():
                break  # it was quicker this time: its result is as good as any
            process.kill()
            tally.kills += 1
            stage = _stage(folder)
            tally.stages[stage] = tally.stages.get(stage, 0) + 1
            tally.while_writing += any(_scratch(folder))
        Process(arguments, folder).end()
        tally.episodes += 1
        tally.identical += [content(folder / name) for name in outputs] == expected
        made = kept | {"started", *(name.split("/")[0] for name in outputs)}
        tally.left_over += sorted(_names(folder) - made)
    return tally


def content(path: Path) -> object:
    """The bytes of a file; of a study without dates and seconds, and with the runs that made it left out."""
    if path.name != "result.json":
        return path.read_bytes()
    found = json.loads(path.read_text())
    return {name: found[name] for name in ("study", "preset", "settings", "results")}


class Process:
    """A command in a process of its own: forked, so that kills do not mostly hit the import of torch."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        (folder / "started").unlink(missing_ok=True)
        self.said = folder.parent / "said.txt"
        self.code: int | None = None
        self.number = os.fork()
        if self.number == 0:
            self._run(arguments, folder)

    def _run(self, arguments: list[str], folder: Path) -> None:
        code = 1
        try:
            handle = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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
        """Whether it has ended."""
        if self.code is None:
            number, status = os.waitpid(self.number, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if number else None
        return self.code is not None

    def wait_for_work(self, folder: Path) -> float:
        """When the data was first asked for; a study tells nobody, and is killed at any moment."""
        while not self.ended() and not ((folder / "started").exists() or (folder / "cache").exists()):
            time.sleep(0.002)
        return time.monotonic()

    def kill(self) -> None:
        """End it now."""
        os.kill(self.number, signal.SIGKILL)
        os.waitpid(self.number, 0)

    def end(self) -> None:
        """Wait for its end, which must be a good one."""
        deadline = time.monotonic() + PATIENCE
        while not self.ended():
            time.sleep(0.01)
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError("The process hangs.")
        if self.code:
            raise RuntimeError(f"The process ended with {self.code}:\n{self.said.read_text()}")


def _stage(folder: Path) -> str:
    for path in folder.glob("*.partial"):
        try:
            with safe_open(path, framework="np") as file:
                return str(json.loads(file.metadata()["ifcomp-checkpoint"])["stage"])
        except (SafetensorError, OSError) as error:
            raise RuntimeError(f"{path} is not whole") from error
    return "no checkpoint yet"


def _scratch(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob(".*.????????") if path.is_dir())


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name not in ("__pycache__", "cache")}


def _clean(folder: Path, kept: set[str]) -> None:
    for name in {*_names(folder), "cache"} - kept:
        path = folder / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def main(say: Callable[[str], object] = sys.stdout.write) -> int:
    """Torture the commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=25, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default="fit,score,audit", help=f"of {', '.join(COMMANDS)}")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    tallies = {}
    for command in chosen.commands.split(","):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "place"
            place.mkdir()
            tallies[command] = torture(command, chosen.kills, chosen.seed, place)
    say(json.dumps({"seed": chosen.seed, **{name: asdict(tally) for name, tally in tallies.items()}}, indent=2) + "\n")
    return int(any(tally.identical < tally.episodes or tally.left_over for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
