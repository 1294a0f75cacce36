"""MC-dropout: the mean over networks that dropout thins out at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from experiments.baselines.interface import (
    Inputs,
    by_example,
    check_count,
    checked_batch,
    count_classes,
    derived_seed,
    example_logits,
)
from ifcomp.data.batches import Batch
from ifcomp.errors import ModelError
from ifcomp.layers.forward import evaluating


@dataclass(frozen=True)
class MonteCarloDropout:
    """Mean of ``softmax(f(x))`` over m random masks.

    Only ``Dropout`` modules drop; all else, BatchNorm above all, is in eval mode. A sample is one thinned network that
    all examples go through, so results do not depend on the batch.

    Attributes:
        model: A classifier that was trained with dropout.
        samples: m, 30 in the paper.
        seed: Of the masks.
    """

    model: nn.Module
    samples: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a model whose samples would all be the same."""
        check_count("samples", self.samples)
        if not any(module.p > 0 for module in _dropouts(self.model)):
            raise ModelError(
                "MC-dropout needs a model with nn.Dropout modules whose p is above 0, but this one has none. "
                "Train one with dropout, or use another method."
            )

    def predict_proba(self, x: Any) -> Tensor:
        """Mean probabilities [B, K]. Cost: m forward passes."""
        batch = checked_batch(self.model, x)
        with _dropping(self.model), torch.no_grad(), torch.random.fork_rng():
            count_classes(self.model, batch)
            samples = [self._sample(batch, derived_seed(self.seed, index)) for index in range(self.samples)]
        return torch.stack(samples).mean(0)

    def _sample(self, batch: Batch, seed: int) -> Tensor:
        def probabilities(inputs: Inputs) -> Tensor:
            torch.manual_seed(seed)
            return torch.softmax(example_logits(self.model, {}, inputs).double(), 0)

        return by_example(probabilities, batch, torch.arange(batch.size), randomness="same")


def _dropouts(model: nn.Module) -> list[_DropoutNd]:
    return [module for module in model.modules() if isinstance(module, _DropoutNd)]


@contextmanager
def _dropping(model: nn.Module) -> Iterator[None]:
    """Eval mode except for dropout; then every module in the mode it had.

    Transformer layers in eval mode would take a fused path that leaves out dropout modules.
    """
    modes = [(module, module.training) for module in _dropouts(model)]
    fused = torch.backends.mha.get_fastpath_enabled()
    with evaluating(model):
        torch.backends.mha.set_fastpath_enabled(False)
        for module, _ in modes:
            module.training = True
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for module, training in modes:
                module.training = training
