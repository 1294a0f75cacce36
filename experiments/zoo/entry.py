"""An architecture of the zoo: a small model, its inputs, and functions that split and pad the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Tensor | dict[str, Tensor]
#: Builds inputs from a number of examples and a generator.
MakeBatch = Callable[[int, torch.Generator], Inputs]
#: Appends a number of padded positions.
Pad = Callable[[Inputs, int], Inputs]

CLASSES = 3


@dataclass(frozen=True)
class Entry:
    """A small version of an architecture.

    Attributes:
        name: Unique name.
        source: Package that defines the architecture.
        build: Returns a new model with `CLASSES` logits.
        batch: Returns inputs: a tensor, or a dict of keyword arguments.
        pad: Appends padded positions; None for models without padding.
        shared: Names of inputs without a batch axis.
    """

    name: str
    source: str
    build: Callable[[], nn.Module]
    batch: MakeBatch
    pad: Pad | None = None
    shared: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """``source/name``."""
        return f"{self.source}/{self.name}"

    def model(self, seed: int = 0) -> nn.Module:
        """Build the model in float64 and eval mode, with every trainable parameter off its default.

        Zeros of the initialisation, such as those of the last scale of a residual branch, would hide wrong gradients.
        Running statistics are close to those of a batch, so that activations do not saturate.
        """
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            model = self.build().double()
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.numel():
                    fan_in = parameter[0].numel() if parameter.dim() > 1 else 25
                    parameter.add_(torch.randn_like(parameter), alpha=0.5 * fan_in**-0.5)
            _set_running_statistics(model, self.inputs(16, seed=3))
        return model.eval()

    def inputs(self, size: int, seed: int) -> Inputs:
        """Return inputs of a number of examples, floating-point inputs in float64."""
        made = self.batch(size, torch.Generator().manual_seed(seed))
        return _map(lambda value: value.double() if value.is_floating_point() else value, made)

    def take(self, inputs: Inputs, examples: slice | Sequence[int]) -> Inputs:
        """Select examples; shared inputs are returned whole."""
        if isinstance(inputs, Tensor):
            return inputs[examples]
        return {name: value if name in self.shared else value[examples] for name, value in inputs.items()}

    def size(self, inputs: Inputs) -> int:
        """Return the number of examples."""
        if isinstance(inputs, Tensor):
            return len(inputs)
        return next(len(value) for name, value in inputs.items() if name not in self.shared)

    def cut(self, inputs: Inputs, sizes: Sequence[int]) -> list[Inputs]:
        """Cut into consecutive batches; the last size is repeated until no example is left."""
        batches, start, total = [], 0, self.size(inputs)
        remaining = list(sizes)
        while start < total:
            size = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            batches.append(self.take(inputs, slice(start, start + size)))
            start += size
        return batches


def _set_running_statistics(model: nn.Module, inputs: Inputs) -> None:
    """Estimate the running statistics of BatchNorm on a batch, then change them by about 10 %."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    norms = [module for module in norms if module.running_mean is not None]
    if not norms:
        return
    model.eval()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    model(**inputs) if isinstance(inputs, dict) else model(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum
        norm.running_mean += 0.1 * norm.running_var.sqrt() * torch.randn_like(norm.running_mean)
        norm.running_var *= 1 + 0.2 * torch.rand_like(norm.running_var)
        norm.running_var += 1e-3


def _map(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    if isinstance(inputs, Tensor):
        return function(inputs)
    return {name: function(value) for name, value in inputs.items()}


def normal(*shape: int) -> MakeBatch:
    """Standard normal inputs [B, *shape]."""
    return lambda size, generator: torch.randn(size, *shape, generator=generator)


def ragged_tokens(length: int = 8, vocabulary: int = 60, mask: bool = True) -> MakeBatch:
    """Token indices with an attention mask.

    Index 0 is padding and index 2 ends every text. The first four examples have equal lengths.
    """

    def batch(size: int, generator: torch.Generator) -> Inputs:
        ids = torch.randint(3, vocabulary, (size, length), generator=generator)
        lengths = torch.randint(3, length + 1, (size,), generator=generator)
        lengths[:4] = length - 2
        kept = torch.arange(length) < lengths.unsqueeze(1)
        ids[torch.arange(size), lengths - 1] = 2
        ids = ids * kept
        return {"input_ids": ids, "attention_mask": kept.long()} if mask else {"input_ids": ids}

    return batch


def pad_tokens(inputs: Inputs, count: int) -> Inputs:
    """Append positions with index 0 and mask 0 to every input of two axes."""
    assert isinstance(inputs, dict)
    return {name: torch.nn.functional.pad(value, (0, count)) for name, value in inputs.items()}


def each(names: Iterable[str], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same arguments for every name."""
    return {name: dict(options) for name in names}
