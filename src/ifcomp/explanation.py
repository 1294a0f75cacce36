"""Which training examples stand behind a label: influence between a query and every training example."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ifcomp.curvature.labels import label_residuals
from ifcomp.data.batches import Batch, as_batches
from ifcomp.errors import DataError, SettingError
from ifcomp.influence.cross import whitened_gradients
from ifcomp.progress import track
from ifcomp.scoring import Evaluation, Microbatch, evaluate

#: Bytes that the whitened gradients of the queries may take; more of them take another pass over the training data.
QUERY_BYTES = 1 << 30

#: What each column means.
DESCRIPTIONS = {
    "query": "position of the explained example in what was given",
    "role": "'supports': the model would find the query's label less likely without this training example; "
    "'contradicts': more likely",
    "rank": "1 = strongest",
    "index": "position of the training example in the training data",
    "label": "its label",
    "effect": "how much removing it would raise the codelength of the query's label, to first order, in nats; "
    "positive supports, negative contradicts",
}


@dataclass(frozen=True)
class Explanation:
    """The training examples that most support and most contradict the labels of some queries.

    Attributes:
        frame: Up to k rows of each role for each query, strongest first; see `descriptions`.
    """

    frame: pd.DataFrame

    @property
    def descriptions(self) -> dict[str, str]:
        """Meaning and unit of every column."""
        return dict(DESCRIPTIONS)

    def of(self, query: int) -> pd.DataFrame:
        """The rows of one query."""
        return self.frame[self.frame["query"] == query]


@dataclass
class _Strongest:
    """The k largest effects seen so far, [Q, k], with the positions and labels they belong to."""

    effects: Tensor
    positions: Tensor
    labels: Tensor

    def update(self, effects: Tensor, positions: Tensor, labels: Tensor, count: int) -> None:
        joined = torch.cat([self.effects, effects], 1)
        top = joined.topk(min(count, joined.shape[1]), dim=1)
        self.effects = top.values
        self.positions = torch.cat([self.positions, positions.expand_as(effects)], 1).gather(1, top.indices)
        self.labels = torch.cat([self.labels, labels.expand_as(effects)], 1).gather(1, top.indices)


def explain(
    evaluation: Evaluation,
    query: Batch,
    train: Iterable[Any],
    count: int,
    own_positions: Sequence[int] | None,
    progress: bool | None,
) -> Explanation:
    """One pass over the training data for as many queries as fit in `QUERY_BYTES`.

    Args:
        evaluation: Fitted curvature.
        query: The labelled examples to explain.
        train: The training data with labels; iterated again for each further group of queries.
        count: Rows of each role for a query.
        own_positions: Where each query itself is in the training data, to leave it out.
        progress: Show a progress bar; None shows it on terminals.
    """
    if not isinstance(count, int) or count < 1:
        raise SettingError(f"k must be a whole number of at least 1, but is {count!r}.")
    if own_positions is not None and len(own_positions) != query.size:
        raise DataError(f"{len(own_positions)} positions for {query.size} queries. Give the position of each query.")
    parameters = sum(block.size for block in evaluation.recorder.blocks)
    step = max(1, QUERY_BYTES // (parameters * evaluation.recorder.dtype.itemsize))
    frames = []
    for first in range(0, query.size, step):
        some = query.select(slice(first, first + step))
        own = None if own_positions is None else torch.as_tensor(own_positions[first : first + step], device="cpu")
        batches = as_batches(track(train, "comparing with the training data", progress))
        found = _explain_group(evaluation, some, batches, count, own)
        frames += [_rows(strongest, role, first) for role, strongest in found.items()]
    frame = pd.concat(frames, ignore_index=True).sort_values(["query", "role", "rank"], ascending=[True, False, True])
    return Explanation(frame.reset_index(drop=True))


def _explain_group(
    evaluation: Evaluation, query: Batch, train: Iterable[Batch], count: int, own: Tensor | None
) -> dict[str, _Strongest]:
    queries = _whitened_queries(evaluation, query)
    empty = torch.zeros(query.size, 0, device="cpu")
    found = {sign: _Strongest(empty.double(), empty.long(), empty.long()) for sign in (1, -1)}
    position = 0
    for piece, effects in _effects(evaluation, queries, query.size, train):
        positions = torch.arange(position, position + piece.size, device="cpu")
        position += piece.size
        assert piece.labels is not None
        for sign, strongest in found.items():
            signed = sign * effects
            if own is not None:
                signed = signed.masked_fill(positions == own.unsqueeze(1), -torch.inf)
            strongest.update(signed, positions, piece.labels.cpu(), count)
    found[-1].effects = -found[-1].effects
    return {"supports": found[1], "contradicts": found[-1]}


def _whitened_queries(evaluation: Evaluation, query: Batch) -> dict[str, Tensor]:
    """Whitened gradients [Q, P] of the queries by block."""
    parts: dict[str, list[Tensor]] = {}
    step = partial(_whitened, evaluation)
    for whitened in evaluate(evaluation, [query], 1, lambda microbatch: dict(step(microbatch)), "needed"):
        for name, value in whitened.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


def _effects(
    evaluation: Evaluation, queries: Mapping[str, Tensor], size: int, train: Iterable[Batch]
) -> Iterable[tuple[Batch, Tensor]]:
    """Every microbatch of the training data with its effects [Q, B] in nats, on the CPU."""

    def step(microbatch: Microbatch) -> tuple[Batch, Tensor]:
        total = torch.zeros(size, microbatch.batch.size, dtype=torch.float64, device=microbatch.logits.device)
        for name, value in _whitened(evaluation, microbatch):
            if name in queries:
                total += (queries[name] @ value.T).double() * evaluation.weights[name].scale
        return microbatch.batch, (total / evaluation.factors.count).cpu()

    return evaluate(evaluation, train, 1, step, "needed")


def _whitened(evaluation: Evaluation, microbatch: Microbatch) -> Iterator[tuple[str, Tensor]]:
    """Whitened gradients [B, P] of the given labels, block by block."""
    assert microbatch.batch.labels is not None
    residual = label_residuals(microbatch.probability, microbatch.batch.labels.to(microbatch.logits.device))
    return whitened_gradients(evaluation.factors, evaluation.weights, microbatch.recording, residual)


def _rows(strongest: _Strongest, role: str, first_query: int) -> pd.DataFrame:
    queries, count = strongest.effects.shape
    frame = pd.DataFrame(
        {
            "query": np.arange(first_query, first_query + queries).repeat(count),
            "role": role,
            "rank": np.tile(np.arange(1, count + 1), queries),
            "index": strongest.positions.flatten().numpy(),
            "label": strongest.labels.flatten().numpy(),
            "effect": strongest.effects.flatten().numpy(),
        }
    )
    right = frame["effect"] > 0 if role == "supports" else frame["effect"] < 0
    return frame[right & frame["effect"].abs().lt(float("inf"))]
