"""Resumable training of a network by a recipe. The result is cached.

Order, augmentation and dropout of an epoch depend only on the seed and the index of the epoch. A training resumes from
weights and momentum after its last complete epoch, and ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments import runs
from experiments.datasets import Batches, Dataset, Normalisation
from experiments.models import build
from experiments.recipes import Recipe
from experiments.runs import Epoch, Identity, Trained
from ifcomp.errors import EmptyDataError, LabelError, NonFiniteError
from ifcomp.progress import track


def train(
    model: str,
    data: Dataset,
    recipe: Recipe,
    *,
    normalisation: Normalisation,
    seed: int,
    validation: Dataset | None = None,
    folder: Path | None = None,
    until: int | None = None,
    progress: bool | None = None,
) -> Trained:
    """Train a network, resume its training, or return the cached result.

    Args:
        model: Name in `experiments.models.MODELS`.
        data: Training data with labels.
        recipe: Training recipe.
        normalisation: Normalisation of the inputs.
        seed: Seed of the initial weights, order, augmentation and dropout.
        validation: Validation data for the best epoch and early stopping.
        folder: Parent folder of all trainings; None is `runs.cache_folder`.
        until: Stop after this epoch; a later call resumes.
        progress: Show a progress bar; None shows it on terminals.
    """
    if data.labels is None:
        raise LabelError(f"'{data.name}' has no labels to train on.")
    if len(data) == 0:
        raise EmptyDataError(f"'{data.name}' has no examples to train on.")
    digest = validation.digest() if validation else None
    identity = Identity(model, len(data.class_names), data.name, data.digest(), digest, normalisation, recipe, seed)
    run = (folder or runs.cache_folder()) / identity.folder_name
    run.mkdir(parents=True, exist_ok=True)
    last = recipe.total_epochs if until is None else min(until, recipe.total_epochs)
    with torch.random.fork_rng(devices=[]):
        session = _start(identity, run)
        while len(session.rows) < last and not is_over(session.rows, recipe):
            session.rows.append(_epoch(session, data, validation, progress))
            runs.write(run, identity, session.model, session.momentum(), session.rows)
    return Trained(identity, run, tuple(session.rows))


def evaluate(model: nn.Module, batches: Batches) -> tuple[float, float]:
    """Return the mean cross-entropy in nats and the accuracy of a model in eval mode."""
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for x, y in batches:
            logits = model(x)
            loss += float(F.cross_entropy(logits, y, reduction="sum"))
            correct += int((logits.argmax(1) == y).sum())
    return loss / len(batches.data), correct / len(batches.data)


def shift_and_mirror(images: Tensor, generator: torch.Generator, reach: int = 4) -> Tensor:
    """Shift images [B, H, W] or [B, H, W, C] by up to ``reach`` pixels with black padding, and mirror half of them."""
    count, height, width = images.shape[:3]
    padded = images.new_zeros((count, height + 2 * reach, width + 2 * reach, *images.shape[3:]))
    padded[:, reach : reach + height, reach : reach + width] = images
    offsets = torch.randint(0, 2 * reach + 1, (2, count, 1), generator=generator)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    rows = offsets[0] + torch.arange(height)
    columns = offsets[1] + torch.where(mirrored, torch.arange(width - 1, -1, -1), torch.arange(width))
    return padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


@dataclass(frozen=True)
class _Session:
    """State of a training."""

    identity: Identity
    model: nn.Module
    optimizer: torch.optim.SGD
    rows: list[Epoch]

    def momentum(self) -> dict[str, Tensor]:
        """Return the momentum buffers by parameter name."""
        state = self.optimizer.state
        return {name: state[value]["momentum_buffer"] for name, value in self.model.named_parameters()}


def _start(identity: Identity, run: Path) -> _Session:
    """Return the state after the last epoch in the folder, or a new network."""
    recipe = identity.recipe
    torch.manual_seed(_epoch_seed(identity.seed, 0))
    model = build(identity.model, identity.classes)
    if recipe.autocast:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), recipe.rate, recipe.momentum, weight_decay=recipe.weight_decay, nesterov=True
    )
    state = runs.read(run)
    if state is None:
        return _Session(identity, model, optimizer, [])
    weights, momentum = runs.split_state(state[0])
    model.load_state_dict(weights)
    for name, value in model.named_parameters():
        optimizer.state[value]["momentum_buffer"] = momentum[name]
    return _Session(identity, model, optimizer, state[1])


def _epoch(session: _Session, data: Dataset, validation: Dataset | None, progress: bool | None) -> Epoch:
    """Train for one epoch and evaluate on the validation data."""
    start, epoch, identity = time.perf_counter(), len(session.rows) + 1, session.identity
    title = f"{identity.model} on {data.name}, epoch {epoch} of {identity.recipe.total_epochs}"
    rate, loss, accuracy = _steps(session, data, epoch, lambda parts: track(parts, title, progress))
    if not np.isfinite(loss):
        raise NonFiniteError(
            f"The loss became {loss} in epoch {epoch}. Give a recipe with a rate below {identity.recipe.rate}."
        )
    validation_loss, validation_accuracy = None, None
    if validation:
        validation_loss, validation_accuracy = evaluate(session.model, Batches(validation, identity.normalisation))
    return Epoch(epoch, rate, loss, accuracy, validation_loss, validation_accuracy, time.perf_counter() - start)


def _steps(
    session: _Session, data: Dataset, epoch: int, tracked: Callable[[Sequence[Tensor]], Iterable[Tensor]]
) -> tuple[float, float, float]:
    """Run the steps of an epoch and return their mean learning rate, loss and accuracy."""
    assert data.labels is not None
    recipe, normalisation = session.identity.recipe, session.identity.normalisation
    seed = _epoch_seed(session.identity.seed, epoch)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randperm(len(data), generator=generator).split(recipe.batch_size)
    session.model.train()
    rates, loss, correct = 0.0, 0.0, 0
    for step, part in enumerate(tracked(parts), (epoch - 1) * len(parts)):
        images, y = data.images[part], data.labels[part]
        x = normalisation(shift_and_mirror(images, generator) if recipe.augment else images)
        rate = recipe.learning_rate(step, len(parts))
        logits, mean = _step(session, x, y, rate)
        rates, loss = rates + rate, loss + len(y) * float(mean)
        correct += int((logits.argmax(1) == y).sum())
    return rates / len(parts), loss / len(data), correct / len(data)


def _step(session: _Session, x: Tensor, y: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    session.optimizer.param_groups[0]["lr"] = rate
    session.optimizer.zero_grad()
    autocast = session.identity.recipe.autocast
    if autocast:
        x = x.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = session.model(x).float()
        loss = F.cross_entropy(logits, y)
    loss.backward()
    session.optimizer.step()
    return logits.detach(), loss.detach()


def is_over(rows: Sequence[Epoch], recipe: Recipe) -> bool:
    """Return whether all epochs are done, or early stopping has ended the training."""
    if len(rows) == recipe.total_epochs:
        return True
    if recipe.patience is None or not rows:
        return False
    return rows[-1].epoch - runs.best_epoch(rows) >= recipe.patience


def _epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch; epoch 0 is that of the initial weights."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(1))
