"""The batch axis of each input of a model, from the logits of examples alone and together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import torch
from torch import nn

from ifcomp.data.batches import Batch
from ifcomp.errors import IfcompError
from ifcomp.layers.forward import evaluating, run_model

#: Examples that run together.
_EXAMPLES = 3

#: Largest number of inputs that are tried as shared, alone and in pairs.
_MAX_INPUTS = 8

#: An assignment is accepted if the error of the logits is at most this multiple of the rounding error of the largest.
_ROUNDING = 8.0


def shared_inputs(model: nn.Module, batch: Batch) -> frozenset[str]:
    """Names of the input tensors without a batch axis.

    A tensor of another length than the batch has none. If several tensors have the length of the batch, one can be
    shared by all examples, such as a table of positions. Under the right assignment an example has the same logits
    alone and in a batch. The first assignment has no shared input; then single inputs and pairs are tried as shared. If
    no assignment is accepted, the one with the smallest error is used, and verification reports the dependence.

    Args:
        model: The classifier.
        batch: The first batch.
    """
    batched = batch.batched()
    known = batch.shared | {name for name, has_axis in batched.items() if not has_axis}
    candidates = [name for name, has_axis in batched.items() if has_axis]
    if len(candidates) < 2 or batch.size < 2:
        return known
    errors: dict[frozenset[str], float] = {}
    device = next(model.parameters()).device
    no_autocast = torch.autocast(device.type, enabled=False)
    with evaluating(model), torch.inference_mode(False), torch.no_grad(), no_autocast:
        for chosen in _assignments(candidates):
            errors[chosen], rounding = _error(model, replace(batch, shared=known | chosen), device)
            if errors[chosen] <= _ROUNDING * rounding:
                return known | chosen
    smallest = min(errors.values())
    return known | next(chosen for chosen, error in errors.items() if error == smallest)


def _assignments(names: list[str]) -> Iterator[frozenset[str]]:
    """Sets of shared inputs, in the order in which they are tried. At least one input has a batch axis."""
    for count in range(min(3, len(names))):
        yield from (frozenset(chosen) for chosen in combinations(names[:_MAX_INPUTS], count))


def _error(model: nn.Module, batch: Batch, device: torch.device) -> tuple[float, float]:
    """Largest difference between logits of examples alone and together, and rounding error of the largest logit."""
    examples = batch.select(slice(0, _EXAMPLES))
    try:
        together = run_model(model, examples.to(device))
        alone = torch.cat([run_model(model, example.to(device)) for example in examples.split(1)])
    except (IfcompError, RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return math.inf, 0.0  # the model does not run with these shapes
    rounding = torch.finfo(together.dtype).eps * float(together.abs().max())
    return float((together - alone).abs().max()), rounding
