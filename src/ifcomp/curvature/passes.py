"""The two passes over the training data: covariances, then second moments in their eigenbasis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ifcomp.batches import Batch
from ifcomp.curvature.factors import Basis, BlockFactors, Covariance, Covariances, Factors, FitSettings
from ifcomp.curvature.holdings import factor_shapes, fit_steps, most_cotangents
from ifcomp.curvature.labels import Cotangents, fisher_cotangents
from ifcomp.curvature.rotation import (
    apply_basis,
    plan_rotation,
    rotated_columns,
    rotated_slabs,
    sum_equal_indices,
)
from ifcomp.distributed import add_up, total_count
from ifcomp.layers.block import IndexedBlock, KroneckerBlock, NormBlock, RecordedBlock
from ifcomp.layers.capture import Gradients, Recording
from ifcomp.layers.session import Holds, LabelUse, Session
from ifcomp.memory import Budget

#: What is done with a recorded piece: the piece, its recording, the cotangents for each of the settings, and how many
#: of them to work on at once.
_Work = Callable[[Batch, Recording, list[Cotangents], int], None]


def fit_covariances(
    session: Session, batches: Iterable[Batch], settings: Sequence[FitSettings], limit: int | None = None
) -> list[Covariances]:
    """First pass: sums of the outer products of inputs and of output gradients.

    Args:
        session: The model and its blocks.
        batches: The training data.
        settings: How labels are chosen; one or several, which share the forward passes and the sums over inputs.
        limit: Bytes that may be held in all.

    Returns:
        Covariances for each of the settings.
    """
    shapes = {block.name: factor_shapes(block) for block in session.kronecker}
    inputs = {name: None if shape is None else session.zeros(*shape) for name, (_, shape, _) in shapes.items()}
    outputs = [{name: session.zeros(*(shape or ())) for name, (_, _, shape) in shapes.items()} for _ in settings]

    def add(piece: Batch, recording: Recording, cotangents: list[Cotangents], at_once: int) -> None:
        _add_input_products(inputs, session, recording)
        for sums, own in zip(outputs, cotangents, strict=True):
            for chunk in own.chunks(at_once):
                _add_output_products(sums, session, recording, chunk)

    step = fit_steps(session, len(settings), limit)[0]
    count = _over_pieces(session, batches, settings, 0, add, *step)
    add_up(total for total in inputs.values() if total is not None)
    add_up(total for sums in outputs for total in sums.values())
    return [Covariances({name: Covariance(inputs[name], sums[name]) for name in shapes}, count) for sums in outputs]


def fit_second_moments(
    session: Session,
    batches: Iterable[Batch],
    settings: Sequence[FitSettings],
    bases: Sequence[Mapping[str, Basis]],
    limit: int | None = None,
) -> list[Factors]:
    """Second pass: mean squares of the per-example gradients in the eigenbasis of each of the settings, with fresh
    label samples.
    """
    totals = [{block.name: session.zeros(*factor_shapes(block)[0]) for block in session.blocks} for _ in settings]

    def add(piece: Batch, recording: Recording, cotangents: list[Cotangents], at_once: int) -> None:
        for sums, basis, own in zip(totals, bases, cotangents, strict=True):
            for chunk in own.chunks(at_once):
                _add_squares(sums, session, recording, basis, chunk)
                for name, found in session.other_gradients(piece, chunk).items():
                    sums[name] += found.square_().sum((0, 1))

    step = fit_steps(session, len(settings), limit)[1]
    count = _over_pieces(session, batches, settings, 1, add, *step)
    add_up(total for sums in totals for total in sums.values())
    return [
        Factors(
            {name: BlockFactors(total.div_(max(count, 1)), basis.get(name)) for name, total in sums.items()},
            count,
            session.num_classes,
            own,
        )
        for sums, basis, own in zip(totals, bases, settings, strict=True)
    ]


def _over_pieces(
    session: Session,
    batches: Iterable[Batch],
    settings: Sequence[FitSettings],
    pass_index: int,
    work: _Work,
    budget: Budget,
    holds: Holds,
) -> int:
    """Record every batch in pieces that fit in memory, and work on each with the cotangents of its labels.

    Nothing here refers to a recording once its work is done: it is gone before the next is made.

    Returns:
        The number of examples, over all processes.
    """
    count = 0
    most = most_cotangents(session, settings)
    labels: LabelUse = "needed" if any(own.fisher == "empirical" for own in settings) else "unused"

    def one(piece: Batch, at_once: int) -> None:
        recording = session.record(piece)
        with session.computing():
            cotangents = [
                fisher_cotangents(recording.logits, own, piece.labels, piece.position, pass_index) for own in settings
            ]
            work(piece, recording, cotangents, at_once)

    with session.attached():
        for piece, at_once in session.pieces(batches, most, labels, budget=budget, holds=holds):
            one(piece, at_once)
            count += piece.size
    return total_count(count, session.device)


def _add_input_products(sums: Mapping[str, Tensor | None], session: Session, recording: Recording) -> None:
    """Add the outer products of inputs to the sums of their blocks."""
    for block in filter(recording.used, session.kronecker):
        if (total := sums[block.name]) is not None:
            assert isinstance(block, KroneckerBlock)
            total += _input_products(recording, block)


def _add_output_products(
    sums: Mapping[str, Tensor], session: Session, recording: Recording, cotangents: Tensor
) -> None:
    """Add the outer products of output gradients to the sums of their blocks."""
    for cotangent in cotangents:
        gradients = recording.backward(cotangent)
        for block in filter(recording.used, session.kronecker):
            sums[block.name].add_(_output_products(recording, block, gradients))
        del gradients  # before the next are made


def _input_products(recording: Recording, block: KroneckerBlock) -> Tensor:
    """``sum a a^T`` [G, C, C]; over the channels of all input positions where offsets are shared."""
    values = recording.channels(block) if block.shared_offsets else recording.columns(block)
    return torch.einsum("bgjt,bgkt->gjk", values, values)


def _output_products(recording: Recording, block: RecordedBlock, gradients: Gradients) -> Tensor:
    """``sum b b^T`` [G, O, O]."""
    if isinstance(block, IndexedBlock):
        values = recording.looked_up(block, gradients).flatten(0, 1)
        return (values.T @ values).unsqueeze(0)
    assert isinstance(block, KroneckerBlock)
    rows = recording.rows(block, gradients)
    return torch.einsum("bgot,bgpt->gop", rows, rows)


def _add_squares(
    sums: Mapping[str, Tensor], session: Session, recording: Recording, basis: Mapping[str, Basis], cotangents: Tensor
) -> None:
    """Add the squared rotated gradients of all examples and cotangents to the sums of their blocks."""
    for index, cotangent in enumerate(cotangents):
        gradients = recording.backward(cotangent)
        for block in filter(recording.used, session.recorded):
            if isinstance(block, KroneckerBlock):
                own = basis[block.name]
                plan = plan_rotation(block, recording.positions(block), len(cotangents))
                rotate = plan.outputs_first or recording.positions(block) == 1
                rows = session.stacked_rows(block, recording, len(cotangents))
                found = recording.rows(block, gradients)
                rows[:, :, index] = apply_basis(own.outputs, found) if rotate else found
            elif isinstance(block, IndexedBlock):
                values = recording.looked_up(block, gradients)
                _add_indexed_squares(sums[block.name], recording.indices(block), basis[block.name], values)
            elif isinstance(block, NormBlock):
                sums[block.name].add_(recording.scale_and_shift(block, gradients).square_().sum(0))
        del gradients  # before the next are made
    for block in filter(recording.used, session.recorded):
        if isinstance(block, KroneckerBlock):
            rows = session.stacked_rows(block, recording, len(cotangents))
            _add_kronecker_squares(sums[block.name], recording, block, basis[block.name], rows)


def _add_kronecker_squares(
    total: Tensor, recording: Recording, block: KroneckerBlock, basis: Basis, rows: Tensor
) -> None:
    if rows.shape[4] == 1:  # an outer product: its squares are the outer product of squares
        inputs = rotated_columns(recording, block, basis).square()[..., 0]
        total += torch.einsum("bgo,bgj->goj", rows[..., 0].square().sum(2), inputs)
        return
    plan = plan_rotation(block, rows.shape[4], rows.shape[2])
    for slab in rotated_slabs(recording, block, basis, rows, plan):
        total[:, slab.rows] += slab.gradients.square_().sum((0, 2))
        del slab  # before the next is made


def _add_indexed_squares(total: Tensor, indices: Tensor, basis: Basis, values: Tensor) -> None:
    """The same for one cotangent of an embedding, ``total`` being [1, D, V]."""
    sums = sum_equal_indices(indices, values @ basis.outputs[0])
    total[0].index_add_(1, indices.flatten(), sums.square_().flatten(0, 1).T)
