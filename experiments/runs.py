"""The folder of one training: its identity, its files, and what can be had from them.

``state.safetensors`` is all that is needed to go on: weights, momentum and the log of every epoch so far. The other
files (``epoch-0020.safetensors``, ``best.safetensors``: plain weights; ``log.json``) can be made from the same epochs
again, so a kill at any moment costs at most the epoch it falls in.
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
    """All that the result of a training depends on, besides the software and the number of threads.

    Attributes:
        model: Name in `experiments.models.MODELS`.
        classes: Number of classes.
        data: Name of the training data, with its noise.
        digest: Of the training data.
        validation: Digest of the validation data, if there is any.
        normalisation: Of the inputs.
        recipe: How it is trained.
        seed: Of initial weights, order, augmentation and dropout.
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
        """Readable, and unique by a hash of everything."""
        content = json.dumps({"schema": SCHEMA, **asdict(self)}, sort_keys=True)
        return f"{self.model}_{self.data}_seed{self.seed}_{hashlib.sha256(content.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Epoch:
    """One line of the log.

    Attributes:
        epoch: Counted from 1.
        learning_rate: Mean over the steps.
        loss: Mean cross-entropy in nats over the epoch's steps, in training mode.
        accuracy: Likewise.
        validation_loss: After the epoch, in eval mode; None without validation data.
        validation_accuracy: Likewise.
        seconds: Time that the epoch took.
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
    """Weights that were kept: a safetensors file for ``load_state_dict``."""

    epoch: int
    learning_rate: float
    path: Path


@dataclass(frozen=True)
class Trained:
    """A training, finished or stopped on the way."""

    identity: Identity
    folder: Path
    epochs: tuple[Epoch, ...]

    @property
    def best_epoch(self) -> int:
        """The first epoch with the highest validation accuracy."""
        return best_epoch(self.epochs)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Weights kept on the way, in order; what TracIn sums over."""
        kept = (row for row in self.epochs if self.identity.recipe.keeps(row.epoch))
        return tuple(Checkpoint(row.epoch, row.learning_rate, epoch_file(self.folder, row.epoch)) for row in kept)

    @property
    def tail(self) -> tuple[Checkpoint, ...]:
        """Weights after each epoch at the constant rate; what SWA and SWAG collect."""
        return tuple(kept for kept in self.checkpoints if kept.epoch > self.identity.recipe.epochs)

    def model(self, which: int | Literal["last", "best"] = "last") -> nn.Module:
        """The network in eval mode after the last epoch, the best on validation data, or an epoch that was kept."""
        if which == "last":
            weights, _ = split_state(_read(self.folder / "state.safetensors")[0])
        elif which == "best":
            best_epoch(self.epochs)
            weights = _read(self.folder / "best.safetensors")[0]
        elif which in (kept.epoch for kept in self.checkpoints):
            weights = _read(epoch_file(self.folder, which))[0]
        else:
            kept = ", ".join(str(checkpoint.epoch) for checkpoint in self.checkpoints)
            raise SettingError(f"Weights after epoch {which} were not kept. Choose 'last', 'best', or one of {kept}.")
        model = build(self.identity.model, self.identity.classes)
        model.load_state_dict(weights)
        return model.eval()


def cache_folder() -> Path:
    """Where trainings are kept: IFCOMP_CACHE, or a folder in the user's cache."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "ifcomp" / "experiments")


def best_epoch(epochs: Sequence[Epoch]) -> int:
    """The first epoch with the highest validation accuracy."""
    known = [row for row in epochs if row.validation_accuracy is not None]
    if not known:
        raise SettingError("There is no best epoch: the training had no validation data. Give `validation` to `train`.")
    return max(known, key=lambda row: (row.validation_accuracy or 0.0, -row.epoch)).epoch


def epoch_file(folder: Path, epoch: int) -> Path:
    """The weights after an epoch."""
    return folder / f"epoch-{epoch:04d}.safetensors"


def write(
    folder: Path, identity: Identity, model: nn.Module, momentum: Mapping[str, Tensor], rows: Sequence[Epoch]
) -> None:
    """Write all files after an epoch; the state last but for the log, because it says that the epoch is done."""
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    epoch = rows[-1].epoch
    if identity.recipe.keeps(epoch):
        _save(epoch_file(folder, epoch), weights, {})
    if identity.validation is not None and best_epoch(rows) == epoch:
        _save(folder / "best.safetensors", weights, {})
    log = {"identity": asdict(identity), "epochs": [asdict(row) for row in rows]}
    state = {f"model/{name}": value for name, value in weights.items()}
    state |= {f"momentum/{name}": value for name, value in momentum.items()}
    _save(folder / "state.safetensors", state, log)
    environment = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    with atomic_write(folder / "log.json") as scratch:
        scratch.write_text(json.dumps({**log, "environment": environment}, indent=1))


def read(folder: Path) -> tuple[dict[str, Tensor], list[Epoch]] | None:
    """Tensors of the state and the log so far, or None if nothing is done yet."""
    path = folder / "state.safetensors"
    if not path.exists():
        return None
    tensors, log = _read(path)
    return tensors, [Epoch(**row) for row in log["epochs"]]


def split_state(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and momentum of a state."""
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
