"""``nn.Embedding``: a Kronecker block with one-hot inputs that are never materialised."""

from __future__ import annotations

from torch import Tensor, nn

from ifcomp.layers.block import IndexedBlock, Site
from ifcomp.layers.registry import Selection, qualified, register, trainable


class EmbeddingBlock(IndexedBlock):
    """Inputs are indices without features, outputs have one feature axis."""

    def input_axes(self, value: Tensor) -> int:
        return 0

    def output_axes(self, gradient: Tensor) -> int:
        return 1


@register(nn.Embedding)
def embedding(name: str, module: nn.Module, selection: Selection) -> Site | None:
    """One indexed block. With ``max_norm`` the forward pass changes the weights, so the inventory refuses it."""
    assert isinstance(module, nn.Embedding)
    if not trainable(module, "weight"):
        return None
    block = EmbeddingBlock(
        name=name,
        kind="embedding",
        parameters=(qualified(name, "weight"),),
        size=module.weight.numel(),
        entries=module.num_embeddings,
        width=module.embedding_dim,
        padding=module.padding_idx,
    )
    return Site(module, (block,))
