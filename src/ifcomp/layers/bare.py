"""Parameters that are used without a module: scales, shifts, class tokens, position embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp.layers.layer import Layer


@dataclass(frozen=True)
class BareParameterLayer(Layer):
    """A parameter that is broadcast against the batch.

    `ifcomp.layers.functions` reports one copy of the parameter per row. The gradient of an example is the sum over its
    copies.
    """

    def input_axes(self, value: Tensor) -> int:
        return value.dim() - 1

    def inputs(self, values: Sequence[Tensor], output_sizes: Sequence[int], dtype: torch.dtype) -> None:
        """The gradient does not depend on inputs."""

    def output_grads(self, grads: Sequence[Tensor], inputs: None) -> Tensor:
        """Return the gradients of the parameter, [B, P]."""
        return torch.stack([grad.sum(1).flatten(1) for grad in grads]).sum(0)
