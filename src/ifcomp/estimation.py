"""Memory, disk and time of a fit and of scoring, from a few examples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp.blocks.block import Basis, Block
from ifcomp.curvature.reference import reference_elements
from ifcomp.curvature.sizes import block_bytes, check_factor_memory, covariance_bytes, eigen_bytes, factor_bytes
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_label_form
from ifcomp.data.forms import DataRequest, as_data
from ifcomp.errors import EmptyDataError
from ifcomp.fitting import FitPasses
from ifcomp.layers.recorder import Recorder, working_dtype
from ifcomp.layers.verification import verified_recorder
from ifcomp.memory import as_bytes, as_text, available
from ifcomp.microbatches import Microbatches
from ifcomp.predictor import IFComp
from ifcomp.progress import known_length
from ifcomp.scoring import ScoreOptions, build_evaluation, score_columns

#: Bytes that libraries take when they are first used: convolution primitives, LAPACK, pandas.
_LIBRARY_BYTES = 60 * 10**6

#: Process memory per byte of tensors: operations need workspace, and the heap fragments.
_OVERHEAD = 1.25

#: Number of examples whose peak memory is measured.
_MEASURED_EXAMPLES = 4

#: Side of the matrix whose eigendecomposition is timed; time grows with the cube of the side.
_SIDE = 256

#: Titles of `cells`.
CELLS: tuple[str, ...] = ("layer", "kind", "parameters", "memory", "disk")


@dataclass(frozen=True)
class LayerEstimate:
    """One block.

    Attributes:
        name: Name of the block.
        kind: Kind of its module.
        parameters: Number of parameters.
        memory: Peak bytes of its covariances or factors, with the workspace of its eigendecompositions.
        disk: Bytes of its factors in a file.
    """

    name: str
    kind: str
    parameters: int
    memory: int
    disk: int


@dataclass(frozen=True)
class Estimate:
    """Memory, disk and time of a fit and of scoring. ``print`` shows a table.

    Attributes:
        layers: Factors block by block. Activations, output gradients and the reference set are in the totals only.
        examples: Number of examples that the seconds are for.
        fit_memory: Peak bytes of the process during a fit, beside model and data.
        score_memory: The same for scoring.
        disk: Bytes of the file that `IFComp.save` writes.
        fit_seconds: Both passes and the eigendecompositions.
        score_seconds: Scoring the same number of examples.
    """

    layers: tuple[LayerEstimate, ...]
    examples: int
    fit_memory: int
    score_memory: int
    disk: int
    fit_seconds: float
    score_seconds: float

    def __str__(self) -> str:
        rows = [CELLS]
        rows += [cells(layer) for layer in self.layers]
        widths = [max(len(row[column]) for row in rows) for column in range(len(CELLS))]
        lines = [
            "  ".join(cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(row, widths, strict=True)) for row in rows)
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:], rule, *self.summary])

    @property
    def summary(self) -> list[str]:
        """The totals as text."""
        return [
            f"fit: {as_text(self.fit_memory)} at the peak, {self.fit_seconds:.3g} s for {self.examples:,} examples, "
            f"{as_text(self.disk)} on disk",
            f"score: {as_text(self.score_memory)} at the peak, {self.score_seconds:.3g} s for {self.examples:,} "
            "examples",
        ]


def cells(layer: LayerEstimate) -> tuple[str, ...]:
    """A layer as the cells of a table, see `CELLS`."""
    return (
        layer.name or "(model)",
        layer.kind,
        f"{layer.parameters:,}",
        as_text(layer.memory),
        as_text(layer.disk),
    )


def estimate(
    model: nn.Module,
    data: Any,
    *,
    examples: int | None = None,
    probes: int | None = None,
    max_memory: int | str | None = None,
    seconds: float = 1.0,
    **options: Any,
) -> Estimate:
    """Estimate memory, disk and time of a fit on this data and of scoring it, from examples of the first batch.

    Args:
        model: The classifier; it is not modified.
        data: As for `IFComp.fit`; only its first batch is read.
        examples: Number of examples to estimate for. None: batches times the size of the first batch.
        probes: As for `IFComp.score`.
        max_memory: As for `IFComp.fit` and `IFComp.score`.
        seconds: Approximate duration of each timing.
        options: Arguments of `IFComp`: ``layers``, ``fisher``, ``sua`` and so on.

    Raises:
        MemoryLimitError: If the fit would need more than ``max_memory`` or the free memory.
    """
    ifc, limit = IFComp(model, **options), as_bytes(max_memory)
    batches = as_data(data, DataRequest(ifc.model, ifc.collate_fn)).batches
    score_options = ScoreOptions(probes=probes)
    first = next(as_batches(batches), None)
    if first is None:
        raise EmptyDataError("An estimate needs at least one example, but the data is empty.")
    check_label_form(first)
    if examples is None:
        examples = (known_length(batches) or 1) * first.size
    itemsize = working_dtype(ifc.model).itemsize
    with torch.inference_mode(False):
        recorder = verified_recorder(ifc.model, ifc._inventory, first, ifc._selection.layers)
        check_factor_memory(recorder.blocks, itemsize, 1, limit, available(recorder.device))
        passes = FitPasses(recorder, [ifc.settings], limit)
        bases = [_identity_bases(recorder)]
        first_pass = _timed(first, seconds, lambda batch: passes.covariances([batch]))
        second_pass = _timed(first, seconds, lambda batch: passes.second_moments([batch], bases))
        factors = passes.second_moments([first.select(slice(0, 2))], bases)[0]
        evaluation = build_evaluation(recorder, factors, ifc.damping).with_limit(limit)
        score = _timed(first, seconds, lambda batch: score_columns(evaluation, [batch], score_options))
    eigen_seconds = _seconds_per_cube() * sum(map(_eigen_work, recorder.blocks))
    fit_peaks = [_peak(microbatches, first, passes.cotangents) for microbatches in passes.microbatches]
    score_peak = _peak(evaluation.microbatches, first, probes or recorder.num_classes)
    layers = tuple(_layer(block, itemsize) for block in recorder.blocks)
    reference_bytes = reference_elements(recorder, examples) * itemsize
    fit_peaks[1] += reference_bytes
    return Estimate(
        layers,
        examples,
        process_bytes(max(*fit_peaks, eigen_bytes(recorder.blocks, itemsize))),
        process_bytes(score_peak),
        sum(layer.disk for layer in layers) + reference_bytes,
        (first_pass + second_pass) * examples + eigen_seconds,
        score * examples,
    )


def process_bytes(tensor_bytes: int) -> int:
    """Memory of a process whose tensors take this many bytes, beside model and data."""
    return int(_OVERHEAD * tensor_bytes) + _LIBRARY_BYTES


def _peak(microbatches: Microbatches, first: Batch, cotangents: int) -> int:
    """Peak bytes of tensors if all batches are like the first."""
    return microbatches.fixed_bytes + microbatches.predict(first, cotangents)


def _timed(batch: Batch, seconds: float, run: Callable[[Batch], object]) -> float:
    """Seconds per example. The first run measures memory and does not count."""
    run(batch.select(slice(0, _MEASURED_EXAMPLES)))
    count, elapsed = min(2, batch.size), 0.0
    for _ in range(2):
        started = time.perf_counter()
        run(batch.select(slice(0, count)))
        elapsed = (time.perf_counter() - started) / count
        count = max(1, min(batch.size, int(seconds / elapsed)))
    return elapsed


def _identity_bases(recorder: Recorder) -> dict[str, Basis]:
    """Identities in place of eigenvectors; rotating by them takes as long."""

    def identity(shape: tuple[int, ...]) -> Tensor:
        return torch.eye(shape[-1], dtype=recorder.dtype, device=recorder.device).expand(shape).contiguous()

    bases = {}
    for block in recorder.blocks:
        _, inputs, outputs = block.factor_shapes
        if block.has_eigenbasis:
            bases[block.name] = Basis(*(None if shape is None else identity(shape) for shape in (inputs, outputs)))
    return bases


def _seconds_per_cube() -> float:
    """Seconds of an eigendecomposition divided by the cube of the side."""
    matrix = torch.eye(_SIDE, dtype=torch.float64) + 1e-3
    torch.linalg.eigh(matrix)
    started = time.perf_counter()
    torch.linalg.eigh(matrix)
    return (time.perf_counter() - started) / _SIDE**3


def _eigen_work(block: Block) -> float:
    """Cubes of the sides of the covariances of a block."""
    return float(sum(shape[0] * shape[-1] ** 3 for shape in block.factor_shapes[1:] if shape is not None))


def _layer(block: Block, itemsize: int) -> LayerEstimate:
    memory = max(step([block], itemsize) for step in (covariance_bytes, eigen_bytes, factor_bytes))
    return LayerEstimate(block.name, block.kind, block.size, memory, sum(block_bytes(block, itemsize)))
