"""What a fit holds, in bytes, and whether there is room for it: known before the first pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from ifcomp import compiled
from ifcomp.curvature.factors import FitSettings
from ifcomp.curvature.rotation import (
    FEW_POSITIONS,
    FORMED_ENTRIES,
    SLAB_ENTRIES,
    fewest_columns,
    inputs_at_once,
    is_compiled,
    plan_rotation,
)
from ifcomp.data.batches import Batch
from ifcomp.errors import MemoryLimitError
from ifcomp.layers.block import Block, IndexedBlock, KroneckerBlock
from ifcomp.layers.session import Footprint, Holds, Session
from ifcomp.memory import Budget, as_text

#: Matrices in float64 that an eigendecomposition holds: the matrix, the identity, their sum, the vectors, and the work
#: space of LAPACK's divide and conquer, two more.
_EIGEN_MATRICES = 6

#: Layers named in a message at most.
_SHOWN = 5


def factor_shapes(block: Block) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]:
    """Shapes of a block's second moments, input basis and output basis; None where it has none."""
    if isinstance(block, KroneckerBlock):
        groups, rows = block.groups, block.rows
        return (groups, rows, block.columns), (groups, block.channels, block.channels), (groups, rows, rows)
    if isinstance(block, IndexedBlock):
        return (1, block.width, block.entries), None, (1, block.width, block.width)
    return (block.size,), None, None


def block_bytes(block: Block, item_bytes: int) -> tuple[int, int, int]:
    """Bytes of a block's second moments, input covariance (or basis) and output covariance (or basis)."""
    moments, inputs, outputs = (0 if shape is None else math.prod(shape) * item_bytes for shape in factor_shapes(block))
    return moments, inputs, outputs


def covariance_bytes(blocks: Sequence[Block], item_bytes: int, fits: int = 1) -> int:
    """What the first pass holds whatever the data is: the covariances, and the largest once more while it is added."""
    found = [block_bytes(block, item_bytes) for block in blocks]
    return sum(inputs + fits * outputs for _, inputs, outputs in found) + max(
        (max(own[1:]) for own in found), default=0
    )


def eigen_bytes(blocks: Sequence[Block], item_bytes: int, fits: int = 1) -> int:
    """What the eigendecompositions between the passes hold: covariances, bases, and one decomposition at work."""
    found = [block_bytes(block, item_bytes) for block in blocks]
    both = 2 * sum(inputs + fits * outputs for _, inputs, outputs in found)
    return both + max((max(own[1:]) for own in found), default=0) * 8 * _EIGEN_MATRICES // item_bytes


def factor_bytes(blocks: Sequence[Block], item_bytes: int, fits: int = 1) -> int:
    """What the second pass holds whatever the data is: eigenbases and second moments, those of a fit."""
    found = [block_bytes(block, item_bytes) for block in blocks]
    return sum(inputs + fits * (moments + outputs) for moments, inputs, outputs in found)


def checkpoint_bytes(blocks: Sequence[Block], item_bytes: int, fits: int = 1) -> int:
    """Bytes of the largest checkpoint of a fit: covariances and their eigenvectors, or the factors."""
    found = [block_bytes(block, item_bytes) for block in blocks]
    return max(2 * sum(inputs + fits * outputs for _, inputs, outputs in found), factor_bytes(blocks, item_bytes, fits))


def product_bytes(session: Session, footprint: Footprint, examples: int, cotangents: int) -> int:
    """What the first pass holds for a piece: a recording, and one backward, or one layer's inputs as they are unfolded
    and, if need be, rearranged for a matrix product.
    """
    inputs = [shape.numel() * (1 if multiplies_straight(shape) else 2) for shape in footprint.covered.values()]
    working = max(
        session.backward_bytes(footprint, examples, cotangents), examples * max(inputs, default=0) * session.item_bytes
    )
    fixed = footprint.graph + footprint.passing
    return examples * fixed + working + session.label_bytes(examples, cotangents)


def multiplies_straight(shape: torch.Size) -> bool:
    """Whether values [..., G, C, T] are multiplied with themselves as they are, since positions are many."""
    return shape[-3] == 1 and shape[-1] >= shape[-2]


def slab_bytes(session: Session, footprint: Footprint, examples: int, cotangents: int, left: int = 1) -> int:
    """What the second pass holds for a piece: a recording, the inputs of some examples as they are unfolded and
    rotated, and slabs of gradients, one more for each basis that is applied to them.

    Rooms that layers share are as large as any layer needs, and stay.

    Args:
        session: The model and its blocks.
        footprint: Of an example.
        examples: In the piece.
        cotangents: At once.
        left: How many there may be at the end.
    """
    held = [
        _slab_entries(block, positions, examples, count, footprint.images.get(block.name, 0), session)
        for block in session.kronecker
        if isinstance(block, KroneckerBlock) and (positions := footprint.positions.get(block.name, 0))
        for count in {1, left, cotangents}  # fewer gradients let more inputs be there
    ]
    *rooms, passing = (max(entries) for entries in zip(*held, strict=True)) if held else (0, 0)
    recording = session.recording_bytes(footprint, examples, cotangents, passing * session.item_bytes)
    return recording + sum(rooms) * session.item_bytes


