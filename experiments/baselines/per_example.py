"""Functions of single examples, evaluated over a batch with ``vmap`` where the model permits it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ifcomp.data.batches import Batch

#: Positional and keyword inputs of a model.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def example_logits(model: nn.Module, tensors: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    """Return the logits [K] of one example with replaced parameters or buffers, for use in ``torch.func``.

    Args:
        model: The classifier.
        tensors: Replaced parameters and buffers by name.
        inputs: Positional and keyword inputs with a batch axis of 1, as `map_examples` gives them.
    """
    args, kwargs = inputs
    copied_args = tuple(value.clone() if isinstance(value, Tensor) else value for value in args)
    copied_kwargs = {key: value.clone() if isinstance(value, Tensor) else value for key, value in kwargs.items()}
    output = functional_call(model, dict(tensors), copied_args, copied_kwargs)
    logits: Tensor = (output if isinstance(output, Tensor) else output.logits)[0]
    return logits


def map_examples(
    function: Callable[..., Tensor],
    batch: Batch,
    index: Tensor,
    *rows: Tensor,
    randomness: Literal["error", "same"] = "error",
) -> Tensor:
    """Return ``function(inputs, *row)`` of chosen examples, stacked.

    Models that ``vmap`` cannot run (recurrent layers, control flow that depends on data) are run on one example at a
    time.

    Args:
        function: Takes the `Inputs` of one example, with a batch axis of 1, and one row of each of ``rows``.
        batch: The examples.
        index: Positions of the chosen examples, [N].
        rows: Tensors [N, ...].
        randomness: "same" gives every example the same random numbers.
    """
    if len(index) > 1:
        args, arg_axes = _single_examples(dict(enumerate(batch.args)), batch.size, index)
        kwargs, kwarg_axes = _single_examples(batch.kwargs, batch.size, index)
        axes = ((tuple(arg_axes.values()), kwarg_axes), *(0 for _ in rows))
        try:
            with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # fused attention has no batching rule
                warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                return vmap(function, axes, randomness=randomness)((tuple(args.values()), kwargs), *rows)
        except (RuntimeError, NotImplementedError):
            pass
    examples = [batch.select(slice(position, position + 1)) for position in index.tolist()]
    zipped = zip(*rows, strict=True) if rows else itertools.repeat((), len(examples))
    return torch.stack([function((one.args, one.kwargs), *row) for one, row in zip(examples, zipped, strict=True)])


def _single_examples(
    values: Mapping[Any, Any], size: int, index: Tensor
) -> tuple[dict[Any, Any], dict[Any, int | None]]:
    """Select examples and insert a batch axis of 1 for each; return the values and their axes for ``vmap``.

    Inputs without a batch axis stay as they are, with axis None.
    """
    axes = {
        key: 0 if isinstance(value, Tensor) and value.dim() and len(value) == size else None
        for key, value in values.items()
    }
    return {key: value if axes[key] is None else value[index].unsqueeze(1) for key, value in values.items()}, axes
