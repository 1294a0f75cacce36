"""``nn.LSTM``: any number of layers, both directions, packed sequences; without ``proj_size``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ifcomp.layers.layer import TrackedModule
from ifcomp.layers.registry import Selection, register
from ifcomp.layers.rules.recurrent import Cell, States, tracked_recurrence


class LSTMCell(Cell):
    """``c' = f c + i g`` and ``h' = o tanh(c')``; the gates are in the order i, f, g, o."""

    maps = (("ih", "hh"),)

    def step(self, projected: States, states: States) -> States:
        i, f, g, o = projected[0].chunk(4, -1)
        c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def connect(self, projected: States, initial: States, states: States, weight: Tensor) -> States:
        with torch.no_grad():
            i, f, g, o = projected[0].transpose(0, 1).chunk(4, -1)  # [T, B, H] each
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            c = states[1].transpose(0, 1)
            previous, activated = torch.cat([initial[1].unsqueeze(0), c[:-1]]), c.tanh()
            cell_slopes = o * (1 - activated.square())
            gate_slopes = torch.stack(
                [g * i * (1 - i), previous * f * (1 - f), i * (1 - g.square()), activated * o * (1 - o)], 2
            )
        h, c = _LSTMRecurrence.apply(*projected, *initial, *states, f, cell_slopes, gate_slopes, weight)  # type: ignore[no-untyped-call]
        return h, c


class _LSTMRecurrence(Function):
    """Backpropagation through time for known states h and c [B, T, H].

    ``gate_slopes`` [T, B, 4, H] are the derivatives of c' with respect to i, f, g and of h' with respect to o.
    ``cell_slopes`` [T, B, H] are the derivatives of h' with respect to c'.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        gates: Tensor,
        initial_h: Tensor,
        initial_c: Tensor,
        h: Tensor,
        c: Tensor,
        forget: Tensor,
        cell_slopes: Tensor,
        gate_slopes: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return h.clone(), c.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[5:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forget, cell_slopes, gate_slopes, weight = ctx.saved_tensors
        h_steps, c_steps = (F.pad(grad.transpose(0, 1), (0, 0, 0, 0, 1, 0)) for grad in grads)  # [1 + T, B, H]
        h, c = h_steps[-1], c_steps[-1]
        gates = []
        for step in reversed(range(len(forget))):
            c = torch.addcmul(c, h, cell_slopes[step])
            gates.append((torch.stack([c, c, c, h], 1) * gate_slopes[step]).flatten(1))
            h = torch.addmm(h_steps[step], gates[-1], weight)
            c = torch.addcmul(c_steps[step], c, forget[step])
        return torch.stack(gates[::-1], 1), h, c, *[None] * 6


@register(nn.LSTM)
def lstm(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """One Kronecker block for each layer and direction."""
    assert isinstance(module, nn.LSTM)
    return tracked_recurrence(name, module, LSTMCell())
