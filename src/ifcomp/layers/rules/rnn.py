"""``nn.RNN``: tanh and ReLU, any number of layers, both directions, packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ifcomp.layers.layer import TrackedModule
from ifcomp.layers.registry import Selection, register
from ifcomp.layers.rules.recurrent import Cell, States, tracked_recurrence


@dataclass(frozen=True)
class RNNCell(Cell):
    """``h' = tanh(x + h)`` of projected x and h, or the ReLU of the sum."""

    is_relu: bool

    maps = (("ih", "hh"),)

    def step(self, projected: States, states: States) -> States:
        return (projected[0].relu() if self.is_relu else projected[0].tanh(),)

    def connect(self, projected: States, initial: States, states: States, weight: Tensor) -> States:
        h = states[0].transpose(0, 1)
        slopes = (h > 0).to(h.dtype) if self.is_relu else 1 - h.square()
        output: Tensor = _RNNRecurrence.apply(*projected, *initial, *states, slopes, weight)  # type: ignore[no-untyped-call]
        return (output,)


class _RNNRecurrence(Function):
    """Backpropagation through time for known states h [B, T, H]; ``slopes`` [T, B, H] are those of the activation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(total: Tensor, initial: Tensor, h: Tensor, slopes: Tensor, weight: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slopes, weight = ctx.saved_tensors
        steps = F.pad(grads[0].transpose(0, 1), (0, 0, 0, 0, 1, 0))  # [1 + T, B, H]
        h = steps[-1]
        totals = []
        for step in reversed(range(len(slopes))):
            totals.append(h * slopes[step])
            h = torch.addmm(steps[step], totals[-1], weight)
        return torch.stack(totals[::-1], 1), h, *[None] * 3


@register(nn.RNN)
def rnn(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """One Kronecker block for each layer and direction."""
    assert isinstance(module, nn.RNN)
    return tracked_recurrence(name, module, RNNCell(module.nonlinearity == "relu"))
