"""Canonical tensors of every block of a case, and the plans under which a block can be evaluated."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cases import Case
from comparison import as_type
from ifcomp import IFComp
from ifcomp.blocks.block import Block
from ifcomp.blocks.kronecker_plan import KroneckerPlan
from ifcomp.curvature.labels import label_cotangents, probabilities
from ifcomp.data.batches import as_batch


def plans(plan: object, *, shared: bool) -> Iterator[object]:
    """The plan, and for Kronecker blocks all others: both kernels, all orders of rotation, slabs of one column.

    Args:
        plan: Result of `Block.plan`.
        shared: Whether offsets share an input basis, so that inputs are always rotated first.
    """
    yield plan
    if isinstance(plan, KroneckerPlan):
        for kernel, inputs, outputs in itertools.product(("direct", "pairs"), (True, False), (True, False)):
            first = replace(plan, kernel=kernel, rotate_inputs_first=inputs or shared, rotate_outputs_first=outputs)
            yield first
            yield replace(first, examples=1)
            if first.rotate_inputs_first:
                yield replace(first, examples=3, columns=1)


def recorded_blocks(ifc: IFComp, case: Case, size: int) -> Iterator[tuple[Block, Any, Tensor]]:
    """Every block with its canonical inputs and the output gradients of all labels."""
    recorder = ifc._recorder
    assert recorder is not None
    batch = as_batch(as_type(case.sample(size, seed=1), torch.float64))
    with recorder.attached():
        recording = recorder.record(batch)
        cotangents = label_cotangents(probabilities(recording.logits, ifc.beta))
        with recorder.computing():
            yield from recording.canonical(next(cotangents.chunks(cotangents.count)), recording.blocks)
