"""Locate the parts of a classifier: its head and penultimate features, and the stages of a CNN."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from experiments.baselines.inference import forward, head_inputs
from ifcomp.data.batches import as_batch
from ifcomp.errors import ModelError
from ifcomp.layers.forward import evaluating


def split_classifier(model: nn.Module, example: Any) -> tuple[Callable[[Any], Tensor], nn.Linear]:
    """Split a classifier into penultimate features and the Linear that maps them to logits.

    Args:
        model: A classifier whose logits are the output of a Linear.
        example: A batch, as a loader yields it.

    Returns:
        A function from a batch to features [B, D] in the autograd graph, and the head:
        ``head(features(x))`` are the logits.

    Raises:
        ModelError: If the logits are not the output of a Linear that is called once with one row per example.
    """
    calls: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def record(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Linear)
        calls.append((module, args[0], output))

    batch = as_batch(example)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    with evaluating(model), torch.no_grad(), ExitStack() as undo:
        for module in linears:
            undo.callback(module.register_forward_hook(record).remove)
        logits = forward(model, batch)
    counts = Counter(module for module, _, _ in calls)
    heads = [
        module
        for module, value, output in calls
        if counts[module] == 1 and value.shape[:-1] == (batch.size,) and torch.equal(output, logits)
    ]
    if not heads:
        raise ModelError(
            "The penultimate features cannot be located: the logits are not the output of a Linear that is called "
            f"once with one row per example ({len(linears)} Linear in the model). The model must return the output of "
            "its last Linear, without a softmax or a scale after it."
        )
    head = heads[-1]

    def features(x: Any) -> Tensor:
        with evaluating(model), head_inputs(head) as captured:
            forward(model, as_batch(x))
        return captured[-1]

    return features, head


def find_stages(model: nn.Module, example: Any) -> list[nn.Module]:
    """Return the stages of a CNN: the last module of every resolution, whose outputs are feature maps [B, C, H, W].

    Modules that are called several times and maps of one pixel are excluded.

    Args:
        model: The classifier.
        example: A batch, as a loader yields it.

    Returns:
        The modules in the order of their calls; empty for a network without feature maps.
    """
    calls: list[tuple[nn.Module, Any]] = []
    with evaluating(model), torch.no_grad(), ExitStack() as undo:
        for module in model.modules():
            undo.callback(module.register_forward_hook(lambda called, _, out: calls.append((called, out))).remove)
        forward(model, as_batch(example))
    counts = Counter(module for module, _ in calls)
    last: dict[torch.Size, nn.Module] = {}
    for module, output in calls:
        if counts[module] == 1 and isinstance(output, Tensor) and output.dim() == 4 and output.shape[2:].numel() > 1:
            last.pop(output.shape[2:], None)  # keeps the order of the calls
            last[output.shape[2:]] = module
    return list(last.values())
