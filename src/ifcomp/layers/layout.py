"""The batch axis of a layer's tensors."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor


class Layout(Enum):
    """Position of the batch among a tensor's leading axes (all axes before the layer's features)."""

    FIRST = "first"  #: [B, ..., features], or [B*T, features] with the positions of one example adjacent
    SECOND = "second"  #: [T, B, ..., features]
    FOLDED_SECOND = "folded second"  #: [T*B, features] with the examples of one position adjacent
    SHARED = "shared"  #: [1, ..., features]: one row for the whole batch; the recorder expands it to [B, ...]
    SCATTERED = "scattered"  #: [N, features]: each row belongs to one example, in any order and number

    def fits(self, shape: torch.Size, feature_axes: int, batch: int, *, expanded: bool = False) -> bool:
        """Whether a tensor of this shape can have this layout.

        Args:
            shape: Shape of the tensor.
            feature_axes: Number of trailing axes that belong to the layer.
            batch: B.
            expanded: Whether a shared row is already expanded to the batch.
        """
        leading = shape[: len(shape) - feature_axes]
        if not leading:
            return False
        if self is Layout.SCATTERED:
            return True
        if self is Layout.SECOND:
            return len(leading) > 1 and leading[1] == batch
        if self is Layout.SHARED:
            return leading[0] == (batch if expanded else 1)
        return leading[0] > 0 and leading[0] % batch == 0

    def by_example(self, tensor: Tensor, feature_axes: int, batch: int) -> Tensor:
        """Rearrange ``[leading..., features...]`` to ``[B, R, features...]`` with R rows per example.

        Scattered rows are arranged by `ifcomp.layers.scattered.Owners`.
        """
        if self is Layout.SECOND:
            tensor = tensor.transpose(0, 1)
        elif self is Layout.FOLDED_SECOND:
            tensor = tensor.unflatten(0, (-1, batch)).transpose(0, 1)
        features = tensor.shape[tensor.dim() - feature_axes :]
        return tensor.reshape(batch, -1, *features)
