"""Sequences of different lengths: packed and padded, in the order of the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence


def has_batch_order(input: Tensor | PackedSequence) -> bool:
    """Whether the examples have the order of the batch.

    Unbatched inputs have no batch axis. Sequences that were sorted before they were packed have an unknown order.
    """
    return input.sorted_indices is not None if isinstance(input, PackedSequence) else input.dim() == 3


def unpack(input: Tensor | PackedSequence, batch_first: bool) -> tuple[Tensor, Tensor | None]:
    """Sequences [B, T, features], and their lengths [B] if they were packed."""
    if not isinstance(input, PackedSequence):
        return (input if batch_first else input.transpose(0, 1)), None
    values, lengths = pad_packed_sequence(input, batch_first=True)
    return values, lengths.to(values.device)


def pack(values: Tensor, like: Tensor | PackedSequence, batch_first: bool) -> Tensor | PackedSequence:
    """Convert sequences [B, T, features] to the form of another input of the module."""
    if not isinstance(like, PackedSequence):
        return values if batch_first else values.transpose(0, 1)
    assert like.sorted_indices is not None
    values = values[like.sorted_indices]
    steps = [values[:size, step] for step, size in enumerate(like.batch_sizes.tolist())]
    return PackedSequence(torch.cat(steps), like.batch_sizes, like.sorted_indices, like.unsorted_indices)


def clear(values: Tensor, lengths: Tensor | None) -> Tensor:
    """Set values [B, T, features] after the end of a sequence to zero."""
    if lengths is None:
        return values
    steps = torch.arange(values.shape[1], device=values.device)
    return values.masked_fill((steps >= lengths[:, None]).unsqueeze(-1), 0.0)


def reverse(values: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse every sequence of [B, T, features] within its length."""
    if lengths is None:
        return values.flip(1)
    steps = torch.arange(values.shape[1], device=values.device)
    order = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)
    return values.gather(1, order.unsqueeze(-1).expand_as(values))
