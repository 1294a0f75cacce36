"""A classifier in the pieces that the detectors of pytorch-ood ask for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.baselines.features import find_stages, forward, split_classifier
from ifcomp.data.batches import as_batch
from ifcomp.errors import ModelError


class Network:
    """A classifier taken apart.

    Attributes:
        model: The classifier.
        head: Its last Linear.
        head_copy: The same in float32 on the CPU, without gradients.
        logits: A module that maps inputs to nothing but logits.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        """Take a classifier apart.

        Args:
            model: The classifier.
            example: A batch, as a loader yields it.
        """
        self.model, self._example = model, example
        self._features, self.head = split_classifier(model, example)
        self.head_copy = copy.deepcopy(self.head).requires_grad_(False).float().cpu()
        self.logits = _Logits(model)

    def encode(self, x: Tensor) -> Tensor:
        """Penultimate features [B, D] in float32 on the CPU, differentiable by the inputs but not by parameters."""
        with _frozen(self.model):
            return self._features(x).float().cpu()

    @cached_property
    def stages(self) -> list[nn.Module]:
        """Modules that give the feature maps of every resolution."""
        stages = find_stages(self.model, self._example)
        if not stages:
            raise ModelError("This detector needs feature maps [B, C, H, W], but no module of the model returns any.")
        return stages

    @property
    def weight_and_bias(self) -> dict[str, Tensor]:
        """The head's parameters ``w`` and ``b``; a bias of zeros if it has none."""
        weight, bias = self.head_copy.weight, self.head_copy.bias
        return {"w": weight, "b": weight.new_zeros(len(weight)) if bias is None else bias}

    def head_on_maps(self, maps: Tensor) -> Tensor:
        """Logits from features that come as maps of one pixel, [B, D, 1, 1]."""
        logits: Tensor = self.head_copy(maps.flatten(1))
        return logits


class Chain:
    """A network's stages as a chain of functions, each of which gets what the one before returned."""

    def __init__(self, network: Network) -> None:
        """Prepare; nothing runs yet."""
        self._network = network
        self._maps: list[Tensor] = []
        self._logits = torch.empty(0)

    @property
    def links(self) -> list[Callable[[Tensor], Tensor]]:
        """One function for each stage: the first runs the network, the others read off what it gave."""
        return [self._run, *(partial(self._read, index) for index in range(1, len(self._network.stages)))]

    def logits(self, _: Tensor) -> Tensor:
        """What the network gave."""
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
    """The model as a module that returns nothing but logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] of inputs."""
        return forward(self.model, as_batch(x))


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter is part of a graph that is made in the context."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
