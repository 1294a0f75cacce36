"""Memory, disk and time of a fit and of scoring, before either: sizes from the layers, times from a few examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp.curvature.factors import Basis
from ifcomp.curvature.holdings import (
    block_bytes,
    check_factors,
    check_pieces,
    covariance_bytes,
    eigen_bytes,
    factor_bytes,
    factor_shapes,
    fit_steps,
    most_cotangents,
)
from ifcomp.curvature.passes import fit_covariances, fit_second_moments
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_data
from ifcomp.errors import EmptyDataError
from ifcomp.influence.choice import choose_kernel, direct_cost, form_bytes, pairs_cost, weight_bytes
from ifcomp.influence.weights import Weights, invert
from ifcomp.layers.block import Block, KroneckerBlock
from ifcomp.layers.session import Footprint, Holds, Session, working_dtype
from ifcomp.memory import Budget, as_bytes, as_text, available, even_size
from ifcomp.predictor import IFComp
from ifcomp.scoring import Evaluation, ScoreOptions, score_columns

#: What libraries take when they are first used: convolution primitives, LAPACK, pandas.
_LIBRARIES = 60 * 10**6

#: What the process takes for each byte of tensors: operations need room of their own, and memory gets holes.
_OVERHEAD = 1.25

#: Seconds that one step of the calibration may take.
_PATIENCE = 1.0

#: Side of the matrix whose eigendecomposition is timed; others are taken to need the cube of theirs.
_SIDE = 256


@dataclass(frozen=True)
class LayerEstimate:
    """One block.

    Attributes:
        name: Of the block.
        kind: In words.
        parameters: How many it covers.
        memory: Bytes of its covariances or factors, at their largest, and of one eigendecomposition.
        disk: Bytes of its factors in a file.
        fit_seconds: Share of the fit.
        score_seconds: Share of scoring.
    """

    name: str
    kind: str
    parameters: int
    memory: int
    disk: int
    fit_seconds: float
    score_seconds: float


@dataclass(frozen=True)
class Estimate:
    """What a fit and scoring will take. ``print`` shows it as a table.

    Attributes:
        layers: Block by block; memory that all share (activations, output gradients) is in the totals only.
        examples: For which the seconds are.
        fit_memory: Bytes that the process takes at the peak of a fit, beside model and data.
        score_memory: The same for scoring.
        disk: Bytes of the file that `IFComp.save` writes.
        fit_seconds: Both passes and the eigendecompositions.
        score_seconds: Scoring as many examples.
    """

    layers: tuple[LayerEstimate, ...]
    examples: int
    fit_memory: int
    score_memory: int
    disk: int
    fit_seconds: float
    score_seconds: float

    def __str__(self) -> str:
        rows = [("layer", "kind", "parameters", "memory", "disk", "fit", "score")]
        rows += [cells(layer) for layer in self.layers]
        widths = [max(len(row[column]) for row in rows) for column in range(7)]
        lines = [
            "  ".join(cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(row, widths, strict=True)) for row in rows)
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:], rule, *self.summary])

    @property
    def summary(self) -> list[str]:
        """The totals in words."""
        return [
            f"fit: {as_text(self.fit_memory)} at the peak, {self.fit_seconds:.3g} s for {self.examples:,} examples, "
            f"{as_text(self.disk)} on disk",
            f"score: {as_text(self.score_memory)} at the peak, {self.score_seconds:.3g} s for {self.examples:,} "
            "examples",
        ]


def cells(layer: LayerEstimate) -> tuple[str, str, str, str, str, str, str]:
    """A layer as the cells of a table."""
    return (
        layer.name or "(model)",
        layer.kind,
        f"{layer.parameters:,}",
        as_text(layer.memory),
        as_text(layer.disk),
        f"{layer.fit_seconds:.3g} s",
        f"{layer.score_seconds:.3g} s",
    )


def estimate(
    model: nn.Module,
    data: Iterable[Any],
    *,
    examples: int | None = None,
    probes: int | None = None,
    max_memory: int | str | None = None,
    **options: Any,
) -> Estimate:
    """Estimate memory, disk and time of a fit on this data and of scoring it, from a few examples of the first batch.

    Args:
        model: The classifier; it is not changed.
        data: As for `IFComp.fit`; only its first batch is read.
        examples: How many there are. None: the number of batches times the size of the first.
        probes: As for `IFComp.score`.
        max_memory: As for `IFComp.fit` and `IFComp.score`.
        options: Of `IFComp`: ``layers``, ``fisher``, ``sua`` and so on.

    Raises:
        MemoryLimitError: If the fit would need more than ``max_memory``, or than there is.
    """
    check_data(data)
    ifc, limit = IFComp(model, **options), as_bytes(max_memory)
    score_options = ScoreOptions(probes=probes)
    first = next(as_batches(data), None)
    if first is None:
        raise EmptyDataError("An estimate needs at least one example, but the data is empty.")
    if examples is None:
        examples = len(data) * first.size if isinstance(data, Sized) else first.size
    item_bytes = working_dtype(model).itemsize
    check_factors(ifc._inventory.blocks, item_bytes, 1, limit, available(next(model.parameters()).device))
    with torch.inference_mode(False):
        session = Session(ifc.model, ifc._selection, first)
        check_pieces(session, first, [ifc.settings], limit)
        passes, score, evaluation = _calibrate(session, ifc, first, score_options)
        cotangents = session.num_classes if probes is None else probes
        with session.attached():
            footprint = session.footprint(first)
            fits = most_cotangents(session, [ifc.settings])
            steps = [_peak(session, first, fits, *step) for step in fit_steps(session, 1, limit)]
            holds = partial(form_bytes, session, evaluation.weights, cotangents)
            score_peak = _peak(session, first, cotangents, Budget(limit, weight_bytes(session)), holds)
    eigen = {block.name: _eigen_work(block) for block in session.blocks}
    work = {block.name: _work(block, footprint, cotangents, evaluation.weights) for block in session.blocks}
    decompositions = _seconds_per_cube() * sum(eigen.values())
    layers = tuple(
        _layer(
            block,
            item_bytes,
            _share(work, block) * passes * examples + _share(eigen, block) * decompositions,
            _share(work, block) * score * examples,
        )
        for block in session.blocks
    )
    return Estimate(
        layers,
        examples,
        _process(max(*steps, eigen_bytes(session.blocks, item_bytes))),
        _process(score_peak),
        sum(layer.disk for layer in layers),
        passes * examples + decompositions,
        score * examples,
    )


def _process(tensors: int) -> int:
    """Bytes of a process that holds so many bytes of tensors."""
    return int(_OVERHEAD * tensors) + _LIBRARIES


def _peak(session: Session, first: Batch, cotangents: int, budget: Budget, holds: Holds) -> int:
    """What a step holds with the pieces that it will work on, if all batches are of the size of the first."""
    examples, at_once = session.plan(first, cotangents, budget, holds)
    footprint = session.footprint(first)
    filters = footprint.filters if session.is_quick(budget) else 0
    return budget.held + filters + holds(footprint, even_size(first.size, examples), at_once)


def _calibrate(session: Session, ifc: IFComp, first: Batch, options: ScoreOptions) -> tuple[float, float, Evaluation]:
    """Seconds for an example of both passes, and of scoring; and what scores, with axes in the place of eigenvectors,
    which take as long.
    """
    settings = [ifc.settings]
    passes = _timed(first, lambda batch: fit_covariances(session, [batch], settings))
    bases = [_axes(session)]
    passes += _timed(first, lambda batch: fit_second_moments(session, [batch], settings, bases))
    factors = fit_second_moments(session, [first.select(slice(0, 2))], settings, bases)[0]
    with session.computing():
        evaluation = Evaluation(session, factors, invert(factors, ifc.damping, session.blocks), ifc.damping)
    return passes, _timed(first, lambda batch: score_columns(evaluation, [batch], options)), evaluation


def _timed(batch: Batch, run: Callable[[Batch], object]) -> float:
    """Seconds for an example, from as many as time allows; the first run, which is slower, does not count."""
    seconds, count = 0.0, min(2, batch.size)
    for _ in range(2):
        started = time.perf_counter()
        run(batch.select(slice(0, count)))
        seconds = (time.perf_counter() - started) / count
        count = max(1, min(batch.size, int(_PATIENCE / seconds)))
    return seconds


def _axes(session: Session) -> dict[str, Basis]:
    def axes(shape: tuple[int, ...] | None) -> Tensor | None:
        if shape is None:
            return None
        return torch.eye(shape[-1], dtype=session.dtype, device=session.device).expand(shape).contiguous()

    found = {block.name: [axes(shape) for shape in factor_shapes(block)[1:]] for block in session.kronecker}
    return {name: Basis(inputs, outputs) for name, (inputs, outputs) in found.items() if outputs is not None}


def _seconds_per_cube() -> float:
    matrix = torch.eye(_SIDE, dtype=torch.float64) + 1e-3
    torch.linalg.eigh(matrix)
    started = time.perf_counter()
    torch.linalg.eigh(matrix)
    return (time.perf_counter() - started) / _SIDE**3


def _eigen_work(block: Block) -> float:
    """Multiplications of its eigendecompositions, over a constant."""
    return float(sum(shape[0] * shape[-1] ** 3 for shape in factor_shapes(block)[1:] if shape is not None))


def _work(block: Block, footprint: Footprint, cotangents: int, weights: Mapping[str, Weights]) -> float:
    """Multiplications for an example, about: backward through the layer, and its forms."""
    if not isinstance(block, KroneckerBlock):
        return float(block.size * cotangents)
    positions = footprint.positions.get(block.name, 0)
    kernel = choose_kernel(block, positions, cotangents, weights[block.name].condition)
    forms = (pairs_cost if kernel == "pairs" else direct_cost)(block, positions, cotangents)
    return forms + block.groups * block.rows * block.columns * positions * (1 + cotangents)


def _share(work: Mapping[str, float], block: Block) -> float:
    return work[block.name] / (sum(work.values()) or 1.0)


def _layer(block: Block, item_bytes: int, fit_seconds: float, score_seconds: float) -> LayerEstimate:
    memory = max(step([block], item_bytes) for step in (covariance_bytes, eigen_bytes, factor_bytes))
    disk = sum(block_bytes(block, item_bytes))
    return LayerEstimate(block.name, block.kind, block.size, memory, disk, fit_seconds, score_seconds)
