"""The two passes over the training data: covariances, then second moments in their eigenbasis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ifcomp.batches import Batch
from ifcomp.curvature.factors import Basis, BlockFactors, Covariance, Covariances, Factors, FitSettings
from ifcomp.curvature.labels import fisher_cotangents
from ifcomp.curvature.rotation import (
    apply_basis,
    plan_rotation,
    rotated_columns,
    rotated_slabs,
    sum_equal_indices,
)
from ifcomp.distributed import add_up, total_count
from ifcomp.layers.block import Block, IndexedBlock, KroneckerBlock, NormBlock, RecordedBlock
from ifcomp.layers.capture import Gradients, Recording
from ifcomp.layers.session import COTANGENTS_AT_ONCE, LabelUse, Session


def fit_covariances(session: Session, batches: Iterable[Batch], settings: Sequence[FitSettings]) -> list[Covariances]:
    """First pass: sums of the outer products of inputs and of output gradients.

    Args:
        session: The model and its blocks.
        batches: The training data.
        settings: How labels are chosen; one or several, which share the forward passes and the sums over inputs.

    Returns:
        Covariances for each of the settings.
    """
    shapes = {block.name: factor_shapes(block) for block in session.kronecker}
    inputs = {name: None if shape is None else session.zeros(*shape) for name, (_, shape, _) in shapes.items()}
    outputs = [{name: session.zeros(*(shape or ())) for name, (_, _, shape) in shapes.items()} for _ in settings]
    count = 0
    with session.attached():
        for recording, cotangents, _ in _recorded(session, batches, settings, pass_index=0):
            count += recording.batch
            with session.computing():
                _add_input_products(inputs, session, recording)
                for sums, own in zip(outputs, cotangents, strict=True):
                    _add_output_products(sums, session, recording, own)
    count = total_count(count, session.device)
    add_up(total for total in inputs.values() if total is not None)
    add_up(total for sums in outputs for total in sums.values())
    return [Covariances({name: Covariance(inputs[name], sums[name]) for name in shapes}, count) for sums in outputs]


def fit_second_moments(
    session: Session,
    batches: Iterable[Batch],
    settings: Sequence[FitSettings],
    bases: Sequence[Mapping[str, Basis]],
) -> list[Factors]:
    """Second pass: mean squares of the per-example gradients in the eigenbasis of each of the settings, with fresh
    label samples.
    """
    totals = [{block.name: session.zeros(*factor_shapes(block)[0]) for block in session.blocks} for _ in settings]
    count = 0
    with session.attached():
        for recording, cotangents, piece in _recorded(session, batches, settings, pass_index=1):
            count += recording.batch
            with session.computing():
                for sums, basis, own in zip(totals, bases, cotangents, strict=True):
                    for chunk in own.split(COTANGENTS_AT_ONCE):
                        _add_squares(sums, session, recording, basis, chunk)
                        for name, found in session.other_gradients(piece, chunk).items():
                            sums[name] += found.square_().sum((0, 1))
    count = total_count(count, session.device)
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


def _recorded(
    session: Session, batches: Iterable[Batch], settings: Sequence[FitSettings], pass_index: int
) -> Iterator[tuple[Recording, list[Tensor], Batch]]:
    """Record every batch in pieces that fit in memory, with the cotangents of its labels for each of the settings."""
    at_once = max(session.num_classes if own.fisher == "exact" else own.label_samples for own in settings)
    labels: LabelUse = "needed" if any(own.fisher == "empirical" for own in settings) else "unused"
    for piece in session.pieces(batches, min(at_once, COTANGENTS_AT_ONCE), labels):
        recording = session.record(piece)
        cotangents = [
            fisher_cotangents(recording.logits, own, piece.labels, piece.position, pass_index) for own in settings
        ]
        yield recording, cotangents, piece


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


def factor_shapes(block: Block) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]:
    """Shapes of a block's second moments, input basis and output basis; None where it has none."""
    if isinstance(block, KroneckerBlock):
        groups, rows = block.groups, block.rows
        return (groups, rows, block.columns), (groups, block.channels, block.channels), (groups, rows, rows)
    if isinstance(block, IndexedBlock):
        return (1, block.width, block.entries), None, (1, block.width, block.width)
    return (block.size,), None, None


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


def _add_indexed_squares(total: Tensor, indices: Tensor, basis: Basis, values: Tensor) -> None:
    """The same for one cotangent of an embedding, ``total`` being [1, D, V]."""
    sums = sum_equal_indices(indices, values @ basis.outputs[0])
    total[0].index_add_(1, indices.flatten(), sums.square_().flatten(0, 1).T)
