"""``nn.MultiheadAttention``: query, key, value and output projections as four linear blocks.

The module keeps its projections inside one function call, packed in one weight, so while it is recorded its
``forward`` is replaced by the same computation written out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifcomp.layers.block import Emit, Site
from ifcomp.layers.linear import LinearBlock, linear_block
from ifcomp.layers.registry import Selection, qualified, register, trainable

_PROJECTIONS = ("q", "k", "v")


def _projection_blocks(name: str, module: nn.MultiheadAttention) -> list[LinearBlock]:
    packed = module._qkv_same_embed_dim
    widths = dict(zip(_PROJECTIONS, (module.embed_dim, module.kdim, module.vdim), strict=True))
    blocks = []
    for index, projection in enumerate(_PROJECTIONS):
        weight = "in_proj_weight" if packed else f"{projection}_proj_weight"
        names = [qualified(name, own) for own in trainable(module, weight, "in_proj_bias")]
        first_row = index * module.embed_dim
        blocks.append(linear_block(qualified(name, projection), names, widths[projection], module.embed_dim, first_row))
    output = [qualified(name, f"out_proj.{own}") for own in trainable(module.out_proj, "weight", "bias")]
    blocks.append(linear_block(qualified(name, "out_proj"), output, module.embed_dim, module.embed_dim))
    return blocks


@register(nn.MultiheadAttention)
def attention(name: str, module: nn.Module, selection: Selection) -> Site | None:
    """Four Kronecker blocks; ``bias_k`` and ``bias_v``, where they exist, are other parameters."""
    assert isinstance(module, nn.MultiheadAttention)
    blocks = [block for block in _projection_blocks(name, module) if block.parameters]

    def forward(emit: Emit, *args: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        def report(parts: dict[str, slice | None], value: Tensor, output: Tensor) -> Tensor:
            return emit({qualified(name, own): part for own, part in parts.items()}, value, output)

        return attend(module, report, *args, **kwargs)  # type: ignore[arg-type]

    return Site(module, tuple(blocks), forward) if blocks else None


def attend(
    module: nn.MultiheadAttention,
    emit: Emit,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What ``module.forward`` computes, with its four affine maps reported. ``is_causal`` only hints at
    ``attn_mask``.
    """
    same = query is key and key is value
    if query.dim() == 2:
        raise RuntimeError("attention over an unbatched [length, features] input mixes the examples of a batch")
    if not module.batch_first:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    q, k, v = _project(module, emit, query, key, value, same)
    mask = _merged_mask(module, q, k, attn_mask, key_padding_mask)
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, module.bias_k.expand(len(k), 1, -1)], 1)
        v = torch.cat([v, module.bias_v.expand(len(v), 1, -1)], 1)
    q, k, v = (tensor.unflatten(2, (module.num_heads, -1)).transpose(1, 2) for tensor in (q, k, v))
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = (scores if mask is None else scores + mask).softmax(-1)
    mixed = (weights @ v).transpose(1, 2).flatten(2)
    output = emit({"out_proj": None}, mixed, F.linear(mixed, module.out_proj.weight, module.out_proj.bias))
    if not module.batch_first:
        output = output.transpose(0, 1)
    if not need_weights:
        return output, None
    return output, weights.mean(1) if average_attn_weights else weights


def _project(
    module: nn.MultiheadAttention, emit: Emit, query: Tensor, key: Tensor, value: Tensor, same: bool
) -> tuple[Tensor, ...]:
    """Queries, keys and values [B, length, E]; one packed map for self-attention, else one map each."""
    width = module.embed_dim
    if same and module._qkv_same_embed_dim:
        parts: dict[str, slice | None] = {own: slice(i * width, (i + 1) * width) for i, own in enumerate(_PROJECTIONS)}
        packed = emit(parts, query, F.linear(query, module.in_proj_weight, module.in_proj_bias))
        return tuple(packed.split(width, -1))
    if module._qkv_same_embed_dim:
        matrices = module.in_proj_weight.split(width)
    else:
        matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = module.in_proj_bias.split(width) if module.in_proj_bias is not None else (None,) * 3
    maps = zip(_PROJECTIONS, (query, key, value), matrices, biases, strict=True)
    return tuple(emit({own: None}, x, F.linear(x, weight, bias)) for own, x, weight, bias in maps)


def _merged_mask(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
) -> Tensor | None:
    """Both masks as one additive tensor that broadcasts to [B, heads, length, keys], open for appended keys."""
    merged: Tensor | None = None
    for mask, shape in ((attn_mask, None), (key_padding_mask, (len(q), 1, 1, k.shape[1]))):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -math.inf)
        if shape is not None:
            mask = mask.view(shape)
        elif mask.dim() == 3:
            mask = mask.unflatten(0, (len(q), module.num_heads))
        merged = mask if merged is None else merged + mask
    extra = (module.bias_k is not None) + module.add_zero_attn
    return merged if merged is None or not extra else F.pad(merged, (0, extra))
