"""MC dropout: the mean over random dropout masks at prediction time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from experiments.baselines.inference import forward, nonempty_batch, on_device
from experiments.baselines.interface import check_count, derived_seed
from experiments.baselines.per_example import Inputs, example_logits, map_examples
from ifcomp.data.batches import Batch
from ifcomp.errors import ModelError
from ifcomp.layers.forward import evaluating


@dataclass(frozen=True)
class MonteCarloDropout:
    """``1/m sum_i softmax(f(x; mask_i))`` over m random masks.

    ``Dropout`` modules are in train mode, all other modules in eval mode. One sample is one mask, which all examples
    share, so that results do not depend on the batch.

    Attributes:
        model: A classifier that was trained with dropout.
        samples: m, 30 in the paper.
        seed: Seed of the masks.
    """

    model: nn.Module
    samples: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ModelError if the model has no active dropout: all its samples would be equal."""
        check_count("samples", self.samples)
        if not any(module.p > 0 for module in _dropouts(self.model)):
            raise ModelError(
                "MC dropout needs a model with nn.Dropout modules whose p is above 0, but this one has none. "
                "Train one with dropout, or use another method."
            )

    def predict_proba(self, x: Any) -> Tensor:
        """Return the mean probabilities, [B, K]. Cost: m forward passes."""
        batch = on_device(self.model, nonempty_batch(x))
        with _active_dropout(self.model), torch.no_grad(), torch.random.fork_rng():
            forward(self.model, batch.select(slice(0, 1)))  # raises if the output is not logits
            samples = [self._sample(batch, derived_seed(self.seed, index)) for index in range(self.samples)]
        return torch.stack(samples).mean(0)

    def _sample(self, batch: Batch, seed: int) -> Tensor:
        """Return the probabilities [B, K] with one mask."""

        def probabilities(inputs: Inputs) -> Tensor:
            torch.manual_seed(seed)
            return torch.softmax(example_logits(self.model, {}, inputs).double(), 0)

        return map_examples(probabilities, batch, torch.arange(batch.size), randomness="same")


def _dropouts(model: nn.Module) -> list[_DropoutNd]:
    return [module for module in model.modules() if isinstance(module, _DropoutNd)]


@contextmanager
def _active_dropout(model: nn.Module) -> Iterator[None]:
    """Set dropout modules to train mode and all others to eval mode; restore the modes on exit.

    The fused path of transformer layers is disabled: in eval mode it skips dropout modules.
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
