"""The two passes over the training data: covariances, then second moments in their eigenbasis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ifcomp import compiled
from ifcomp.curvature.eigen import STAGES, basis_tensors
from ifcomp.curvature.factors import (
    Basis,
    BlockFactors,
    Covariance,
    Covariances,
    Factors,
    FitSettings,
    covariance_sums,
)
from ifcomp.curvature.holdings import factor_shapes, fit_steps, most_cotangents, multiplies_straight
from ifcomp.curvature.labels import Cotangents, fisher_cotangents
from ifcomp.curvature.rotation import (
    is_compiled,
    plan_rotation,
    put_rows,
    rotated_columns,
    rotated_inputs,
    rotated_slabs,
    sum_equal_indices,
)
from ifcomp.data.batches import Batch
from ifcomp.distributed import all_reduce_sum
from ifcomp.io.resumable import NO_CHECKPOINT, ResumableWork, restore_tensors
from ifcomp.layers.backward import Backward, Gradients
from ifcomp.layers.block import IndexedBlock, KroneckerBlock, NormBlock, RecordedBlock
from ifcomp.layers.capture import Recording
from ifcomp.layers.session import Holds, LabelUse, Session
from ifcomp.memory import Budget

#: Gradients with so many entries are squared and added one by one: several at a time would leave the cache.
_LARGE = 1 << 15

#: What is done with a recorded piece: the piece, its recording, the cotangents for each of the settings, and how many
#: of them to work on at once.
_Add = Callable[[Batch, Recording, list[Cotangents], int], None]


def fit_covariances(
    session: Session,
    batches: Iterable[Batch],
    settings: Sequence[FitSettings],
    limit: int | None = None,
    work: ResumableWork = NO_CHECKPOINT,
) -> list[Covariances]:
    """First pass: sums of the outer products of inputs and of output gradients.

    Args:
        session: The model and its blocks.
        batches: The training data.
        settings: How labels are chosen; one or several, which share the forward passes and the sums over inputs.
        limit: Bytes that may be held in all.
        work: Saves the sums now and then; those of a stage that is done and no longer needed are zeros.

    Returns:
        Covariances for each of the settings.
    """
    shapes = {block.name: factor_shapes(block) for block in session.kronecker}
    inputs = {name: None if shape is None else session.zeros(*shape) for name, (_, shape, _) in shapes.items()}
    outputs = [{name: session.zeros(*(shape or ())) for name, (_, _, shape) in shapes.items()} for _ in settings]
    made = [Covariances({name: Covariance(inputs[name], sums[name]) for name in shapes}, 0) for sums in outputs]
    count = session.counter()
    kept = {"examples/0": count, **covariance_sums(made)}
    restore_tensors(kept, work.begin_stage(STAGES[0], lambda: kept))

    def add(piece: Batch, recording: Recording, cotangents: list[Cotangents], at_once: int) -> None:
        _add_input_products(inputs, session, recording)
        for sums, own in zip(outputs, cotangents, strict=True):
            for chunk in own.chunks(at_once):
                _add_output_products(sums, session, recording, chunk)

    if not work.is_complete(STAGES[0]):
        _over_pieces(session, batches, settings, 0, add, count, *fit_steps(session, len(settings), limit)[0])
        all_reduce_sum(kept.values())
    return [replace(own, count=int(count)) for own in made]


def fit_second_moments(
    session: Session,
    batches: Iterable[Batch],
    settings: Sequence[FitSettings],
    bases: Sequence[Mapping[str, Basis]],
    limit: int | None = None,
    work: ResumableWork = NO_CHECKPOINT,
    seen: int = 0,
) -> list[Factors]:
    """Second pass: mean squares of the per-example gradients in the eigenbasis of each of the settings, with fresh
    label samples.

    Args:
        session: The model and its blocks.
        batches: The training data.
        settings: As in the first pass.
        bases: For each of them.
        limit: Bytes that may be held in all.
        work: Saves the sums now and then.
        seen: How many examples the first pass saw, to be saved with them.
    """
    before = {"examples/0": torch.tensor(seen, device="cpu"), **basis_tensors(bases)}
    saved = work.begin_stage(STAGES[2], lambda: kept, before)
    totals = [{block.name: session.zeros(*factor_shapes(block)[0]) for block in session.blocks} for _ in settings]
    count = session.counter()
    kept = {f"moments/{number}/{name}": total for number, sums in enumerate(totals) for name, total in sums.items()}
    kept["examples/1"] = count
    restore_tensors(kept, saved)
    del saved

    def add(piece: Batch, recording: Recording, cotangents: list[Cotangents], at_once: int) -> None:
        for sums, basis, own in zip(totals, bases, cotangents, strict=True):
            for chunk in own.chunks(at_once):
                _add_squares(sums, session, recording, basis, chunk)
                for name, found in session.other_gradients(piece, chunk).items():
                    sums[name] += found.square_().sum((0, 1))

    _over_pieces(session, batches, settings, 1, add, count, *fit_steps(session, len(settings), limit)[1])
    all_reduce_sum(kept.values())
    examples = int(count)
    for sums in totals:
        for block in session.kronecker:
            if isinstance(block, KroneckerBlock):
                sums[block.name] = block.by_channel(sums[block.name])
    return [
        Factors(
            {name: BlockFactors(total.div_(max(examples, 1)), basis.get(name)) for name, total in sums.items()},
            examples,
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
    add: _Add,
    count: Tensor,
    budget: Budget,
    holds: Holds,
) -> None:
    """Record every batch in pieces that fit in memory, work on each with the cotangents of its labels, and count.

    Nothing here refers to a recording once its work is done: it is gone before the next is made.
    """
    most = most_cotangents(session, settings)
    labels: LabelUse = "needed" if any(own.fisher == "empirical" for own in settings) else "unused"

    def one(piece: Batch, at_once: int) -> None:
        recording = session.record(piece)
        with session.computing():
            cotangents = [
                fisher_cotangents(recording.logits, own, piece.labels, piece.position, pass_index) for own in settings
            ]
            add(piece, recording, cotangents, at_once)

    with session.attached():
        for piece, at_once in session.pieces(batches, most, labels, budget=budget, holds=holds):
            one(piece, at_once)
            count += piece.size
    session.release()


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

    def take(block: RecordedBlock, backward: Backward) -> None:
        sums[block.name].add_(_output_products(recording, block, backward))

    session.backwards(recording, cotangents, session.kronecker, take)


def _input_products(recording: Recording, block: KroneckerBlock) -> Tensor:
    """``sum a a^T`` [G, C, C]; over the channels of all input positions where offsets are shared."""
    return _products(recording.channels(block) if block.shared_offsets else recording.columns(block))


def _output_products(recording: Recording, block: RecordedBlock, backward: Backward) -> Tensor:
    """``sum b b^T`` [G, O, O]."""
    if isinstance(block, IndexedBlock):
        values = backward.each(partial(recording.looked_up, block)).flatten(0, 2)
        return (values.T @ values).unsqueeze(0)
    assert isinstance(block, KroneckerBlock)
    return _products(backward.each(partial(recording.rows, block)).flatten(0, 1))


def _products(values: Tensor) -> Tensor:
    """``sum_bt v v^T`` [G, C, C] of values [B, G, C, T]; where positions are many, without rearranging them."""
    if multiplies_straight(values.shape):
        each = values[:, 0]
        return torch.addbmm(each.new_zeros(()), each, each.transpose(1, 2), beta=0).unsqueeze(0)
    rearranged = values.permute(1, 2, 0, 3).flatten(2)
    return rearranged @ rearranged.transpose(1, 2)


def _add_squares(
    sums: Mapping[str, Tensor], session: Session, recording: Recording, basis: Mapping[str, Basis], cotangents: Tensor
) -> None:
    """Add the squared rotated gradients of all examples and cotangents to the sums of their blocks."""

    def take(block: RecordedBlock, backward: Backward) -> None:
        if isinstance(block, KroneckerBlock):
            plan = plan_rotation(block, recording.positions(block), len(cotangents), session)
            rotate = plan.outputs_first or recording.positions(block) == 1
            room = session.stacked_rows(block, recording, len(cotangents))[:, :, backward.which]
            found = backward.each(partial(recording.rows, block))
            put_rows(room, found, basis[block.name].outputs if rotate else None)
        elif isinstance(block, IndexedBlock):
            values = backward.each(partial(_looked_up_sums, recording, block, basis[block.name].outputs[0]))
            squares = values.square_().sum(0).flatten(0, 1)
            sums[block.name][0].index_add_(1, recording.indices(block).flatten(), squares.T)
        elif isinstance(block, NormBlock):
            found = backward.each(partial(recording.scale_and_shift, block))
            sums[block.name].add_(found.square_().sum((0, 1)))

    session.backwards(recording, cotangents, session.recorded, take)
    for block in filter(recording.used, session.recorded):
        if isinstance(block, KroneckerBlock):
            rows = session.stacked_rows(block, recording, len(cotangents))
            _add_kronecker_squares(sums[block.name], recording, block, basis[block.name], rows)


def _add_kronecker_squares(
    total: Tensor, recording: Recording, block: KroneckerBlock, basis: Basis, rows: Tensor
) -> None:
    if rows.shape[4] == 1:  # an outer product: its squares are the outer product of squares
        inputs = rotated_columns(recording, block, basis).square_()[..., 0, :]
        total += torch.einsum("bgo,bgj->goj", rows[..., 0].square().sum(2), inputs)
        return
    if is_compiled(block, rows.shape[4], rows.shape[2], rows):
        panels = total.new_zeros(compiled.panels_shape(block.rows, block.columns))
        for some, inputs in rotated_inputs(recording, block, basis):
            compiled.add_squares(panels, rows[some, 0], inputs)
            del inputs  # before the next are made
        total[0] += compiled.from_panels(panels, block.columns)
        return
    plan = plan_rotation(block, rows.shape[4], rows.shape[2], rows)
    for slab in rotated_slabs(recording, block, basis, rows, plan):
        own = total[..., slab.columns]
        _add_slab_squares(own, slab.gradients[..., : own.shape[-1]])
        del slab  # before the next is made


def _add_slab_squares(total: Tensor, gradients: Tensor) -> None:
    """Add the squares of gradients [B, G, C, O, J] to [G, O, J]: large ones one by one, each read once."""
    if total.numel() < _LARGE:
        total += gradients.square_().sum((0, 2))
        return
    for gradient in gradients.transpose(1, 2).flatten(0, 1):
        total.addcmul_(gradient, gradient)


def _looked_up_sums(recording: Recording, block: IndexedBlock, basis: Tensor, gradients: Gradients) -> Tensor:
    """Rotated gradients of the rows that an embedding looked up, [B, T, D]: each at the first position of its row."""
    return sum_equal_indices(recording.indices(block), recording.looked_up(block, gradients) @ basis)
