"""Hindsight training without proximal terms: the network memorises any label (the infinity problem)."""

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
from ifcomp.oracle.network import TrainingInputs, collect, digest, digest_model, join
from ifcomp.oracle.pairs import Pair, PairFile, train_pairs
from ifcomp.oracle.results import Hindsight, assemble
from ifcomp.oracle.settings import check_count, check_positive
from ifcomp.precision import as_double


@dataclass(frozen=True)
class Schedule:
    """SGD with Nesterov momentum 0.9; see `unrestricted_refit`."""

    epochs: int
    learning_rate: float
    batch_size: int
    weight_decay: float
    seed: int

    def __post_init__(self) -> None:
        """Raise SettingError for invalid settings."""
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

    A network that can memorise assigns every label a probability near 1, so the parametric complexity is near ``log K``
    for any input. This is why `hindsight` restricts the hindsight models by proximal terms.

    A copy of the model is trained in train mode from its current weights (pass an untrained model to start from
    scratch), with SGD and Nesterov momentum 0.9 on the cross-entropy. The example has the weight of one training
    example. Convergence is not checked: ``converged`` is false, and ``criterion`` and ``gradient`` are NaN.

    Args:
        model: Classifier that returns logits [B, K]. It is not modified.
        train_data: Batches ``(x, y)`` or dicts with labels.
        x: Inputs of B examples.
        epochs: Number of passes over the n + 1 examples.
        learning_rate: Constant learning rate.
        batch_size: Largest number of examples per step.
        weight_decay: Weight decay of SGD.
        labels: Labels to train with; None for all. The others are NaN in the result.
        seed: Seed of the order of examples and of dropout.
        results: JSON Lines file of finished pairs, as for `hindsight`.
        progress: Show a progress bar; None shows it on terminals.

    Raises:
        SettingError: If a number is out of range.
        DataError: If data is empty, malformed, without labels or not finite.
        StorageError: If the results file cannot be read or written.
    """
    schedule = Schedule(epochs, learning_rate, batch_size, weight_decay, seed)
    batch = replace(as_batch(x), labels=None)
    check_inputs(batch)
    training = collect(train_data)
    store = None if results is None else PairFile(results)
    device = next(model.parameters()).device
    with torch.inference_mode(False), torch.enable_grad():
        examples = [example.to(device) for example in batch.split(1)]
        with evaluating(model):
            log_base = base_log_probabilities(model, examples)
        columns = check_columns(labels, log_base.shape[1])
        groups = (replace(group, labels=check_labels(group, log_base.shape[1])) for group in training.groups)
        training = TrainingInputs(tuple(groups))
        rows = train_pairs(
            examples,
            columns,
            partial(_refit, model, training, schedule),
            run=digest("unrestricted", digest_model(model), training.digest(), schedule),
            max_iterations=epochs,
            store=store,
            progress=progress,
        )
    return assemble(rows, log_base)


def _refit(model: nn.Module, training: TrainingInputs, schedule: Schedule, example: Batch, label: int) -> Pair:
    extended = join([*training.groups, replace(example, labels=torch.tensor([label]))])
    trained = copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.manual_seed(schedule.seed)
        _train(trained.train(), extended, schedule, next(model.parameters()).device)
    hindsight, base = (float(_log_probability(network, example, label)) for network in (trained, model))
    return Pair(hindsight, base, schedule.epochs, False, float("nan"), float("nan"))


def _train(model: nn.Module, training: TrainingInputs, schedule: Schedule, device: torch.device) -> None:
    optimizer = torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        schedule.learning_rate,
        momentum=0.9,
        nesterov=True,
        weight_decay=schedule.weight_decay,
    )
    steps = -(-training.count // schedule.batch_size)
    for _ in range(schedule.epochs):
        for index in torch.randperm(training.count).tensor_split(steps):
            mask = torch.zeros(training.count, dtype=torch.bool)
            mask[index] = True
            optimizer.zero_grad()
            for microbatch in training.microbatches(device, mask):
                assert microbatch.labels is not None
                loss = functional.cross_entropy(
                    run_model(model, microbatch), microbatch.labels.to(device), reduction="sum"
                )
                (loss / len(index)).backward()
            optimizer.step()


def _log_probability(model: nn.Module, example: Batch, label: int) -> Tensor:
    with evaluating(model), torch.no_grad():
        return torch.log_softmax(as_double(run_model(model, example)), 1)[0, label]
