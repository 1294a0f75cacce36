"""Scattered rows: a layer that runs on any selection of tokens, in any order.

Unpadded tokens, the data of a ``PackedSequence`` and the tokens that a router sends to an expert have no batch axis.
A row belongs to the example whose logits it influences, so backward passes with scaled cotangents determine the owner
of every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Number of examples that one backward pass distinguishes; the powers of two stay in the range of float16.
_BASE = 8

#: Largest relative error of the gradient of a row with one owner.
_TOLERANCE = 1e-2


class Owners:
    """The example to which each row of a layer call belongs.

    Attributes:
        examples: Example of each row, [N]; -1 for rows that do not influence the logits.
        rows: R, the largest number of rows of an example.
        is_used: Whether an example has a row at this place, [B, R].
    """

    def __init__(self, examples: Tensor, batch_size: int) -> None:
        """Group the rows by example.

        Args:
            examples: Example of each row, [N]; -1 for rows that do not influence the logits.
            batch_size: B.
        """
        self.examples = examples
        is_owned = examples >= 0
        order = examples.where(is_owned, batch_size).argsort(stable=True)[: int(is_owned.sum())]
        counts = examples[is_owned].bincount(minlength=batch_size)
        self.rows = max(1, int(counts.max()))
        slots = torch.arange(self.rows, device=examples.device)
        self.is_used = slots < counts.unsqueeze(1)  # [B, R]
        positions = (counts.cumsum(0) - counts).unsqueeze(1) + slots
        self._index = order[positions.where(self.is_used, 0)] if len(order) else torch.zeros_like(positions)

    def by_example(self, tensor: Tensor, feature_axes: int) -> Tensor:
        """Rearrange ``[leading..., features...]`` to ``[B, R, features...]``; unused slots are zero."""
        features = tensor.shape[tensor.dim() - feature_axes :]
        rows = tensor.reshape(-1, *features)
        if not len(rows):
            return rows.new_zeros(*self._index.shape, *features)
        return rows[self._index] * self.is_used.view(*self.is_used.shape, *[1] * feature_axes).to(rows.dtype)


def find_owners(
    row_grads: Callable[[Tensor], Sequence[Tensor]], batch_size: int, device: torch.device
) -> list[Owners | None]:
    """Determine the owners of the rows of several layer calls.

    A backward pass multiplies the cotangent of every example by a power of two, whose exponent is a digit of the
    example's index. The gradient of a row is multiplied by the power of its owner. Powers of two do not round.

    Args:
        row_grads: Maps factors of the examples [B] to the output gradients of every row, [N, features] per call.
        batch_size: B.
        device: Device of the factors.

    Returns:
        Owners for each call; None if a row influences the logits of several examples.
    """
    index = torch.arange(batch_size, device=device)
    plain = [grads.float() for grads in row_grads(torch.ones(batch_size, device=device))]
    examples = [torch.where(grads.any(1), 0, -1) for grads in plain]
    is_shared = [False for _ in plain]
    place = 1
    while place < batch_size:
        scaled = [grads.float() for grads in row_grads(torch.exp2((index // place % _BASE).float()))]
        for call, (grads, powers) in enumerate(zip(plain, scaled, strict=True)):
            digits = _exponents(grads, powers)
            error = (powers - torch.exp2(digits).unsqueeze(1) * grads).norm(dim=1)
            is_shared[call] |= bool((error > _TOLERANCE * powers.norm(dim=1)).any())
            examples[call] = torch.where(examples[call] < 0, -1, examples[call] + place * digits.long())
        place *= _BASE
    is_shared = [
        shared or bool((example >= batch_size).any()) for shared, example in zip(is_shared, examples, strict=True)
    ]
    return [
        None if shared else Owners(example, batch_size) for shared, example in zip(is_shared, examples, strict=True)
    ]


def _exponents(plain: Tensor, scaled: Tensor) -> Tensor:
    """Exponents of the powers of two by which rows were multiplied, [N]; 0 for rows without gradient."""
    unit = plain.abs().amax(1, keepdim=True).clamp(min=torch.finfo(plain.dtype).tiny)  # against underflow of squares
    rows = plain / unit
    ratio = (scaled / unit * rows).sum(1) / rows.square().sum(1).clamp(min=torch.finfo(plain.dtype).tiny)
    return ratio.clamp(1, 2 ** (_BASE - 1)).log2().round()
