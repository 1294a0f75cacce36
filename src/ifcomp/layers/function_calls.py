"""Arguments of the functions that layers are recorded by.

A reader has the signature of its function and returns the input of the layer, the weight and the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class FunctionCall:
    """One call of a function with a weight.

    Attributes:
        value: Computes the input of the layer: padded for convolutions, normalised for norms.
        weight: The weight as used.
        bias: The bias as used.
        geometry: Settings that must equal those of the module, by name of its attribute.
    """

    value: Callable[[], Tensor]
    weight: Tensor | None
    bias: Tensor | None = None
    geometry: Mapping[str, Any] = field(default_factory=dict)


def _read_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> FunctionCall:
    return FunctionCall(lambda: input, weight, bias)


def _read_embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> FunctionCall:
    return FunctionCall(lambda: input, weight, geometry={"padding_idx": padding_idx})


def _read_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> FunctionCall:
    kernel = weight.shape[2:]
    spread = _each_axis(dilation, len(kernel))

    def padded() -> Tensor:
        if isinstance(padding, str):
            totals = [step * (size - 1) if padding == "same" else 0 for step, size in zip(spread, kernel, strict=True)]
            widths = [width for total in reversed(totals) for width in (total // 2, total - total // 2)]
        else:
            widths = [width for size in reversed(_each_axis(padding, len(kernel))) for width in (size, size)]
        return F.pad(input, widths)

    geometry = {"stride": _each_axis(stride, len(kernel)), "dilation": spread, "groups": groups}
    return FunctionCall(padded, weight, bias, geometry)


def _read_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> FunctionCall:
    return FunctionCall(lambda: F.layer_norm(input, list(normalized_shape), eps=eps), weight, bias)


def _read_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> FunctionCall:
    return FunctionCall(lambda: F.rms_norm(input, list(normalized_shape), eps=eps), weight)


def _read_group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> FunctionCall:
    return FunctionCall(lambda: F.group_norm(input, num_groups, eps=eps), weight, bias)


def _read_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> FunctionCall:
    return FunctionCall(lambda: F.batch_norm(input, running_mean, running_var, eps=eps), weight, bias)


def _each_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """A setting of a convolution for every axis."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * (axes // len(values)) if len(values) < axes else values


READERS: Mapping[Callable[..., Any], Callable[..., FunctionCall]] = {
    F.linear: _read_linear,
    F.embedding: _read_embedding,
    F.conv1d: _read_conv,
    F.conv2d: _read_conv,
    F.conv3d: _read_conv,
    F.layer_norm: _read_layer_norm,
    F.rms_norm: _read_rms_norm,
    F.group_norm: _read_group_norm,
    F.batch_norm: _read_batch_norm,
}
