"""Scattered rows: a layer that runs on any selection of tokens, in any order.

Unpadded tokens, the data of a ``PackedSequence`` and the tokens that a router sends to an expert have no batch axis.
A row belongs to the example whose logits it influences, so backward passes with the cotangents of selected examples
determine the owner of every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Owners:
    """The example to which each row of a layer call belongs.

    Attributes:
        rows: R, the largest number of rows of an example.
    """

    def __init__(self, examples: Tensor, batch_size: int) -> None:
        """Group the rows by example.

        Args:
            examples: Example of each row, [N]; -1 for rows that do not influence the logits.
            batch_size: B.
        """
        is_owned = examples >= 0
        order = examples.where(is_owned, batch_size).argsort(stable=True)[: int(is_owned.sum())]
        counts = examples[is_owned].bincount(minlength=batch_size)
        self.rows = max(1, int(counts.max()))
        slots = torch.arange(self.rows, device=examples.device)
        self._is_used = slots < counts.unsqueeze(1)  # [B, R]
        positions = (counts.cumsum(0) - counts).unsqueeze(1) + slots
        self._index = order[positions.where(self._is_used, 0)] if len(order) else torch.zeros_like(positions)

    def by_example(self, tensor: Tensor, feature_axes: int) -> Tensor:
        """Rearrange ``[leading..., features...]`` to ``[B, R, features...]``; unused slots are zero."""
        features = tensor.shape[tensor.dim() - feature_axes :]
        rows = tensor.reshape(-1, *features)
        if not len(rows):
            return rows.new_zeros(*self._index.shape, *features)
        return rows[self._index] * self._is_used.view(*self._is_used.shape, *[1] * feature_axes).to(rows.dtype)


def find_owners(
    row_norms: Callable[[Tensor], Sequence[Tensor]], batch_size: int, device: torch.device
) -> list[Owners | None]:
    """Determine the owners of the rows of several layer calls, by two backward passes per bit of an example's index.

    Args:
        row_norms: Maps a mask of examples [B] to the norms of the output gradients of every row, [N] per call, if the
            cotangents of all other examples are zero.
        batch_size: B.
        device: Device of the masks.

    Returns:
        Owners for each call; None if a row influences the logits of several examples.
    """
    index = torch.arange(batch_size, device=device)
    examples: list[Tensor] = []
    is_shared: list[bool] = []
    for bit in range(max(1, (batch_size - 1).bit_length())):
        has_bit = (index >> bit) % 2 == 1
        of_ones, of_zeros = ([norms > 0 for norms in row_norms(mask)] for mask in (has_bit, ~has_bit))
        pairs = list(zip(of_ones, of_zeros, strict=True))
        examples = examples or [torch.where(ones | zeros, 0, -1) for ones, zeros in pairs]
        is_shared = is_shared or [False for _ in pairs]
        is_shared = [known or bool((ones & zeros).any()) for known, (ones, zeros) in zip(is_shared, pairs, strict=True)]
        examples = [
            example.where(~ones, example + (1 << bit)) for example, (ones, _) in zip(examples, pairs, strict=True)
        ]
    return [
        None if shared else Owners(example, batch_size) for shared, example in zip(is_shared, examples, strict=True)
    ]
