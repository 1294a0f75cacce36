"""File format of checkpoints: tensors and JSON metadata in one safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ifcomp.errors import CheckpointError, StorageError
from ifcomp.io.files import atomic_write
from ifcomp.io.untrusted import parse_json, read_safetensors

SCHEMA = 4
_METADATA_KEY = "ifcomp-checkpoint"


@dataclass(frozen=True, eq=False)
class SavedState:
    """State of unfinished work.

    Attributes:
        stage: Name of the current stage.
        position: Number of examples that the stage has processed.
        digest: Digest of these examples.
        settings: Choices made during the work, as plain JSON.
        shared: Tensors that are equal on all processes and constant during the stage.
        local: Tensors of this process.
    """

    stage: str
    position: int = 0
    digest: str = ""
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
        "digest": state.digest,
        "settings": state.settings,
    }
    text = json.dumps(metadata)
    if json.loads(text)["settings"] != state.settings:
        raise TypeError(f"The settings of a checkpoint must be plain JSON, but are {state.settings!r}.")
    tensors = {
        f"{group}/{name}": value.detach().cpu().contiguous()
        for group, values in (("shared", state.shared), ("local", state.local))
        for name, value in values.items()
    }
    try:
        with atomic_write(path, on_every_rank=True) as scratch:
            try:
                save_file(tensors, scratch, metadata={_METADATA_KEY: text})
            except SafetensorError as error:
                raise OSError(str(error)) from error
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
        mapped, metadata = read_safetensors(path)
        tensors = {name: value.clone() for name, value in mapped.items()}
        content = parse_json(metadata[_METADATA_KEY])
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
            content["digest"],
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
    if not (valid_position and isinstance(state.digest, str) and isinstance(state.settings, dict)):
        raise TypeError("an entry has the wrong type")


def _check_key(path: Path, saved: Mapping[str, Any], key: Mapping[str, Any]) -> None:
    different = [name for name in {**saved, **key} if saved.get(name) != key.get(name)]
    if different:
        lines = [f"  {name}: {saved.get(name)} there, {key.get(name)} here" for name in different]
        raise CheckpointError(
            f"'{path}' is the checkpoint of other unfinished work:\n" + "\n".join(lines) + "\nRepeat the earlier "
            "command or call to resume it, delete the file to start again, or write to another file."
        )


def _group(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
