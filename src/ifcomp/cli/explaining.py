"""The training examples behind the suspects of an audit, for its report."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from ifcomp import IFComp
from ifcomp.curvature.factors import Damping
from ifcomp.data.batches import as_batches
from ifcomp.data.sources import Source
from ifcomp.errors import DataError
from ifcomp.report import TrainingExample

#: Training examples of each kind beside a suspect.
NEIGHBOURS = 4


def explanations(
    ifc: IFComp, training: Source, suspects: Sequence[int], damping: Damping
) -> dict[int, tuple[TrainingExample, ...]]:
    """What most supports and most contradicts the labels of some training examples, strongest first.

    Args:
        ifc: Fitted on the training data.
        training: The training data.
        suspects: Positions in it.
        damping: That of the audit which found them.
    """
    if not suspects:
        return {}
    try:
        x, y = examples_at(training, suspects)
    except DataError as error:
        warnings.warn(f"The report does not explain suspects: {error}", stacklevel=2)
        return {}
    frame = ifc.explain(x, y, training.batches(), k=NEIGHBOURS, positions=suspects, damping=damping).frame
    shown = sorted({int(index) for index in frame["index"]})
    previews = dict(zip(shown, training.preview(shown), strict=True))
    rows = zip(frame["query"], frame["index"], frame["effect"], frame["label"], strict=True)
    found: dict[int, list[TrainingExample]] = {}
    for query, index, effect, label in rows:
        example = TrainingExample(int(index), float(effect), int(label), previews[int(index)])
        found.setdefault(suspects[int(query)], []).append(example)
    return {suspect: tuple(examples) for suspect, examples in found.items()}


def examples_at(source: Source, positions: Sequence[int]) -> tuple[Any, torch.Tensor]:
    """Inputs and labels of the examples at some positions, in that order: one pass over the data.

    Raises:
        DataError: If their inputs do not have one shape, such as texts of different lengths.
    """
    picked: dict[int, tuple[Any, torch.Tensor]] = {}
    for batch in as_batches(source.batches()):
        for position in set(positions).intersection(range(batch.position, batch.position + batch.size)):
            one = batch.select(slice(position - batch.position, position - batch.position + 1))
            assert one.labels is not None
            picked[position] = one.kwargs or one.args[0], one.labels
    inputs, labels = zip(*(picked[position] for position in positions), strict=True)
    try:
        if isinstance(inputs[0], dict):
            return {key: torch.cat([one[key] for one in inputs]) for key in inputs[0]}, torch.cat(labels)
        return torch.cat(inputs), torch.cat(labels)
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"inputs of '{source.spec}' cannot be put into one batch ({str(error).rstrip('.')})."
        ) from error
