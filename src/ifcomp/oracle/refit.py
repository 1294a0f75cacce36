"""Hindsight training without proximal terms, which memorises any label: the infinity problem."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ifcomp.data.batches import Batch, as_batch
from ifcomp.data.checks import check_inputs, check_labels
from ifcomp.layers.forward import evaluating, run_model
from ifcomp.oracle.hindsight import base_log_probabilities, check_columns
from ifcomp.oracle.network import Points, collect, digest, digest_model, join
from ifcomp.oracle.pairs import Pair, PairFile, train_pairs
from ifcomp.oracle.results import Hindsight, assemble
from ifcomp.oracle.settings import check_count, check_positive


@dataclass(frozen=True)
class Schedule:
    """SGD with Nesterov momentum 0.9; see `unrestricted_refit`."""

    epochs: int
    learning_rate: float
    batch_size: int
    weight_decay: float
    seed: int

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        check_count("epochs", self.epochs)
        check_count("batch_size", self.batch_size)
        check_positive("learning_rate", self.learning_rate)
        if self.weight_decay:
            check_positive("weight_decay", self.weight_decay)


def unrestricted_refit(
    model: nn.Module,
    train_data: Iterable[Any],
    x: Any,
    *,
    epochs: int,
    learning_rate: float = 0.01,
    batch_size: int = 64,
    weight_decay: float = 0.0,
    labels: Sequence[int] | None = None,
    seed: int = 0,
    results: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Hindsight:
    """Train on the training set plus one example with each label, without proximal terms (eq. inf_obj).

    A network that can memorise gives every label a probability near 1, so that the parametric complexity is near
    ``log K`` for any input: why hindsight models must be restricted, as `hindsight` does.

    A copy of the model is trained in train mode from the weights it has (hand in an untrained model to start from
    scratch), with SGD and Nesterov momentum 0.9 on the cross-entropy. The example has the weight of one training
    example. Epochs are all there is to convergence, so ``converged`` is false and ``criterion`` and ``gradient`` are
    NaN.

    Args:
        model: Returns logits [B, K]; comes back unchanged.
        train_data: Batches ``(x, y)`` or dicts with labels.
        x: Inputs of B examples.
        epochs: Passes over the n + 1 examples.
        learning_rate: Constant.
        batch_size: Most examples a step.
        weight_decay: Of SGD.
        labels: Which labels to train with; None for all. The others are NaN in the result.
        seed: Of the order of examples, and of dropout.
        results: A file of JSON lines to keep pairs in, as for `hindsight`.
        progress: Show a progress bar; None shows it on terminals.

    Raises:
        SettingError: If a number is outside what is allowed.
        DataError: If data is empty, malformed, without labels or not finite.
        StorageError: If the results cannot be read or written.
    """
    schedule = Schedule(epochs, learning_rate, batch_size, weight_decay, seed)
    batch = replace(as_batch(x), labels=None)
    check_inputs(batch)
    points = collect(train_data)
    store = None if results is None else PairFile(results)
    device = next(model.parameters()).device
    with torch.inference_mode(False), torch.enable_grad():
        examples = [example.to(device) for example in batch.split(1)]
        with evaluating(model):
            log_base = base_log_probabilities(model, examples)
        columns = check_columns(labels, log_base.shape[1])
        points = Points(tuple(replace(pool, labels=check_labels(pool, log_base.shape[1])) for pool in points.pools))
        rows = train_pairs(
            examples,
            columns,
            partial(_refit, model, points, schedule),
            run=digest("unrestricted", digest_model(model), points.digest(), schedule),
            most=epochs,
            store=store,
            progress=progress,
        )
    return assemble(rows, log_base)


def _refit(model: nn.Module, points: Points, schedule: Schedule, example: Batch, label: int) -> Pair:
    together = join([*points.pools, replace(example, labels=torch.tensor([label]))])
    trained = copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.manual_seed(schedule.seed)
        _train(trained.train(), together, schedule, next(model.parameters()).device)
    both = [float(_log_probability(network, example, label)) for network in (trained, model)]
    return Pair(both[0], both[1], schedule.epochs, False, float("nan"), float("nan"))


def _train(model: nn.Module, points: Points, schedule: Schedule, device: torch.device) -> None:
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        schedule.learning_rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=schedule.weight_decay,
    )
    steps = -(-points.count // schedule.batch_size)
    for _ in range(schedule.epochs):
        for index in torch.randperm(points.count).tensor_split(steps):
            chosen = torch.zeros(points.count, dtype=torch.bool)
            chosen[index] = True
            optimizer.zero_grad()
            for piece in points.pieces(device, chosen):
                assert piece.labels is not None
                loss = functional.cross_entropy(run_model(model, piece), piece.labels.to(device), reduction="sum")
                (loss / len(index)).backward()
            optimizer.step()


def _log_probability(model: nn.Module, example: Batch, label: int) -> Tensor:
    with evaluating(model), torch.no_grad():
        return torch.log_softmax(run_model(model, example).double(), 1)[0, label]
