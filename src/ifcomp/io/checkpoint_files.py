"""File format of checkpoints: tensors and JSON metadata in one safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ifcomp.errors import CheckpointError, StorageError
from ifcomp.io.tensor_files import read_tensors, write_tensors

SCHEMA = 5
_ENTRY = "ifcomp-checkpoint"


@dataclass(frozen=True, eq=False)
class SavedState:
    """State of unfinished work.

    Attributes:
        stage: Name of the current stage.
        position: Number of examples that the stage has processed.
        digests: Digests of the first batch, of the examples processed, and of all data once a stage has read it.
        settings: Choices made during the work, as plain JSON.
        shared: Tensors that are equal on all processes and constant during the stage.
        local: Tensors of this process.
    """

    stage: str
    position: int = 0
    digests: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    local: Mapping[str, Tensor] = field(default_factory=dict)


def write_checkpoint(path: Path, key: Mapping[str, Any], state: SavedState) -> None:
    """Write a checkpoint, atomically.

    Args:
        path: The file.
        key: Everything that the result depends on besides the data, as plain JSON.
        state: The state to save.

    Raises:
        CheckpointError: If the file cannot be written.
        TypeError: If ``state.settings`` is not plain JSON.
    """
    metadata = {
        "schema": SCHEMA,
        "key": key,
        "stage": state.stage,
        "position": state.position,
        "digests": dict(state.digests),
        "settings": state.settings,
    }
    if json.loads(json.dumps(state.settings)) != state.settings:
        raise TypeError(f"The settings of a checkpoint must be plain JSON, but are {state.settings!r}.")
    tensors = {
        f"{group}/{name}": value
        for group, values in (("shared", state.shared), ("local", state.local))
        for name, value in values.items()
    }
    try:
        write_tensors(path, tensors, _ENTRY, metadata, on_every_rank=True)
    except StorageError as error:
        raise CheckpointError(f"{error} Free disk space, then repeat the same command or call to resume.") from error


def read_checkpoint(path: Path, key: Mapping[str, Any]) -> SavedState | None:
    """Read a checkpoint. Return None if the file does not exist.

    Args:
        path: The file.
        key: Everything that the result depends on besides the data, as plain JSON.

    Raises:
        CheckpointError: If the file is damaged, or its key differs; lists the differences.
    """
    if not os.path.lexists(path):
        return None
    try:
        mapped, content = read_tensors(path, _ENTRY)
        tensors = {name: value.clone() for name, value in mapped.items()}
        if content["schema"] != SCHEMA:
            raise CheckpointError(
                f"Cannot resume from '{path}': it has schema {content['schema']}, this version reads {SCHEMA}. Finish "
                "with the library version that wrote it, or delete it to start again."
            )
        saved_key = content["key"]
        if content["stage"] not in saved_key["stages"]:
            raise ValueError(f"its stage is {content['stage']!r}")
        state = SavedState(
            content["stage"],
            content["position"],
            content["digests"],
            content["settings"],
            _group(tensors, "shared/"),
            _group(tensors, "local/"),
        )
        _check_types(state)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"Cannot resume from '{path}': it is damaged, or not a checkpoint ({error!r}). Delete it to start again."
        ) from error
    _check_key(path, saved_key, key)
    return state


def _check_types(state: SavedState) -> None:
    valid_position = isinstance(state.position, int) and 0 <= state.position < 2**63
    if not (valid_position and isinstance(state.digests, dict) and isinstance(state.settings, dict)):
        raise TypeError("an entry has the wrong type")


def _check_key(path: Path, saved: Mapping[str, Any], key: Mapping[str, Any]) -> None:
    different = [name for name in {**saved, **key} if saved.get(name) != key.get(name)]
    if different:
        lines = [
            f"  {_printable(name)}: {_printable(saved.get(name))} there, {key.get(name)} here" for name in different
        ]
        raise CheckpointError(
            f"'{path}' is the checkpoint of other unfinished work:\n" + "\n".join(lines) + "\nRepeat the earlier "
            "command or call to resume it, delete the file to start again, or write to another file."
        )


def _printable(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() else repr(text)


def _group(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
