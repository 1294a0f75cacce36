"""Training with Adam until the labels are memorised, or until the validation loss is smallest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.label_audit.cases import BATCH, FOLDS, Labelled, fold_indices, probabilities
from ifcomp.io.files import atomic_write


@dataclass(frozen=True)
class Plan:
    """Settings of a training.

    Attributes:
        epochs: Maximum number of epochs.
        target: Training accuracy at which the labels are memorised.
        rate: Learning rate of Adam; it falls linearly to 0 unless the training stops early.
        batch_size: Examples per step.
        patience: Epochs without a smaller validation loss before early stopping.
    """

    epochs: int
    target: float
    rate: float = 1e-3
    batch_size: int = 128
    patience: int = 10


def memorise(model: nn.Module, x: Tensor, y: Tensor, plan: Plan, seed: int, state: Path | None = None) -> int:
    """Train until the training accuracy in eval mode reaches the target. Return the number of epochs.

    Args:
        model: Network, trained in place.
        x: Inputs, [N, ...].
        y: Labels, [N].
        plan: Settings.
        seed: Seed of the order of examples.
        state: File from which the training resumes after an interruption.
    """
    optimizer = torch.optim.Adam(model.parameters(), plan.rate)
    start = _read(state, model, optimizer)
    for epoch in range(start + 1, plan.epochs + 1):
        optimizer.param_groups[0]["lr"] = plan.rate * (plan.epochs - epoch + 1) / plan.epochs
        _epoch(model, optimizer, x, y, plan.batch_size, seed * 1000 + epoch)
        if state is not None:
            _write(state, model, optimizer, epoch)
        if accuracy(model, x, y) >= plan.target:
            return epoch
    return max(start, plan.epochs)


def stop_early(model: nn.Module, x: Tensor, y: Tensor, plan: Plan, seed: int) -> int:
    """Train on 90 % and keep the weights with the smallest loss on the other 10 %. Return their epoch."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held_out, rest = order[: len(x) // 10], order[len(x) // 10 :]
    optimizer = torch.optim.Adam(model.parameters(), plan.rate)
    best, best_loss, best_weights = 0, float("inf"), copy.deepcopy(model.state_dict())
    for epoch in range(1, plan.epochs + 1):
        _epoch(model, optimizer, x[rest], y[rest], plan.batch_size, seed * 1000 + epoch)
        loss = float(F.cross_entropy(_logits(model, x[held_out]), y[held_out]))
        if loss < best_loss:
            best, best_loss, best_weights = epoch, loss, copy.deepcopy(model.state_dict())
        elif epoch - best >= plan.patience:
            break
    model.load_state_dict(best_weights)
    model.eval()
    return best


def out_of_fold(build: Callable[[], nn.Module], data: Labelled, classes: int, plan: Plan, seed: int) -> Tensor:
    """Return probabilities [N, K] of five early-stopped networks, each trained without the fold that it predicts."""
    result = torch.zeros(len(data.x), classes, dtype=torch.float64)
    for fold in range(FOLDS):
        rest, inside = fold_indices(len(data.x), fold)
        torch.manual_seed(seed)
        model = build()
        stop_early(model, data.x[rest], data.labels[rest], plan, seed)
        result[inside] = probabilities(model, data.x[inside])
    return result


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy in eval mode."""
    return float((_logits(model, x).argmax(1) == y).double().mean())


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(2 * BATCH)])


def _epoch(model: nn.Module, optimizer: torch.optim.Adam, x: Tensor, y: Tensor, batch_size: int, seed: int) -> None:
    model.train()
    for part in torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).split(batch_size):
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


def _write(path: Path, model: nn.Module, optimizer: torch.optim.Adam, epoch: int) -> None:
    tensors = {f"model/{name}": value.contiguous() for name, value in model.state_dict().items()}
    for name, value in model.named_parameters():
        tensors |= {f"adam/{name}/{key}": part.contiguous() for key, part in optimizer.state[value].items()}
    with atomic_write(path) as scratch:
        save_file(tensors, scratch, metadata={"epoch": str(epoch)})


def _read(path: Path | None, model: nn.Module, optimizer: torch.optim.Adam) -> int:
    """Restore weights and moments. Return the number of finished epochs."""
    if path is None or not path.exists():
        return 0
    tensors = load_file(path)
    model.load_state_dict({k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")})
    for name, value in model.named_parameters():
        prefix = f"adam/{name}/"
        optimizer.state[value] = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    with safe_open(path, "pt") as file:
        return int(file.metadata()["epoch"])
