"""Per-example gradients of Kronecker blocks in the eigenbasis, a cache-sized slab at a time.

Rotating can be done before the gradient is formed (on inputs and output gradients, per position) or after it (on the
gradient, per label). Both give the same matrix; which one is cheaper depends on the shapes, and `plan_rotation` writes
the rule down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ifcomp import compiled
from ifcomp.curvature.factors import Basis
from ifcomp.layers.block import KroneckerBlock
from ifcomp.layers.capture import Recording
from ifcomp.memory import even_size

#: Entries of one slab of gradients: few enough to stay in the cache while they are squared and summed, and enough for
#: large matrix products, which two threads can share.
SLAB_ENTRIES = 1 << 21

#: The same where `ifcomp.compiled` forms them from what positions see: they alone are to stay in the cache.
FORMED_ENTRIES = 1 << 19

#: Up to so many positions squares are left to `ifcomp.compiled`; products of more are as quick by PyTorch.
_MOST_COMPILED = 256

#: Inputs that are unfolded at once: few enough to be still in the cache when gradients are formed from them, and for
#: the same memory to be used again and again.
COLUMN_ENTRIES = 1 << 21

#: A product of so many multiplications is worth a call of its own, to have its result where it is wanted.
_LARGE_PRODUCT = 1 << 20

#: Matrix products are quickest with columns in whole vectors of so many numbers, ...
_VECTOR = 8

#: ... unless that takes this much more of them.
_MOST_WIDENED = 1.25

#: Up to this many positions a basis is applied to all positions of all examples as one large matrix product.
FEW_POSITIONS = 32


@dataclass(frozen=True)
class RotationPlan:
    """When to rotate, and how much to hold at once.

    Attributes:
        inputs_first: Rotate inputs (cost T J^2) rather than gradients (cost C O J^2, C cotangents).
        outputs_first: Rotate output gradients (cost C T O^2) rather than gradients (cost C O^2 J).
        examples: Examples per slab.
        cotangents: Cotangents per slab.
        columns: Columns per slab.
        unfolded: Examples whose inputs are unfolded at once: those of some slabs.
        width: All columns: J, or a few more that are zero.
        windows: Whether `ifcomp.compiled` forms gradients, from what positions see: nothing is unfolded.
    """

    inputs_first: bool
    outputs_first: bool
    examples: int
    cotangents: int
    columns: int
    unfolded: int
    width: int
    windows: bool

    @property
    def parts(self) -> list[slice]:
        """The columns of one slab after the other."""
        return _slices(self.width, self.columns)


@dataclass(frozen=True)
class Slab:
    """Rotated gradients of some examples, cotangents and columns.

    Attributes:
        examples: Which examples of the batch.
        cotangents: Which cotangents.
        columns: Which columns of the block, and of zeros after them.
        gradients: [B', G, C', O, J']; may be changed in place, and is gone with the next slab.
    """

    examples: slice
    cotangents: slice
    columns: slice
    gradients: Tensor


def plan_rotation(
    block: KroneckerBlock, positions: int, cotangents: int, numbers: compiled.Numbers, *, together: bool = False
) -> RotationPlan:
    """Choose by counting multiplications.

    A slab has whole gradients of all cotangents, of as many examples as it can. Where those of one example outgrow it,
    it has some of their columns: what they are made from is then as it was, two threads can share many rows, and the
    curvature of these columns is read once for all cotangents. Output gradients are read again for other columns, so
    they too are of no more cotangents than a slab has room for. Gradients that are yet to be rotated stay whole.

    Args:
        block: The block.
        positions: T.
        cotangents: C.
        numbers: What gradients are made from.
        together: Whether the gradients of all cotangents are needed at once.
    """
    width = _whole_vectors(block.columns)
    inputs, outputs = block.groups * width, block.groups * block.rows
    inputs_first = block.shared_offsets or positions <= cotangents * block.rows
    each, held, part = outputs * width * cotangents, cotangents, width
    if each > SLAB_ENTRIES:
        held = cotangents if together else even_size(cotangents, SLAB_ENTRIES // (outputs * positions))
        part = _even_columns(width, SLAB_ENTRIES // (outputs * held)) if inputs_first else width
    windows = not inputs_first and block.has_windows and compiled.serves(numbers)
    if windows:
        examples, slabs = max(1, FORMED_ENTRIES // each), 1
    else:
        unfold = COLUMN_ENTRIES // (inputs * positions)
        examples = _shareable(max(1, min(SLAB_ENTRIES // each, unfold)))
        slabs = max(1, unfold // examples)
    return RotationPlan(
        inputs_first=inputs_first,
        outputs_first=positions <= block.columns,
        examples=examples,
        cotangents=held,
        columns=part,
        unfolded=slabs * examples,
        width=width,
        windows=windows,
    )


def is_compiled(block: KroneckerBlock, positions: int, cotangents: int, numbers: compiled.Numbers) -> bool:
    """Whether squares of gradients are summed by `ifcomp.compiled` as they are formed, rather than slab by slab.

    Args:
        block: The block.
        positions: T.
        cotangents: C.
        numbers: What gradients are made from.
    """
    if block.groups > 1 or positions > _MOST_COMPILED or not compiled.serves(numbers):
        return False
    plan = plan_rotation(block, positions, cotangents, numbers)
    return plan.inputs_first and plan.outputs_first


def _even_columns(width: int, largest: int) -> int:
    """The size of as few and as equal parts of all columns as can be."""
    least = fewest_columns(width)
    return least * even_size(width // least, largest // least)


def fewest_columns(width: int) -> int:
    """The smallest part of so many columns: a vector if they are whole vectors."""
    return 1 if width % _VECTOR else _VECTOR


def _shareable(count: int) -> int:
    """Hardly fewer examples, that threads can share evenly: of three that two threads share, one waits for another."""
    return count - count % min(8, 1 << (count.bit_length() - 1))


def _whole_vectors(columns: int) -> int:
    """Columns that fill whole vectors, if these are hardly more."""
    wider = -(-columns // _VECTOR) * _VECTOR
    return wider if wider <= _MOST_WIDENED * columns else columns


def widened(values: Tensor, width: int) -> Tensor:
    """Values [..., J] with zeros after them, [..., width]; the same ones where there is nothing to add."""
    return F.pad(values, (0, width - values.shape[-1])) if width > values.shape[-1] else values


def apply_basis(basis: Tensor, values: Tensor, out: Tensor | None = None) -> Tensor:
    """``Q^T v`` at every position.

    Args:
        basis: Q [G, C, C].
        values: [B, G, C, T].
        out: Where to put it; the same shape.
    """
    if values.shape[1] == 1 and values.shape[3] <= FEW_POSITIONS:
        flat = values[:, 0].transpose(1, 2)
        rotated = (flat.reshape(-1, flat.shape[-1]) @ basis[0]).view(flat.shape).transpose(1, 2).unsqueeze(1)
    elif values.shape[1] == 1:
        bases = basis.transpose(1, 2).expand(len(values), -1, -1)
        if out is not None and basis[0].numel() * values.shape[3] >= _LARGE_PRODUCT:
            torch.bmm(bases, values[:, 0], out=out[:, 0])
            return out
        rotated = torch.bmm(bases, values[:, 0]).unsqueeze(1)
    else:
        rotated = basis.transpose(-1, -2) @ values
    return rotated if out is None else out.copy_(rotated)


def put_rows(room: Tensor, found: Tensor, basis: Tensor | None) -> None:
    """Put output gradients of several cotangents [C, B, G, O, T] into their place [B, G, C, O, T].

    Args:
        room: The place.
        found: The gradients.
        basis: Q [G, O, O], to rotate them before; None leaves them as they are.
    """
    if len(found) == 1 and basis is not None:
        apply_basis(basis, found[0], room[:, :, 0])
    else:
        found = found if basis is None else apply_basis(basis, found.flatten(0, 1)).unflatten(0, found.shape[:2])
        room.copy_(found.movedim(0, 2))


def turn_rows(rows: Tensor, basis: Tensor) -> None:
    """Rotate output gradients [B, G, C, O, 1] where they are: at one position a product for all cotangents is large.

    Args:
        rows: The gradients.
        basis: Q [G, O, O].
    """
    flat = rows.squeeze(4).transpose(0, 1)
    rows.squeeze(4).copy_((flat.flatten(1, 2) @ basis).view(flat.shape).transpose(0, 1))


def rotated_columns(
    recording: Recording,
    block: KroneckerBlock,
    basis: Basis,
    examples: slice = slice(None),
    width: int | None = None,
) -> Tensor:
    """Inputs of some examples in the eigenbasis, [B, G, T, J]: large products are quickest with positions first.

    With shared offsets channels are rotated before they are unfolded, J is in the order of `KroneckerBlock.by_offset`,
    and the next call overwrites what this one returns. A width of more than J adds columns of zeros.
    """
    assert basis.inputs is not None
    width = width or block.columns
    if block.shared_offsets:
        return recording.rotated_windows(block, basis.inputs, examples, width)
    columns, turn = recording.columns(block, examples, width).transpose(-1, -2), _wide_basis(basis, width)
    if block.groups > 1:
        return columns @ turn
    flat = columns[:, 0]
    if flat.shape[1] <= FEW_POSITIONS:
        return (flat.reshape(-1, flat.shape[2]) @ turn[0]).view(flat.shape).unsqueeze(1)
    return torch.bmm(flat, turn.expand(len(flat), -1, -1)).unsqueeze(1)


def rotated_inputs(recording: Recording, block: KroneckerBlock, basis: Basis) -> Iterator[tuple[slice, Tensor]]:
    """Inputs of a block of one group in the eigenbasis [B', T, J], with zeros after J, of some examples at a time.

    The next overwrite the last.
    """
    step = even_size(recording.batch, inputs_at_once(block, recording.positions(block)))
    for some in _slices(recording.batch, step):
        yield some, rotated_columns(recording, block, basis, some, _whole_vectors(block.columns)).squeeze(1)


def inputs_at_once(block: KroneckerBlock, positions: int) -> int:
    """Of how many examples `rotated_inputs` has the inputs at once, at most."""
    return max(1, COLUMN_ENTRIES // (_whole_vectors(block.columns) * positions))


def _wide_basis(basis: Basis, width: int) -> Tensor:
    """The basis of inputs [G, J, J] with zeros around it, [G, width, width]."""
    assert basis.inputs is not None
    return widened(widened(basis.inputs, width).transpose(1, 2), width).transpose(1, 2)


def rotated_slabs(
    recording: Recording,
    block: KroneckerBlock,
    basis: Basis,
    rows: Tensor,
    plan: RotationPlan,
    last: Tensor | None = None,
) -> Iterator[Slab]:
    """All per-example gradients of a block in the eigenbasis ``Q_S^T (sum_t b_t a_t^T) Q_A``, slab by slab.

    Their columns are in the order of `KroneckerBlock.by_offset`, with zeros after them if the plan says so.

    Args:
        recording: The forward pass, for the inputs a.
        block: The block.
        basis: Its eigenbasis.
        rows: Output gradients b of all cotangents [B, G, C, O, T], rotated already if the plan says so.
        plan: When to rotate, and how much to hold at once.
        last: Coefficients [B, C] of a sum of the gradients that comes after them, in a slab of its own; the plan must
            count it, and have all cotangents in a slab.
    """
    each = min(plan.examples, recording.batch) * block.groups * block.rows * plan.columns
    largest = each * min(plan.cotangents, rows.shape[2])
    rooms = _Rooms(
        _SlabRoom(recording.room("slab", largest)),
        None if last is None else _SlabRoom(recording.room("last slab", each)),
        None if plan.outputs_first else _SlabRoom(recording.room("turned slab", largest)),
    )
    for some in _slices(recording.batch, plan.unfolded):
        yield from _slabs_of(recording, block, basis, rows, plan, some, last, rooms)


class _SlabRoom:
    """Memory for slabs, and its beginning in the shapes it was used in: these few are made once, not for every slab."""

    def __init__(self, room: Tensor) -> None:
        self._room = room
        self._shaped: dict[tuple[int, ...], Tensor] = {}

    def shaped(self, *shape: int) -> Tensor:
        """In some shape, without gaps: else products of many matrices are made one by one."""
        if shape not in self._shaped:
            self._shaped[shape] = self._room[: math.prod(shape)].view(shape)
        return self._shaped[shape]


class _Rooms(NamedTuple):
    """Memory for slabs as they are formed, for sums of them, and for rotated ones."""

    formed: _SlabRoom
    summed: _SlabRoom | None
    turned: _SlabRoom | None


def _slabs_of(
    recording: Recording,
    block: KroneckerBlock,
    basis: Basis,
    rows: Tensor,
    plan: RotationPlan,
    some: slice,
    last: Tensor | None,
    rooms: _Rooms,
) -> Iterator[Slab]:
    """The slabs of some examples, whose inputs are gone at the end.

    Python is as slow as a small product: what can be done once is not done for every slab.
    """
    inputs: Tensor | None = None
    turn = None if plan.inputs_first else _wide_basis(basis, plan.width)
    if plan.inputs_first:
        inputs = rotated_columns(recording, block, basis, some, plan.width)
    elif not plan.windows:
        inputs = recording.columns(block, some, plan.width).transpose(2, 3)
    parts, chunks = plan.parts, _slices(rows.shape[2], plan.cotangents)
    for own in _slices(some.stop - some.start, plan.examples):
        examples = slice(some.start + own.start, some.start + own.stop)
        given = rows[examples]
        outputs = [given[:, :, cotangents].flatten(2, 3).flatten(0, 1) for cotangents in chunks]  # [B G, C O, T]
        columns = [] if inputs is None else inputs[own].flatten(0, 1).split(plan.columns, 2)
        for number, kept in enumerate(parts):
            for cotangents, matrices in zip(chunks, outputs, strict=True):
                formed = rooms.formed.shaped(*matrices.shape[:2], kept.stop - kept.start)
                if plan.windows:
                    _form(formed, matrices, recording.windows(block, examples), block.has_bias)
                else:
                    torch.bmm(matrices, columns[number], out=formed)
                count = cotangents.stop - cotangents.start
                slab = rooms.formed.shaped(len(given), block.groups, count, block.rows, kept.stop - kept.start)
                slabs = [(cotangents, slab)]
                if last is not None and rooms.summed is not None:  # first, since a slab may be changed
                    after = slice(cotangents.stop, cotangents.stop + 1)
                    slabs.append((after, _summed(slab, last[examples], rooms.summed)))
                for which, found in slabs:
                    if turn is not None:
                        flat = found.transpose(0, 1).flatten(1, 3)  # one product for all gradients of a group
                        found = (flat @ turn).view(block.groups, len(slab), *found.shape[2:]).transpose(0, 1)
                    if rooms.turned is not None:
                        found = _turned(found, basis.outputs, rooms.turned)
                    yield Slab(examples, which, kept, found)


def _form(gradients: Tensor, rows: Tensor, windows: Iterable[compiled.Windows], bias: bool) -> None:
    """Gradients [N, O, J] from output gradients [N, O, T], at the positions of one use of a layer after the other."""
    gradients.zero_()
    start = 0
    for own in windows:
        compiled.add_gradients(gradients, rows[..., start : start + len(own.places)], own, bias)
        start += len(own.places)


def _turned(slab: Tensor, basis: Tensor, room: _SlabRoom) -> Tensor:
    """Gradients [B, G, C, O, J] whose rows are rotated by a basis [G, O, O]."""
    outputs = basis.transpose(-1, -2).unsqueeze(1).expand(*slab.shape[:3], -1, -1)
    found = room.shaped(*slab.shape)
    torch.bmm(outputs.flatten(0, 2), slab.flatten(0, 2), out=found.flatten(0, 2))
    return found


def _summed(slab: Tensor, coefficients: Tensor, room: _SlabRoom) -> Tensor:
    """Sums over cotangents of gradients [B, G, C, O, J] with coefficients [B, C], as [B, G, 1, O, J]."""
    size, groups, _, *shape = slab.shape
    found = room.shaped(size, groups, 1, *shape)
    each = coefficients.repeat_interleave(groups, 0).unsqueeze(1)
    torch.bmm(each, slab.flatten(0, 1).flatten(2), out=found.flatten(0, 1).flatten(2))
    return found


def _slices(size: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def sum_equal_indices(indices: Tensor, values: Tensor) -> Tensor:
    """Sum an example's values over equal indices.

    Args:
        indices: [B, T].
        values: [B, T, D].

    Returns:
        Sums [B, T, D], each at the first position of its index and zero at the others.
    """
    same = indices.unsqueeze(2) == indices.unsqueeze(1)  # [B, T, T]
    first = same.to(torch.uint8).argmax(2, keepdim=True)
    nothing = values.new_zeros(()).expand_as(values)  # not in place, which ``vmap`` of torch 2.4 would loop over
    return nothing.scatter_add(1, first.expand_as(values), values)
