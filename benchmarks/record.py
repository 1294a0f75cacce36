"""Raw results as JSON: one file per suite, one entry per subject, number of threads and processor."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.suite import Measured, Times
from ifcomp.io.files import atomic_write

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Run:
    """Measurements of one subject, with number of threads and environment."""

    subject: str
    threads: int
    environment: dict[str, Any]
    measured: Measured

    @property
    def processor(self) -> str:
        """Name of the processor. Results of different processors are not comparable."""
        return str(self.environment["cpu"])


def read(suite: str, folder: Path) -> list[Run]:
    """Read the runs of a suite; empty if there is no file."""
    path = folder / f"{suite}.json"
    if not path.exists():
        return []
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return [Run(**(run | {"measured": _measured(**run["measured"])})) for run in runs]


def write(suite: str, runs: Iterable[Run], folder: Path) -> None:
    """Add runs to the file of a suite. They replace runs of the same subject, threads and processor."""
    kept = {(run.subject, run.threads, run.processor): run for run in [*read(suite, folder), *runs]}
    folder.mkdir(parents=True, exist_ok=True)
    content = {"suite": suite, "runs": [asdict(run) for run in kept.values()]}
    with atomic_write(folder / f"{suite}.json") as scratch:
        scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _measured(times: dict[str, Any], numbers: dict[str, float]) -> Measured:
    return Measured({name: Times(**fields) for name, fields in times.items()}, numbers)
