"""The head of a classifier: the layer that maps penultimate features to logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch
from ifcomp.layers.forward import evaluating, run_model
from ifcomp.layers.wrappers import uncompiled

#: Number of examples with which the head is located.
_EXAMPLES = 2


class Head(NamedTuple):
    """Name of the head among the modules of a model, and the number D of penultimate features."""

    name: str
    features: int


def find_head(model: nn.Module, batch: Batch) -> Head | None:
    """Find the module with one weight matrix [K, D] or [D, K] whose output [B, K] is the logits.

    Args:
        model: The classifier.
        batch: Examples of real data. The first two are run.

    Returns:
        None if the logits are computed otherwise, for instance scaled, or if the module is called more than once.
    """
    examples = batch.select(slice(0, _EXAMPLES)).to(next(model.parameters()).device)
    with torch.inference_mode(False), torch.no_grad(), evaluating(model), uncompiled(model), _calls(model) as calls:
        logits = run_model(model, examples)
    for name, found in calls.items():
        value, output = found[0]
        if len(found) == 1 and value.shape[:-1] == output.shape[:-1] == (examples.size,) and output.equal(logits):
            return Head(name, value.shape[1])
    return None


@contextmanager
def _calls(model: nn.Module) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Record input and output of every call of a module with a weight matrix, by its name."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
    with ExitStack() as undo:
        for name, module in model.named_modules():
            weight = None if isinstance(module, torch.jit.ScriptModule) else getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 2:

                def record(
                    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, name: str = name
                ) -> None:
                    value = first_input(args, kwargs)
                    if isinstance(value, Tensor) and isinstance(output, Tensor):
                        calls.setdefault(name, []).append((value, output))

                undo.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        yield calls


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first input of a module; None without any."""
    return args[0] if args else next(iter(kwargs.values()), None)
