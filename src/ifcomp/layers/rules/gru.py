"""``nn.GRU``: any number of layers, both directions, packed sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ifcomp.layers.layer import TrackedModule
from ifcomp.layers.registry import Selection, register
from ifcomp.layers.rules.recurrent import Cell, States, tracked_recurrence


class GRUCell(Cell):
    """``h' = (1 - z) n + z h`` with ``n = tanh(n_x + r n_h)``; the gates are in the order r, z, n."""

    maps = (("ih",), ("hh",))

    def step(self, projected: States, states: States) -> States:
        _, z, n, _ = _gates(*projected)
        return (n + z * (states[0] - n),)

    def connect(self, projected: States, initial: States, states: States, weight: Tensor) -> States:
        with torch.no_grad():
            r, z, n, n_h = _gates(*(part.transpose(0, 1) for part in projected))  # [T, B, H] each
            previous = torch.cat([initial[0].unsqueeze(0), states[0].transpose(0, 1)[:-1]])
            n_slopes = (1 - z) * (1 - n.square())
            slopes = torch.stack([n_slopes * n_h * r * (1 - r), (previous - n) * z * (1 - z), n_slopes], 2)
            recurrent_slopes = torch.stack([*slopes.unbind(2)[:2], n_slopes * r], 2)
        output: Tensor = _GRURecurrence.apply(  # type: ignore[no-untyped-call]
            *projected, *initial, *states, z, slopes, recurrent_slopes, weight
        )
        return (output,)


def _gates(projected: Tensor, recurrent: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gates r, z, n and the recurrent part of n."""
    (r, z, n), (r_h, z_h, n_h) = projected.chunk(3, -1), recurrent.chunk(3, -1)
    reset = (r + r_h).sigmoid()
    return reset, (z + z_h).sigmoid(), (n + reset * n_h).tanh(), n_h


class _GRURecurrence(Function):
    """Backpropagation through time for known states h [B, T, H].

    ``slopes`` and ``recurrent_slopes`` [T, B, 3, H] are the derivatives of h' with respect to the two projections,
    ``update`` [T, B, H] is the one with respect to h.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        projected: Tensor,
        recurrent: Tensor,
        initial: Tensor,
        h: Tensor,
        update: Tensor,
        slopes: Tensor,
        recurrent_slopes: Tensor,
        weight: Tensor,
    ) -> Tensor:
        return h.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[4:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        update, slopes, recurrent_slopes, weight = ctx.saved_tensors
        steps = F.pad(grads[0].transpose(0, 1), (0, 0, 0, 0, 1, 0))  # [1 + T, B, H]
        h = steps[-1]
        states, gates = [], []
        for step in reversed(range(len(update))):
            states.append(h)
            gates.append((h.unsqueeze(1) * recurrent_slopes[step]).flatten(1))
            h = torch.addmm(torch.addcmul(steps[step], h, update[step]), gates[-1], weight)
        projected = torch.stack(states[::-1], 1).unsqueeze(2) * slopes.transpose(0, 1)
        return projected.flatten(2), torch.stack(gates[::-1], 1), h, *[None] * 5


@register(nn.GRU)
def gru(name: str, module: nn.Module, selection: Selection) -> TrackedModule | None:
    """Two Kronecker blocks for each layer and direction."""
    assert isinstance(module, nn.GRU)
    return tracked_recurrence(name, module, GRUCell())
