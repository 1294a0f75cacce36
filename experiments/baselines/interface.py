"""What every predictive baseline offers, what it needs and costs, and how it runs a model without changing it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ifcomp.data.batches import Batch, as_batch
from ifcomp.data.checks import check_inputs
from ifcomp.errors import EmptyDataError, SettingError
from ifcomp.layers.forward import evaluating, run_model

#: Positional and keyword inputs of a model.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Predictive(Protocol):
    """Anything that gives a distribution over the labels; `IFComp` is one too."""

    def predict_proba(self, x: Any) -> Tensor:
        """Probabilities [B, K] in float64, rows sum to 1; ``x`` is a tensor or a dict of keyword inputs."""
        ...


class Hindsight(Predictive, Protocol):
    """A normalised maximum likelihood: the label's probability once it was fitted, normalised over labels."""

    def hindsight_proba(self, x: Any) -> Tensor:
        """Probability of each label after fitting that label, [B, K] in float64; not normalised."""
        ...


@dataclass(frozen=True)
class Cost:
    """What a method asks for.

    Attributes:
        needs: Beyond one trained model: other models, checkpoints, data, passes over the data before the first use.
        forward_passes: For one prediction, in forward passes an example, a backward pass counting 2: what the network
            itself takes, without products with curvature. K labels, m samples or members, s steps.
    """

    needs: str
    forward_passes: str


COSTS: Mapping[str, Cost] = {
    "IFComp": Cost("two passes over the training data", "1 + 2 K"),
    "TemperatureScaling": Cost("held-out labels; one pass over the held-out data", "1"),
    "MonteCarloDropout": Cost("a model that was trained with dropout", "m"),
    "DeepEnsemble": Cost("m trained models", "m"),
    "Swag": Cost("checkpoints; m passes over the training data where there is BatchNorm", "m"),
    "Acnml.from_swag": Cost("checkpoints; a pass over the training data where there is BatchNorm", "K (3 s + 1)"),
    "Acnml.from_ekfac": Cost("two passes over the training data", "K (3 s + 1), and s K products with the curvature"),
    "LastLayerLaplace": Cost("training labels; one pass over the training data; laplace-torch", "1"),
    "LinearizedLaplace": Cost("two passes over the training data", "2 + 2 K"),
}


def checked_batch(model: nn.Module, x: Any) -> Batch:
    """The inputs as a batch on the model's device, a copy; raises if they are empty or not finite."""
    batch = as_batch(x)
    if not batch.size:
        raise EmptyDataError("There is no example to predict: the inputs are empty.")
    check_inputs(batch)
    return batch.to(next(model.parameters()).device)


def model_logits(model: nn.Module, x: Any) -> Tensor:
    """Logits [B, K] in float64 of the model in eval mode; its modes are restored."""
    batch = checked_batch(model, x)
    with evaluating(model), torch.no_grad():
        return run_model(model, batch).double()


def count_classes(model: nn.Module, batch: Batch) -> int:
    """K, from one example; raises if the output is not logits."""
    return run_model(model, copied(batch.select(slice(0, 1)))).shape[1]


def copied(batch: Batch) -> Batch:
    """The batch with inputs of its own, for models that work on them in place."""
    return batch.to(next(batch.tensors()).device)


def example_logits(model: nn.Module, tensors: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    """Logits [K] of one example with other parameters or buffers, as a function for ``torch.func``.

    Args:
        model: The classifier.
        tensors: Replaced parameters and buffers by name.
        inputs: Positional and keyword inputs with a batch axis of 1, as `by_example` gives them.
    """
    args, kwargs = inputs
    own_args = tuple(value.clone() if isinstance(value, Tensor) else value for value in args)
    own_kwargs = {key: value.clone() if isinstance(value, Tensor) else value for key, value in kwargs.items()}
    output = functional_call(model, dict(tensors), own_args, own_kwargs)
    logits: Tensor = (output if isinstance(output, Tensor) else output.logits)[0]
    return logits


def by_example(
    function: Callable[..., Tensor],
    batch: Batch,
    index: Tensor,
    *own: Tensor,
    randomness: Literal["error", "same"] = "error",
) -> Tensor:
    """``function((args, kwargs), *own)`` of some examples, each alone, stacked; with ``vmap`` where the model can.

    Args:
        function: Of one example, whose inputs have a batch axis of 1, and of its part of ``own``.
        batch: The examples.
        index: Which of them, [N].
        own: Tensors [N, ...] of which each gets its row.
        randomness: "same" gives every example the same random numbers.
    """
    if len(index) > 1:
        args, arg_axes = _alone(dict(enumerate(batch.args)), batch.size, index)
        kwargs, kwarg_axes = _alone(batch.kwargs, batch.size, index)
        axes = ((tuple(arg_axes.values()), kwarg_axes), *(0 for _ in own))
        try:
            with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # fused attention has no batching rule
                warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                return vmap(function, axes, randomness=randomness)((tuple(args.values()), kwargs), *own)
        except (RuntimeError, NotImplementedError):  # control flow that depends on data, recurrent layers
            pass
    examples = [batch.select(slice(position, position + 1)) for position in index.tolist()]
    rows = zip(*own, strict=True) if own else itertools.repeat((), len(examples))
    return torch.stack([function((one.args, one.kwargs), *row) for one, row in zip(examples, rows, strict=True)])


def _alone(values: Mapping[Any, Any], size: int, index: Tensor) -> tuple[dict[Any, Any], dict[Any, int | None]]:
    """Chosen inputs with an axis of 1 after the batch axis, and the axis for ``vmap``; others stay as they are."""
    axes = {
        key: 0 if isinstance(value, Tensor) and value.dim() and len(value) == size else None
        for key, value in values.items()
    }
    return {key: value if axes[key] is None else value[index].unsqueeze(1) for key, value in values.items()}, axes


def derived_seed(seed: int, index: int) -> int:
    """The seed of one of several independent draws."""
    return int(np.random.SeedSequence((seed % 2**64, index)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def check_count(name: str, value: int) -> int:
    """Return the value, or raise SettingError unless it is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(f"{name} must be a whole number of at least 1, but is {value!r}.")
    return value