def _slab_entries(
    block: KroneckerBlock, positions: int, examples: int, cotangents: int, image: int, numbers: compiled.Numbers
) -> tuple[int, int, int, int]:
    """Numbers that are there while gradients of a block are formed: in the rooms for slabs, for rotated slabs and for
    unfolded inputs, and others. ``image`` is how many an example's image has.
    """
    plan = plan_rotation(block, positions, cotangents, numbers)
    inputs = block.groups * (block.columns if positions == 1 else plan.width) * positions
    unfolded = examples if positions == 1 else min(plan.unfolded, examples)
    columns = inputs * unfolded
    if positions == 1:
        return 0, 0, columns, columns
    if is_compiled(block, positions, cotangents, numbers):
        at_once = min(inputs_at_once(block, positions), examples)
        columns = inputs * at_once
        panels = math.prod(compiled.panels_shape(block.rows, block.columns))
        scratch = torch.get_num_threads() * compiled.scratch_entries(at_once, cotangents, block.rows, positions)
        turned = columns * _copies(block, positions) + 2 * plan.width**2  # by the basis with zeros around it
        return 0, 0, columns, 2 * panels + scratch + (0 if block.shared_offsets else turned)
    outputs = block.groups * block.rows
    held = min(cotangents, max(1, SLAB_ENTRIES // (outputs * positions)))  # fewer may be left than are planned for
    least = held * outputs * (fewest_columns(plan.width) if plan.inputs_first else plan.width)
    each = cotangents * outputs * plan.width
    room = max(FORMED_ENTRIES, min(each, SLAB_ENTRIES)) if plan.windows else SLAB_ENTRIES
    slab = min(examples * each, max(room, least))
    turned = 0 if plan.outputs_first else slab
    bases = 0
    if block.groups > 1 and turned:  # a product of groups repeats its basis
        bases += min(plan.examples, examples) * plan.cotangents * block.groups * block.rows**2
    if block.groups > 1 and plan.inputs_first and not block.shared_offsets:
        bases += unfolded * block.groups * plan.width**2
    if plan.width > block.columns:  # the basis with zeros around it
        bases += 0 if block.shared_offsets else 2 * block.groups * plan.width**2
    copies = (plan.width > block.columns) + (each > SLAB_ENTRIES)
    bases += copies * outputs * plan.width  # the inverse curvature with zeros after it, and in parts
    if plan.windows:  # images are padded, and unfolded where threads are at work
        columns = 0
        bases += min(plan.examples, examples) * image
        bases += torch.get_num_threads() * compiled.window_scratch_entries(positions, plan.width)
    if block.shared_offsets:  # what is rotated is an input of the layer, which is counted elsewhere
        return slab, turned, columns, bases
    gradients = slab if block.groups == 1 else 3 * slab  # groups come first to be rotated, and back
    return slab, turned, columns, (columns * _copies(block, positions) if plan.inputs_first else gradients) + bases


def _copies(block: KroneckerBlock, positions: int) -> int:
    """How often inputs are there, besides as they were, while they are rotated."""
    return 2 if block.groups == 1 and positions <= FEW_POSITIONS else 1


def most_cotangents(session: Session, settings: Sequence[FitSettings]) -> int:
    """Cotangents that a fit needs for each example."""
    return max(session.num_classes if own.fisher == "exact" else own.label_samples for own in settings)


def check_factors(blocks: Sequence[Block], item_bytes: int, fits: int, limit: int | None, there: int | None) -> None:
    """Raise MemoryLimitError if covariances, their eigenvectors or second moments alone need more than there is.

    Args:
        blocks: What is to be fitted.
        item_bytes: Bytes of a number.
        fits: How many fits are made together.
        limit: Bytes that may be held, if the user says so.
        there: Bytes that the system has left, if known.
    """
    room = min((size for size in (limit, there) if size is not None), default=None)
    steps = (covariance_bytes, eigen_bytes, factor_bytes)
    least = max(step(blocks, item_bytes, fits) for step in steps)
    if room is None or least <= room:
        return
    sizes = sorted(((sum(block_bytes(block, item_bytes)), block) for block in blocks), key=lambda own: -own[0])
    lines = [f"  {block.name or '(model)'}: {_described(block, item_bytes)}" for _, block in sizes[:_SHOWN]]
    limited = "max_memory is" if limit is not None and limit == room else "there are only"
    raise MemoryLimitError(
        f"The factors of this fit need {as_text(least)} ({least:,} bytes) at their largest, but {limited} "
        f"{as_text(room)}. The largest layers:\n" + "\n".join(lines) + "\nLeave layers out with layers=[...] or "
        "requires_grad_(False), share one input basis over the offsets of convolutions with sua=True, or use a "
        "machine with more memory."
    )


def fit_steps(session: Session, fits: int, limit: int | None) -> list[tuple[Budget, Holds]]:
    """What each of the two passes holds whatever the data is, within a limit, and for a piece."""
    item_bytes = session.item_bytes
    return [
        (Budget(limit, covariance_bytes(session.kronecker, item_bytes, fits)), partial(product_bytes, session)),
        (Budget(limit, factor_bytes(session.blocks, item_bytes, fits)), partial(slab_bytes, session)),
    ]


def check_pieces(session: Session, first: Batch, settings: Sequence[FitSettings], limit: int | None) -> None:
    """Raise MemoryLimitError if one example of the first batch does not fit in either pass."""
    with session.attached():
        for budget, holds in fit_steps(session, len(settings), limit):
            session.plan(first, most_cotangents(session, settings), budget, holds)


def _described(block: Block, item_bytes: int) -> str:
    moments, inputs, outputs = block_bytes(block, item_bytes)
    if isinstance(block, KroneckerBlock):
        return (
            f"{as_text(inputs)} for the covariance of {block.channels:,} inputs, {as_text(outputs)} for that of "
            f"{block.rows:,} outputs, {as_text(moments)} for second moments"
        )
    return f"{as_text(moments + outputs)} for {block.size:,} parameters"
