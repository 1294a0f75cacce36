"""``nn.MultiheadAttention``: query, key, value and output projections as four linear blocks.

The module applies its projections inside one function, from one packed weight. While the module is recorded its
``forward`` is replaced by the same computation in single steps.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ifcomp.layers.layer import Emit, TrackedModule
from ifcomp.layers.registry import Selection, qualified_name, register, trainable_names
from ifcomp.layers.rules.linear import LinearLayer, has_weight, linear_block

_PROJECTIONS = ("q", "k", "v")


def _projections(name: str, module: nn.MultiheadAttention) -> list[LinearLayer]:
    packed, width = module._qkv_same_embed_dim, module.embed_dim
    layers = []
    for index, (projection, inputs) in enumerate(
        zip(_PROJECTIONS, (module.embed_dim, module.kdim, module.vdim), strict=True)
    ):
        weight = "in_proj_weight" if packed else f"{projection}_proj_weight"
        names = [qualified_name(name, parameter) for parameter in trainable_names(module, weight, "in_proj_bias")]
        block = linear_block(qualified_name(name, projection), names, inputs, width)
        layers.append(LinearLayer(block, has_weight(names), first_row=index * width))
    names = [
        qualified_name(name, f"out_proj.{parameter}")
        for parameter in trainable_names(module.out_proj, "weight", "bias")
    ]
    block = linear_block(qualified_name(name, "out_proj"), names, width, width)
    return [*layers, LinearLayer(block, has_weight(names))]


@register(nn.MultiheadAttention)
def attention(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """Four Kronecker blocks. ``bias_k`` and ``bias_v`` get diagonal blocks."""
    assert isinstance(module, nn.MultiheadAttention)
    layers = [layer for layer in _projections(name, module) if layer.block.parameters]

    def forward(emit: Emit, *args: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        def report(parts: dict[str, slice | None], value: Tensor, output: Tensor) -> Tensor:
            return emit({qualified_name(name, projection): part for projection, part in parts.items()}, value, output)

        return attend(module, report, *args, **kwargs)  # type: ignore[arg-type]

    return TrackedModule(module, tuple(layers), forward) if layers else None


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
    """Compute ``module.forward`` and report its four affine maps. ``is_causal`` only hints at the mask."""
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
    weights = _softmax(scores, mask, zero_masked=not need_weights)
    mixed = (weights @ v).transpose(1, 2).flatten(2)
    output = emit({"out_proj": None}, mixed, F.linear(mixed, module.out_proj.weight, module.out_proj.bias))
    if not module.batch_first:
        output = output.transpose(0, 1)
    if not need_weights:
        return output, None
    return output, weights.mean(1) if average_attn_weights else weights


def _softmax(scores: Tensor, mask: Tensor | None, zero_masked: bool) -> Tensor:
    """Attention weights [B, heads, length, keys] with an additive mask.

    ``zero_masked`` gives rows without a visible key the weight 0, as the module does if it returns no weights.
    """
    if mask is None:
        return scores.softmax(-1)
    if not zero_masked:
        return (scores + mask).softmax(-1)
    masked = (mask == -math.inf).all(-1, keepdim=True)
    return (scores + mask.masked_fill(masked, 0.0)).softmax(-1).masked_fill(masked, 0.0)


def _project(
    module: nn.MultiheadAttention, emit: Emit, query: Tensor, key: Tensor, value: Tensor, same: bool
) -> tuple[Tensor, ...]:
    """Queries, keys and values [B, length, E]; one packed map for self-attention, else one map each."""
    width = module.embed_dim
    if same and module._qkv_same_embed_dim:
        parts: dict[str, slice | None] = {
            projection: slice(index * width, (index + 1) * width) for index, projection in enumerate(_PROJECTIONS)
        }
        packed = emit(parts, query, F.linear(query, module.in_proj_weight, module.in_proj_bias))
        return tuple(packed.split(width, -1))
    if module._qkv_same_embed_dim:
        matrices = module.in_proj_weight.split(width)
    else:
        matrices = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = module.in_proj_bias.split(width) if module.in_proj_bias is not None else (None,) * 3
    maps = zip(_PROJECTIONS, (query, key, value), matrices, biases, strict=True)
    return tuple(emit({projection: None}, x, F.linear(x, weight, bias)) for projection, x, weight, bias in maps)


def _merged_mask(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
) -> Tensor | None:
    """Merge both masks into an additive one that broadcasts to [B, heads, length, keys]. Appended keys stay visible."""
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
