"""The backward of 3 x 3 convolutions with a quarter of the multiplications: minimal filtering after Winograd.

A polynomial of degree below six is known from its values at six points, infinity among them, and the product of two
from the products of their values. So four results of a filter with three taps, ``y_t = sum_k w_k x_(t+k)``, take six
multiplications instead of twelve:

    y = E_4^T ((E_3 w) * (E_6^-T x)),        E_n = values at the six points of polynomials with n coefficients,

and a tile of 4 x 4 results, each axis for itself, takes 36 instead of 144. These multiplications are matrix products
over channels; what comes before and after is linear as well and done by matrix products, for all tiles of an axis at
once. With points that lie well, rounding in float32 is about 1e-6, two to five times that of a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

#: Where polynomials are evaluated, besides infinity; 0, 1, -1, 2, -2 lose another factor of two to rounding.
_POINTS = (0.0, 0.5**0.5, -(0.5**0.5), 2**0.5, -(2**0.5))
_VALUES = len(_POINTS) + 1
_TAPS = 3
_TILE = _VALUES - _TAPS + 1

#: What convolutions may pad with, and how much that is.
_PADDINGS = {(0, 0): 0, "valid": 0, (1, 1): 1, "same": 1, (2, 2): 2}

#: Rules of thumb, in multiplications of a plain convolution: one of the products over channels is worth so many,
_PER_PRODUCT = 1.5
#: one of those before and after,
_PER_TURN = 2.0
#: the memory that these move for a number that comes or goes,
_PER_NUMBER = 300.0
#: and the reading of one number of the transformed filters, once a backward.
_PER_FILTER = 24.0


@dataclass(frozen=True)
class QuickBackward:
    """The quick backward of a convolution; made by `quick_backward`.

    Attributes:
        module: The convolution.
    """

    module: nn.Conv2d

    def pays(self, value: Tensor, examples: int) -> bool:
        """Whether it is quicker than PyTorch's for so many inputs of the convolution that are like this one."""
        if value.device.type != "cpu" or value.dim() != 4 or {value.dtype, self.module.weight.dtype} != {torch.float32}:
            return False
        inputs, outputs = self.module.in_channels, self.module.out_channels
        rows, width = value.shape[2:]
        down, across = (_VALUES * _tiles(size) for size in (rows, width))
        turned = (rows * across * width + across * down * rows) * (inputs + outputs)
        products = down * across * inputs * outputs
        numbers = rows * width * (inputs + outputs) / 2
        quick = _PER_PRODUCT * products + _PER_TURN * turned + _PER_NUMBER * numbers
        read = _PER_FILTER * _VALUES**2 * inputs * outputs / max(examples, 1)
        return bool(quick + read < _TAPS**2 * rows * width * inputs * outputs)

    def holds(self, sizes: torch.Size) -> tuple[int, int]:
        """Numbers that it holds: transformed filters, and for an example with an input of these sizes [C, H, W]."""
        values, *channels = self.shape
        return math.prod(self.shape), 2 * values * math.prod(map(_tiles, sizes[1:])) * max(channels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the transformed weight, [36, O, C]."""
        return _VALUES**2, self.module.out_channels, self.module.in_channels

    def filters(self, out: Tensor) -> Tensor:
        """The transformed weight, in a place for it."""
        evaluate = _matrices()[1].flip(1)  # in a backward taps come the other way round
        both = torch.einsum("jb,ia->jiab", evaluate, evaluate).flatten(2).flatten(0, 1)
        taps = self.module.weight.detach().flatten(0, 1).flatten(1)
        torch.mm(both.to(taps.dtype), taps.T, out=out.flatten(1))
        return out

    def rewire(self, value: Tensor, output: Tensor, filters: Tensor) -> Tensor:
        """The convolution's output, with another way back to its input.

        Args:
            value: The input.
            output: What the convolution made of it.
            filters: Those of this convolution.
        """
        padding = _TAPS - 1 - _PADDINGS[self.module.padding]
        way_back = partial(input_gradient, filters=filters, sizes=value.shape[2:], padding=padding)
        found: Tensor = _Rewired.apply(value, output.detach(), way_back)  # type: ignore[no-untyped-call]
        return found


def quick_backward(module: nn.Module) -> QuickBackward | None:
    """That of a convolution of 3 x 3 taps, one after the other, with a forward of its class; None for all else."""
    if type(module) is not nn.Conv2d or "forward" in vars(module):
        return None
    kind = module.kernel_size, module.stride, module.dilation, module.groups, module.padding_mode
    plain = kind == ((_TAPS, _TAPS), (1, 1), (1, 1), 1, "zeros")
    return QuickBackward(module) if plain and module.padding in _PADDINGS else None


def input_gradient(gradient: Tensor, filters: Tensor, sizes: torch.Size, padding: int) -> Tensor:
    """The gradient [B, C, H, W] of a convolution's input from that of its output.

    Args:
        gradient: Of the output, [B, O, H', W'].
        filters: The transformed weight, [36, O, C].
        sizes: H and W.
        padding: Zeros before the first row and column of the output's gradient.
    """
    (examples, outputs, *given), inputs = gradient.shape, filters.shape[2]
    to_down, from_down = _axis(sizes[0], given[0], padding, False, gradient.dtype)
    to_across, from_across = _axis(sizes[1], given[1], padding, True, gradient.dtype)
    tiles = _tiles(sizes[1])
    # The last axis, then the one before: [(tile, value), (b, o, h)], then [(tile, value), (value, tile), (b, o)].
    turned = to_across @ gradient.reshape(-1, given[1]).T
    turned = to_down @ turned.view(len(to_across), -1, given[0]).transpose(1, 2)
    turned = turned.view(tiles, len(filters), -1, outputs)
    products = turned.new_empty(*turned.shape[:3], inputs)
    for each, out in zip(turned, products, strict=True):
        torch.bmm(each, filters, out=out)
    del turned, each
    found = from_down @ products.view(len(to_across), -1, examples * inputs)  # [(tile, value), h, (b, c)]
    del products, out
    found = found.flatten(1).T @ from_across.T
    return found.view(sizes[0], examples, inputs, sizes[1]).permute(1, 2, 0, 3).contiguous()


class _Rewired(torch.autograd.Function):
    """A tensor that is already there, as a function of another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, output: Tensor, way_back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.way_back = way_back
        ctx.mark_dirty(output)  # so that it may be returned as it is
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way_back(gradients[0]), None, None


def _tiles(size: int) -> int:
    return -(-size // _TILE)


@cache
def _matrices() -> tuple[Tensor, Tensor, Tensor]:
    """``E_6^-T``, ``E_3`` and ``E_4^T``, the first two with rows of one size, in float64."""
    like: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    powers = torch.tensor(_POINTS, **like).unsqueeze(1) ** torch.arange(_VALUES, **like)

    def evaluate(coefficients: int) -> Tensor:
        return torch.cat([powers[:, :coefficients], torch.eye(coefficients, **like)[-1:]])

    given, taps = torch.linalg.inv(evaluate(_VALUES)).T, evaluate(_TAPS)
    balance = (given.norm(dim=1, keepdim=True) / taps.norm(dim=1, keepdim=True)).sqrt()
    return given / balance, taps * balance, evaluate(_TILE).T


@cache
def _axis(size: int, given: int, padding: int, tiles_first: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is done to all tiles of one axis: matrices [(tile, value), given] before the products and
    [size, (tile, value)] after, or both with (value, tile).
    """
    before, _, after = _matrices()
    tiles = _tiles(size)
    there = before.new_zeros(tiles, _VALUES, padding + given + _VALUES)
    for tile, own in enumerate(there):
        own[:, _TILE * tile : _TILE * tile + _VALUES] = before
    there = there[..., padding : padding + given]
    back = torch.block_diag(*[after] * tiles)[:size].unflatten(1, (tiles, _VALUES))
    if not tiles_first:
        there, back = there.transpose(0, 1), back.transpose(1, 2)
    return there.flatten(0, 1).to(dtype), back.flatten(1).to(dtype)
