"""``nn.EmbeddingBag`` on inputs [B, T]: an embedding whose outputs are reduced over the bag.

While the module is recorded its ``forward`` looks up and reduces in two steps.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from ifcomp.layers.layer import Emit, TrackedModule
from ifcomp.layers.registry import Selection, register
from ifcomp.layers.rules.embedding import embedding_layer


@register(nn.EmbeddingBag)
def embedding_bag(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """One embedding block. Inputs with offsets have no batch axis and are not recorded."""
    assert isinstance(module, nn.EmbeddingBag)
    layer = embedding_layer(name, module)
    if layer is None:
        return None

    def forward(
        emit: Emit, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        if offsets is not None:
            return nn.EmbeddingBag.forward(module, input, offsets, per_sample_weights)
        vectors = emit({name: None}, input, F.embedding(input, module.weight, module.padding_idx))
        if per_sample_weights is not None:
            vectors = vectors * per_sample_weights.unsqueeze(-1)
        return _reduce(vectors, input, module)

    return TrackedModule(module, (layer,), forward)


def _reduce(vectors: Tensor, indices: Tensor, module: nn.EmbeddingBag) -> Tensor:
    """Sum, mean or maximum [B, D] of embeddings [B, T, D] over the bag, without padding."""
    if module.padding_idx is None:
        kept = indices.new_ones(indices.shape).bool().unsqueeze(-1)
    else:
        kept = (indices != module.padding_idx).unsqueeze(-1)
    if module.mode == "max":
        empty = ~kept.any(1)
        return vectors.masked_fill(~kept, -math.inf).max(1).values.masked_fill(empty, 0.0)
    total = (vectors * kept).sum(1)
    return total / kept.sum(1).clamp_min(1) if module.mode == "mean" else total
