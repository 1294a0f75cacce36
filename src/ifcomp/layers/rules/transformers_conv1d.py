"""``transformers.pytorch_utils.Conv1D``, the linear layer of GPT-2: its weight is [inputs, outputs].

The type is registered by name, so that transformers is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ifcomp.layers.layer import TrackedModule
from ifcomp.layers.registry import Selection, qualified_name, register, trainable_names
from ifcomp.layers.rules.linear import LinearLayer, has_weight, linear_block


@dataclass(frozen=True)
class TransposedLinearLayer(LinearLayer):
    """A linear layer whose weight is transposed."""

    def gradient(self, parameter_grads: Mapping[str, Tensor]) -> Tensor:
        return super().gradient({name: grad.T if grad.dim() == 2 else grad for name, grad in parameter_grads.items()})


@register("transformers.pytorch_utils.Conv1D")
def transformers_conv1d(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """One Kronecker block."""
    parameters = [qualified_name(name, parameter) for parameter in trainable_names(module, "weight", "bias")]
    if not parameters:
        return None
    in_features, out_features = module.get_parameter("weight").shape
    block = linear_block(name, parameters, in_features, out_features)
    return TrackedModule(module, (TransposedLinearLayer(block, has_weight(parameters)),))
