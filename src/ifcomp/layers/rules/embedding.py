"""``nn.Embedding``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifcomp.blocks.embedding import EmbeddingBlock
from ifcomp.layers.layer import Layer, TrackedModule
from ifcomp.layers.registry import Selection, qualified_name, register, trainable_names


@dataclass(frozen=True)
class EmbeddingLayer(Layer):
    """Inputs are indices without feature axes; outputs have one.

    Attributes:
        padding: Index that gets no gradient, or None.
    """

    block: EmbeddingBlock
    padding: int | None
    counts_tokens: ClassVar[bool] = True

    def features(self, value: Tensor, kept: Tensor | None) -> Tensor | None:
        """Counts of all tokens [B, V]."""
        known = self.kept_positions(value)
        weights = torch.ones_like(value, dtype=torch.bool) if known is None else known
        if kept is not None and kept.shape == value.shape:
            weights = weights & kept
        counts = torch.zeros(len(value), self.block.entries, device=value.device)
        return counts.scatter_add_(1, value.long(), weights.to(counts.dtype))

    def kept_positions(self, value: Tensor) -> Tensor | None:
        return None if self.padding is None else value != self.padding

    @property
    def function(self) -> Callable[..., Tensor]:
        return F.embedding

    def by_function(self) -> Layer:
        return self

    def input_axes(self, value: Tensor) -> int:
        return 0

    def output_axes(self, grad: Tensor) -> int:
        return 1

    def inputs(self, values: Sequence[Tensor], output_sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.cat(list(values), 1)

    def output_grads(self, grads: Sequence[Tensor], inputs: Tensor) -> Tensor:
        joined = torch.cat(list(grads), 1)
        return joined if self.padding is None else joined * (inputs != self.padding).unsqueeze(-1)

    def gradient(self, parameter_grads: Mapping[str, Tensor]) -> Tensor:
        return parameter_grads[self.block.parameters[0]].T.flatten()


def embedding_layer(name: str, module: nn.Embedding | nn.EmbeddingBag) -> EmbeddingLayer | None:
    """Build the layer of a table; None if it is frozen."""
    if not trainable_names(module, "weight"):
        return None
    parameters = (qualified_name(name, "weight"),)
    shape = (module.num_embeddings, module.embedding_dim)
    block = EmbeddingBlock(name, type(module).__name__.lower(), parameters, module.weight.numel(), *shape)
    return EmbeddingLayer(block, True, module.padding_idx)


@register(nn.Embedding)
def embedding(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """One embedding block. The inventory refuses ``max_norm``, which changes the weights in the forward pass."""
    assert isinstance(module, nn.Embedding)
    layer = embedding_layer(name, module)
    return None if layer is None else TrackedModule(module, (layer,))
