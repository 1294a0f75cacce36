"""Result files, written after every step and resumed by the next run."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from experiments.datasets import MissingDataError, load
from experiments.reproduce.study import Record, Study
from ifcomp.errors import SettingError, StorageError
from ifcomp.io.files import atomic_write
from ifcomp.io.untrusted import parse_json, read_text
from ifcomp.progress import track

SCHEMA = 1
FILE = "result.json"
_PACKAGES = ("ifcomp", "torch", "numpy", "scikit-learn", "scipy", "pytorch-ood", "cleanlab", "laplace-torch")


def run(
    study: Study,
    preset: str,
    folder: Path,
    *,
    expected: Mapping[str, float] = MappingProxyType({}),
    progress: bool | None = None,
) -> Record:
    """Run the steps that are missing in the result file, and write the file after each step.

    Args:
        study: Study to run.
        preset: Name of the settings.
        folder: Folder of the result file.
        expected: Seconds of steps, which are printed before each step.
        progress: Show a progress bar; None shows it on terminals.

    Raises:
        SettingError: If there is no such preset, or the file has other settings.
        MissingDataError: If data is missing; the message names all missing files.
    """
    check_preset(study, preset)
    settings = study.presets[preset]
    plain = json.loads(json.dumps(asdict(settings)))
    record = Record(study.name, preset, plain, {}, {}, [])
    if (folder / FILE).exists():
        record = read(folder)
        if not _agree(record.settings, settings):
            raise SettingError(f"'{folder / FILE}' has other settings of '{preset}'. Delete it, or give another --out.")
    pending = {name: step for name, step in study.steps(settings).items() if name not in record.results}
    if not pending:
        return record
    check_data(study.needs(settings))
    folder.mkdir(parents=True, exist_ok=True)
    runs = [*record.runs, _environment(study.name, preset)]
    for name, step in track(list(pending.items()), f"{study.name}, {preset}", progress):
        if name in expected:
            sys.stderr.write(f"{name}: about {duration(expected[name])} on one core\n")
        start, cpu_start = time.perf_counter(), time.process_time()
        result = json.loads(json.dumps(step(record.results), allow_nan=False))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        step_record = {"seconds": round(seconds, 1), "processor_seconds": round(cpu_seconds, 1), "run": len(runs) - 1}
        results, steps = {**record.results, name: result}, {**record.steps, name: step_record}
        record = Record(study.name, preset, plain, results, steps, runs)
        with atomic_write(folder / FILE) as scratch:
            scratch.write_text(_as_text({"schema": SCHEMA, **asdict(record)}))
    return record


def recorded_seconds(folder: Path) -> dict[str, float]:
    """Return the processor seconds of every step in a result file; empty without a file."""
    if not (folder / FILE).exists():
        return {}
    steps = read(folder).steps
    return {name: row.get("processor_seconds", row["seconds"]) for name, row in steps.items()}


def duration(seconds: float) -> str:
    """Format a duration."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def check_preset(study: Study, preset: str) -> None:
    """Raise SettingError unless the study has the preset."""
    if preset not in study.presets:
        raise SettingError(f"'{study.name}' has no preset '{preset}'. Choose one of {', '.join(study.presets)}.")


def read(folder: Path) -> Record:
    """Read a result file.

    Raises:
        StorageError: If the file is missing or invalid.
    """
    path = folder / FILE
    try:
        content = parse_json(read_text(path))
        if content.pop("schema") != SCHEMA:
            raise StorageError(f"'{path}' is of another version of the experiments. Delete it and run again.")
        return Record(**content)
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise StorageError(f"Cannot read results from '{path}' ({error}). Run without --plot-only first.") from error


def unfinished(study: Study, record: Record) -> list[str]:
    """Return the missing steps."""
    settings = study.presets.get(record.preset)
    return [] if settings is None else [name for name in study.steps(settings) if name not in record.results]


def check_data(needed: Any) -> None:
    """Raise one MissingDataError that names all missing data."""
    missing = []
    for name, split in dict.fromkeys(needed):
        try:
            load(name, split)
        except MissingDataError as error:
            missing.append(str(error))
    if missing:
        raise MissingDataError("\n".join(missing))


def _agree(stored: Any, settings: Any) -> bool:
    """Return whether stored settings agree. Fields that the stored settings lack must have their default."""
    if not is_dataclass(settings):
        return bool(stored == json.loads(json.dumps(settings)))
    current = {field.name: (getattr(settings, field.name), field.default) for field in fields(settings)}
    return (
        isinstance(stored, dict)
        and stored.keys() <= current.keys()
        and all(
            _agree(stored[key], value) if key in stored else value == default
            for key, (value, default) in current.items()
        )
    )


def _as_text(content: Any) -> str:
    """Return indented JSON with flat lists on one line."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text) + "\n"


def _environment(study: str, preset: str) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"ifcomp reproduce {study} --preset {preset}",
        "versions": {name: version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        "hardware": {"processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
    }


def _processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
