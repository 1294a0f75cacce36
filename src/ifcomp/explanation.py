"""Training examples that support or contradict a label: influence between a query and every training example."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ifcomp._version import __version__
from ifcomp.curvature.labels import label_residuals
from ifcomp.data.batches import Batch, as_batches
from ifcomp.errors import DataError, SettingError
from ifcomp.influence.cross import whitened_gradients
from ifcomp.influence.forms import sum_blocks
from ifcomp.progress import track
from ifcomp.scoring import Evaluation, Microbatch, evaluate
from ifcomp.tables import TableResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Memory limit of the whitened query gradients, in bytes. More queries need further passes over the training data.
QUERY_BYTES = 1 << 30

#: Meaning and unit of each column.
DESCRIPTIONS = {
    "query": "position of the explained example among the queries",
    "role": "'supports': without this training example the label of the query would be less likely; "
    "'contradicts': more likely",
    "rank": "1 = strongest",
    "index": "position of the training example in the training data",
    "label": "label of the training example",
    "effect": "increase of the codelength of the query's label if the training example were removed, to first order, "
    "in nats; positive supports, negative contradicts",
}


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(TableResult):
    """The training examples that most support and most contradict the labels of the queries.

    Attributes:
        frame: Up to k rows per query and role, strongest first; see `descriptions`.
        settings: Settings of fit and explanation, such as damping and the number of queries.
    """

    frame: pd.DataFrame
    settings: Mapping[str, Any]

    @property
    def descriptions(self) -> dict[str, str]:
        """Meaning and unit of every column."""
        return dict(DESCRIPTIONS)

    def of(self, query: int) -> pd.DataFrame:
        """Return the rows of one query."""
        return self.frame[self.frame["query"] == query]

    @property
    def answer(self) -> str:
        """Number of queries, supporting and contradicting examples."""
        supports = int((self.frame["role"] == "supports").sum())
        queries = self.settings["queries"]
        return (
            f"{supports:,} supporting and {len(self.frame) - supports:,} contradicting training examples of "
            f"{queries:,} {'query' if queries == 1 else 'queries'}"
        )

    def plot(self, query: int = 0) -> Figure:
        """Draw the effects on one query as bars, in nats. Positive effects support its label.

        Args:
            query: Position among the queries.
        """
        if not 0 <= query < self.settings["queries"]:
            raise SettingError(f"query must be in 0 ... {self.settings['queries'] - 1}, but is {query}.")
        from matplotlib.figure import Figure

        rows = self.of(query).sort_values("effect", ascending=False)
        figure = Figure(figsize=(6, 0.8 + 0.25 * len(rows)), layout="constrained")
        axis = figure.subplots()
        names = [f"{row.index_} (label {row.label})" for row in rows.rename(columns={"index": "index_"}).itertuples()]
        axis.barh(range(len(rows)), rows["effect"], color=["C0" if value > 0 else "C3" for value in rows["effect"]])
        axis.set_yticks(range(len(rows)), names)
        axis.invert_yaxis()
        axis.set_xlabel(f"effect on query {query}, nats; positive supports, negative contradicts")
        return figure


@dataclass
class _Strongest:
    """The k largest effects so far, [Q, k], with positions and labels of their training examples."""

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
    train_positions: Sequence[int] | None,
    progress: bool | None,
    *,
    query_bytes: int = QUERY_BYTES,
) -> Explanation:
    """Find the training examples that most support and most contradict the label of each query.

    The effect of training example i on query q is ``g_q^T (G + delta)^-1 g_i / n`` in nats. One pass over the training
    data serves as many queries as fit in ``query_bytes``.

    Args:
        evaluation: Fitted curvature.
        query: Labelled examples to explain.
        train: Training data with labels. It is read again for each further group of queries.
        count: Rows per query and role.
        train_positions: Position of each query in the training data, to exclude it. None excludes nothing.
        progress: Show a progress bar; None shows it on terminals.
        query_bytes: Memory of the whitened query gradients.
    """
    if not isinstance(count, int) or count < 1:
        raise SettingError(f"k must be a whole number of at least 1, but is {count!r}.")
    if train_positions is not None and len(train_positions) != query.size:
        raise DataError(f"{len(train_positions)} positions for {query.size} queries. Give the position of each query.")
    parameters = sum(block.size for block in evaluation.recorder.blocks)
    step = max(1, query_bytes // (parameters * evaluation.recorder.dtype.itemsize))
    frames = []
    for first in range(0, query.size, step):
        group = slice(first, first + step)
        excluded = None if train_positions is None else torch.as_tensor(train_positions[group], device="cpu")
        batches = as_batches(track(train, "comparing with the training data", progress))
        strongest = _explain_group(evaluation, query.select(group), batches, count, excluded)
        frames += [_rows(strongest[role], role, first) for role in strongest]
    frame = pd.concat(frames, ignore_index=True).sort_values(["query", "role", "rank"], ascending=[True, False, True])
    settings = {
        "k": count,
        "queries": query.size,
        "beta": evaluation.beta,
        "damping": repr(evaluation.damping),
        "training_examples": evaluation.factors.count,
        "version": __version__,
    }
    return Explanation(frame.reset_index(drop=True), settings)


def _explain_group(
    evaluation: Evaluation, query: Batch, train: Iterable[Batch], count: int, excluded: Tensor | None
) -> dict[str, _Strongest]:
    """Return the strongest effects per role; ``excluded`` [Q] is the training position to leave out per query."""
    queries = _whitened_queries(evaluation, query)
    empty = torch.zeros(query.size, 0, device="cpu")
    by_sign = {sign: _Strongest(empty.double(), empty.long(), empty.long()) for sign in (1, -1)}
    position = 0
    for microbatch, effects in _effects(evaluation, queries, query.size, train):
        positions = torch.arange(position, position + microbatch.size, device="cpu")
        position += microbatch.size
        assert microbatch.labels is not None
        for sign, strongest in by_sign.items():
            signed = sign * effects
            if excluded is not None:
                signed = signed.masked_fill(positions == excluded.unsqueeze(1), -torch.inf)
            strongest.update(signed, positions, microbatch.labels.cpu(), count)
    by_sign[-1].effects = -by_sign[-1].effects
    return {"supports": by_sign[1], "contradicts": by_sign[-1]}


def _whitened_queries(evaluation: Evaluation, query: Batch) -> dict[str, Tensor]:
    """Whitened gradients [Q, P] of the queries by block."""
    parts: dict[str, list[Tensor]] = {}

    def step(microbatch: Microbatch) -> dict[str, Tensor]:
        return {name: microbatch.check_finite(value) for name, value in _whitened(evaluation, microbatch)}

    for whitened in evaluate(evaluation, [query], 1, step, "needed", "queries"):
        for name, value in whitened.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


def _effects(
    evaluation: Evaluation, queries: Mapping[str, Tensor], size: int, train: Iterable[Batch]
) -> Iterable[tuple[Batch, Tensor]]:
    """Every microbatch of the training data with its effects [Q, B] in nats, on the CPU."""

    def step(microbatch: Microbatch) -> tuple[Batch, Tensor]:
        whitened = _whitened(evaluation, microbatch)
        products = {name: queries[name] @ value.T for name, value in whitened if name in queries}
        total = sum_blocks(products, evaluation.weights, (size, microbatch.batch.size), microbatch.logits)
        microbatch.check_finite(total.T)
        return microbatch.batch, (total / evaluation.factors.count).cpu()

    return evaluate(evaluation, train, 1, step, "needed", "effects")


def _whitened(evaluation: Evaluation, microbatch: Microbatch) -> Iterator[tuple[str, Tensor]]:
    """Whitened gradients [B, P] of the given labels, block by block."""
    assert microbatch.batch.labels is not None
    residual = label_residuals(microbatch.probability, microbatch.batch.labels.to(microbatch.logits.device))
    return whitened_gradients(evaluation.factors, evaluation.weights, microbatch.recording, residual)


def _rows(strongest: _Strongest, role: str, first_query: int) -> pd.DataFrame:
    """Return one table row per query and rank, without effects of the wrong sign or excluded examples."""
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
    has_role = frame["effect"] > 0 if role == "supports" else frame["effect"] < 0
    return frame[has_role & frame["effect"].abs().lt(float("inf"))]
