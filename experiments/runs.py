"""The folder of one training: its identity and its files.

``state.safetensors`` has everything to resume: weights, momentum and the log of all epochs. The other files are
``epoch-0020.safetensors`` and ``best.safetensors`` with weights, and ``log.json``. An interruption costs at most the
current epoch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.datasets import Normalisation
from experiments.models import build
from experiments.recipes import Recipe
from ifcomp.errors import SettingError, StorageError
from ifcomp.io.files import atomic_write
from ifcomp.io.untrusted import parse_json, read_safetensors

CACHE_VARIABLE = "IFCOMP_CACHE"
SCHEMA = 1
_KEY = "ifcomp-training"


@dataclass(frozen=True)
class Identity:
    """Everything that the result of a training depends on, except the software and the number of threads.

    Attributes:
        model: Name in `experiments.models.MODELS`.
        classes: Number of classes.
        data: Name of the training data, with its noise.
        digest: Digest of the training data.
        validation: Digest of the validation data, or None.
        normalisation: Normalisation of the inputs.
        recipe: Training recipe.
        seed: Seed of the initial weights, order, augmentation and dropout.
    """

    model: str
    classes: int
    data: str
    digest: str
    validation: str | None
    normalisation: Normalisation
    recipe: Recipe
    seed: int

    @property
    def folder_name(self) -> str:
        """Readable name with a hash of all attributes."""
        content = json.dumps({"schema": SCHEMA, **asdict(self)}, sort_keys=True)
        return f"{self.model}_{self.data}_seed{self.seed}_{hashlib.sha256(content.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Epoch:
    """Log of one epoch.

    Attributes:
        epoch: Index, counted from 1.
        learning_rate: Mean learning rate over the steps.
        loss: Mean cross-entropy in nats over the steps, in training mode.
        accuracy: Mean accuracy over the steps, in training mode.
        validation_loss: Cross-entropy in nats after the epoch, in eval mode; None without validation data.
        validation_accuracy: Accuracy after the epoch, in eval mode; None without validation data.
        seconds: Duration of the epoch.
    """

    epoch: int
    learning_rate: float
    loss: float
    accuracy: float
    validation_loss: float | None
    validation_accuracy: float | None
    seconds: float


@dataclass(frozen=True)
class Checkpoint:
    """Stored weights: a safetensors file for ``load_state_dict``."""

    epoch: int
    learning_rate: float
    path: Path


@dataclass(frozen=True)
class Trained:
    """A finished or interrupted training."""

    identity: Identity
    folder: Path
    epochs: tuple[Epoch, ...]

    @property
    def best_epoch(self) -> int:
        """First epoch with the highest validation accuracy."""
        return best_epoch(self.epochs)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Stored weights in order, as used by TracIn."""
        kept = (row for row in self.epochs if self.identity.recipe.keeps(row.epoch))
        return tuple(Checkpoint(row.epoch, row.learning_rate, epoch_file(self.folder, row.epoch)) for row in kept)

    @property
    def tail(self) -> tuple[Checkpoint, ...]:
        """Stored weights of the epochs at constant rate, as used by SWA and SWAG."""
        return tuple(kept for kept in self.checkpoints if kept.epoch > self.identity.recipe.epochs)

    def model(self, which: int | Literal["last", "best"] = "last") -> nn.Module:
        """Return the network in eval mode after the last epoch, the best epoch, or an epoch with stored weights."""
        if which == "last":
            weights, _ = split_state(_read(self.folder / "state.safetensors")[0])
        elif which == "best":
            best_epoch(self.epochs)
            weights = _read(self.folder / "best.safetensors")[0]
        elif which in (kept.epoch for kept in self.checkpoints):
            weights = _read(epoch_file(self.folder, which))[0]
        else:
            kept = ", ".join(str(checkpoint.epoch) for checkpoint in self.checkpoints)
            raise SettingError(f"Weights after epoch {which} are not stored. Choose 'last', 'best', or one of {kept}.")
        model = build(self.identity.model, self.identity.classes)
        model.load_state_dict(weights)
        return model.eval()


def cache_folder() -> Path:
    """Return the folder of all trainings: IFCOMP_CACHE, or a folder in the user's cache."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "ifcomp" / "experiments")


def best_epoch(epochs: Sequence[Epoch]) -> int:
    """Return the first epoch with the highest validation accuracy."""
    known = [row for row in epochs if row.validation_accuracy is not None]
    if not known:
        raise SettingError("There is no best epoch: the training had no validation data. Give `validation` to `train`.")
    return max(known, key=lambda row: (row.validation_accuracy or 0.0, -row.epoch)).epoch


def epoch_file(folder: Path, epoch: int) -> Path:
    """Return the path of the weights after an epoch."""
    return folder / f"epoch-{epoch:04d}.safetensors"


def write(
    folder: Path, identity: Identity, model: nn.Module, momentum: Mapping[str, Tensor], rows: Sequence[Epoch]
) -> None:
    """Write all files after an epoch. The state follows the weights, because it marks the epoch as complete."""
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    epoch = rows[-1].epoch
    if identity.recipe.keeps(epoch):
        _save(epoch_file(folder, epoch), weights, {})
    if identity.validation is not None and best_epoch(rows) == epoch:
        _save(folder / "best.safetensors", weights, {})
    log = {"identity": asdict(identity), "epochs": [asdict(row) for row in rows]}
    state = {f"model/{name}": value for name, value in weights.items()}
    state |= {f"momentum/{name}": value.contiguous() for name, value in momentum.items()}
    _save(folder / "state.safetensors", state, log)
    environment = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    with atomic_write(folder / "log.json") as scratch:
        scratch.write_text(json.dumps({**log, "environment": environment}, indent=1))


def read(folder: Path) -> tuple[dict[str, Tensor], list[Epoch]] | None:
    """Return the tensors of the state and the log, or None without a state."""
    path = folder / "state.safetensors"
    if not path.exists():
        return None
    tensors, log = _read(path)
    return tensors, [Epoch(**row) for row in log["epochs"]]


def split_state(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split the tensors of a state into weights and momentum."""
    parts = (
        {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        for prefix in ("model/", "momentum/")
    )
    weights, momentum = parts
    return weights, momentum


def _save(path: Path, tensors: dict[str, Tensor], log: Mapping[str, Any]) -> None:
    with atomic_write(path) as scratch:
        save_file(tensors, scratch, metadata={_KEY: json.dumps(log)})


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        tensors, metadata = read_safetensors(path)
        log: dict[str, Any] = parse_json(metadata[_KEY])
        return tensors, log
    except (OSError, KeyError, ValueError) as error:
        raise StorageError(
            f"Cannot read '{path}': it is missing, damaged or not a file of a training ({error}). Delete the folder to "
            "train again."
        ) from error
