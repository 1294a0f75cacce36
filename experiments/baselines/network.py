"""A classifier split into the parts that the detectors of pytorch-ood take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.baselines.features import find_stages, split_classifier
from experiments.baselines.inference import forward
from ifcomp.data.batches import as_batch
from ifcomp.errors import ModelError


class Network:
    """A classifier and its parts.

    Attributes:
        model: The classifier.
        head: Its last Linear.
        head_copy: A copy of the head in float32 on the CPU, without gradients.
        logits: A module that maps inputs to plain logits.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        """Locate the head.

        Args:
            model: The classifier.
            example: A batch, as a loader yields it.
        """
        self.model, self._example = model, example
        self._features, self.head = split_classifier(model, example)
        self.head_copy = copy.deepcopy(self.head).requires_grad_(False).float().cpu()
        self.logits = _Logits(model)

    def encode(self, x: Tensor) -> Tensor:
        """Return the penultimate features [B, D] in float32 on the CPU.

        They are differentiable with respect to the inputs, not to the parameters.
        """
        with _frozen(self.model):
            return self._features(x).float().cpu()

    @cached_property
    def stages(self) -> list[nn.Module]:
        """Modules whose outputs are the feature maps of every resolution."""
        stages = find_stages(self.model, self._example)
        if not stages:
            raise ModelError("This detector needs feature maps [B, C, H, W], but no module of the model returns any.")
        return stages

    @property
    def weight_and_bias(self) -> dict[str, Tensor]:
        """Parameters of the head: ``w`` and ``b``. A missing bias is zero."""
        weight, bias = self.head_copy.weight, self.head_copy.bias
        return {"w": weight, "b": weight.new_zeros(len(weight)) if bias is None else bias}

    def head_on_maps(self, maps: Tensor) -> Tensor:
        """Return the logits of features in the form of one-pixel maps, [B, D, 1, 1]."""
        logits: Tensor = self.head_copy(maps.flatten(1))
        return logits


class Chain:
    """The stages of a network as functions, each called with the result of the one before.

    The first function runs the whole network and records the feature maps of all stages; the others return theirs.
    """

    def __init__(self, network: Network) -> None:
        """Set the network; nothing runs yet."""
        self._network = network
        self._maps: list[Tensor] = []
        self._logits = torch.empty(0)

    @property
    def links(self) -> list[Callable[[Tensor], Tensor]]:
        """One function per stage."""
        return [self._run, *(partial(self._read, index) for index in range(1, len(self._network.stages)))]

    def logits(self, _: Tensor) -> Tensor:
        """Return the logits of the last run."""
        return self._logits

    def _run(self, x: Tensor) -> Tensor:
        self._maps = []
        with ExitStack() as undo:
            for stage in self._network.stages:
                hook = stage.register_forward_hook(lambda _, __, output: self._maps.append(output.float().cpu()))
                undo.callback(hook.remove)
            self._logits = self._network.logits(x).float().cpu()
        return self._maps[0]

    def _read(self, index: int, _: Tensor) -> Tensor:
        return self._maps[index]


class _Logits(nn.Module):
    """A model that returns plain logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return forward(self.model, as_batch(x))


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Exclude the parameters from autograd graphs."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
