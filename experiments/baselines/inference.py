"""Run a classifier on inputs or on a data set. The model is not modified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch, as_batch, as_batches, map_tensors
from ifcomp.data.checks import check_data, check_inputs, check_labels
from ifcomp.errors import DataError, EmptyDataError, SettingError
from ifcomp.layers.forward import evaluating, run_model
from ifcomp.progress import track


@dataclass(frozen=True)
class Outputs:
    """Outputs of a classifier for a data set, on the CPU.

    Attributes:
        logits: [N, K].
        labels: [N]; None if they were not requested.
        features: Inputs of the head, [N, D]; None if no head was given.
    """

    logits: Tensor
    labels: Tensor | None
    features: Tensor | None = None


def run_data(
    model: nn.Module,
    data: Iterable[Any],
    *,
    labels: bool = True,
    head: nn.Linear | None = None,
    progress: bool | None = None,
) -> Outputs:
    """Run a classifier in eval mode over a data set. Cost: one forward pass.

    Args:
        model: Returns logits [B, K], or an object with ``.logits``.
        data: Batches ``(x, y)``, ``(x,)``, ``x`` or dicts.
        labels: Whether to return labels. If False, labels in the data are ignored.
        head: The model's last layer, to return its inputs as well.
        progress: Show a progress bar; None shows it on terminals.

    Raises:
        EmptyDataError: If there is no example.
        LabelError: If requested labels are missing or out of range.
    """
    check_data(data)
    parts: list[Outputs] = []
    with evaluating(model), torch.inference_mode(False), torch.no_grad(), head_inputs(head) as captured:
        for batch in as_batches(track(data, "forward passes", progress)):
            captured.clear()
            logits = forward(model, batch).cpu()
            checked = check_labels(batch, logits.shape[1]).cpu() if labels else None
            parts.append(Outputs(logits, checked, None if head is None else captured[-1].cpu()))
    if not parts:
        raise EmptyDataError("There is no example: the data is empty.")
    return Outputs(
        torch.cat([part.logits for part in parts]),
        _joined([part.labels for part in parts]),
        _joined([part.features for part in parts]),
    )


def model_logits(model: nn.Module, x: Any) -> Tensor:
    """Return the logits [B, K] of inputs in float64, with the model in eval mode.

    Args:
        model: The classifier.
        x: Inputs [B, ...], or a dict of keyword inputs.
    """
    with evaluating(model), torch.no_grad():
        return forward(model, nonempty_batch(x)).double()


def nonempty_batch(x: Any) -> Batch:
    """Return the inputs as a batch, or raise EmptyDataError."""
    batch = as_batch(x)
    if not batch.size:
        raise EmptyDataError("There is no example to predict: the inputs are empty.")
    return batch


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits [B, K] of copies of the inputs on the model's device.

    The copies protect the inputs from models that work in place. Gradients flow back to the inputs.
    """
    return run_model(model, on_device(model, batch))


def on_device(model: nn.Module, batch: Batch) -> Batch:
    """Return a copy of a batch on the model's device, or raise NonFiniteError if an input is NaN or infinite."""
    check_inputs(batch)
    device = next(model.parameters()).device

    def copy(value: Tensor) -> Tensor:
        return value.to(device, copy=True)

    return replace(batch, args=map_tensors(copy, batch.args), kwargs=map_tensors(copy, batch.kwargs))


def model_inputs(batch: Batch) -> Any:
    """Return the inputs of a batch as ``predict_proba`` takes them, without labels."""
    return batch.inputs


def as_models(models: nn.Module | Sequence[nn.Module], data: Iterable[Any]) -> list[nn.Module]:
    """Return one model or several as a list.

    Raises:
        SettingError: If there is none.
        DataError: If there are several and the data can be iterated only once.
    """
    listed = [models] if isinstance(models, nn.Module) else list(models)
    if not listed:
        raise SettingError("At least one network is needed, but the list of networks is empty.")
    if len(listed) > 1:
        check_repeatable(data)
    return listed


def check_repeatable(data: Iterable[Any]) -> None:
    """Raise DataError if the data is an iterator, which is exhausted after one pass."""
    if isinstance(data, Iterator):
        raise DataError(
            "The data is iterated several times, but is an iterator that is exhausted after one pass. "
            "Give a DataLoader, a list of batches, or an object whose __iter__ starts anew."
        )


@contextmanager
def head_inputs(head: nn.Module | None) -> Iterator[list[Tensor]]:
    """Collect the input of every call of a module in a list."""
    inputs: list[Tensor] = []
    if head is None:
        yield inputs
        return
    hook = head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        yield inputs
    finally:
        hook.remove()


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None
