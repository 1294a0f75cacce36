"""Run data through the model and turn influence into rows: what `IFComp` does for every scoring call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ifcomp import complexity
from ifcomp.curvature.factors import Damping, Factors, check_number
from ifcomp.curvature.labels import pair_cotangents, probabilities
from ifcomp.data.batches import Batch
from ifcomp.errors import DataError, NonFiniteError, SettingError
from ifcomp.influence.choice import form_bytes, weight_bytes
from ifcomp.influence.forms import FormEvaluator
from ifcomp.influence.probes import check_probes, probe_cotangents, standard_error
from ifcomp.influence.weights import Weights
from ifcomp.io.fingerprints import digest_tensors
from ifcomp.io.resumable import NO_CHECKPOINT, ResumableWork
from ifcomp.layers.session import Session
from ifcomp.memory import Budget
from ifcomp.scores import DESCRIPTIONS

#: What scoring does, as checkpoints call it.
ROWS = "rows"

#: Bytes of a row, at most.
ROW_BYTES = 8 * len(DESCRIPTIONS)


@dataclass(frozen=True)
class Evaluation:
    """Fitted curvature, inverted with one damping, and the model it belongs to; ``limit`` is what may be held, in
    bytes.
    """

    session: Session
    factors: Factors
    weights: Mapping[str, Weights]
    damping: Damping
    limit: int | None = None

    @property
    def beta(self) -> float:
        """Inverse temperature."""
        return self.factors.settings.beta

    @cached_property
    def effective_parameters(self) -> float:
        """Expected influence of the average training example."""
        return self.factors.effective_parameters(self.damping)


@dataclass(frozen=True)
class Piece:
    """A recorded part of a batch: logits [B, K], ``p`` at beta [B, K] in float64, and what evaluates forms."""

    batch: Batch
    logits: Tensor
    probability: Tensor
    evaluator: FormEvaluator


@dataclass(frozen=True)
class ScoreOptions:
    """How codelengths are formed; see `IFComp.score`."""

    seen: bool = True
    alpha: float = 1.0
    linearized: bool = False
    probes: int | None = None
    capped: bool = False

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        check_number("alpha", self.alpha)
        if self.probes is not None and not self.seen:
            raise SettingError("seen=False needs the influence of the given label, which probes do not give.")
        if self.capped and (self.linearized or self.probes is not None):
            given = "linearized=True" if self.linearized else f"probes={self.probes}"
            raise SettingError(
                f"capped=True needs every label's probability in hindsight, which {given} does not give. Leave one out."
            )


def pieces(
    evaluation: Evaluation, batches: Iterable[Batch], cotangents: int, together: bool = False
) -> Iterator[Piece]:
    """Record every batch in pieces that fit in memory; inside ``session.attached``.

    What a piece evaluates is gone when the next is asked for.

    Args:
        evaluation: Fitted curvature.
        batches: The data.
        cotangents: How many there will be for each example.
        together: Whether they are needed all at once.
    """
    session = evaluation.session
    budget = Budget(evaluation.limit, weight_bytes(session))
    holds = partial(form_bytes, session, evaluation.weights, cotangents)
    for part, at_once in session.pieces(batches, cotangents, "optional", budget=budget, holds=holds, together=together):
        piece = _piece(evaluation, part, at_once)
        yield piece
        piece.evaluator.release()


def _piece(evaluation: Evaluation, part: Batch, at_once: int) -> Piece:
    session = evaluation.session
    recording = session.record(part)
    evaluator = FormEvaluator(session, evaluation.factors, evaluation.weights, recording, part, at_once)
    return Piece(part, recording.logits.detach(), probabilities(recording.logits, evaluation.beta), evaluator)


def influences(evaluation: Evaluation, batches: Iterable[Batch]) -> Iterator[tuple[Piece, Tensor]]:
    """Every piece with the influence [B, K] of every label."""
    for piece in pieces(evaluation, batches, evaluation.factors.num_classes):
        yield piece, finite(piece, piece.evaluator.label_forms(piece.probability))


def finite(piece: Piece, values: Tensor) -> Tensor:
    """Return what was evaluated for a piece, [B, ...], or raise NonFiniteError if it overflows."""
    wrong = ~values.flatten(1).isfinite().all(1)
    if wrong.any():
        raise NonFiniteError(
            f"{piece.batch.name}: the influence of {piece.batch.describe_example(wrong)} of the batch overflows, so "
            "far is it from the training data. Scale the inputs, raise the damping, use model.double(), or leave the "
            "example out."
        )
    return values


@dataclass(frozen=True)
class Expected:
    """Expected influence of a piece.

    Attributes:
        value: E[IF], [B].
        influence: What it comes from, [B, K]; None if it is estimated from probes.
        error: Standard error of an estimate, [B]; None where there is none, or it is from a single probe.
    """

    value: Tensor
    influence: Tensor | None = None
    error: Tensor | None = None


def expected_influences(
    evaluation: Evaluation, batches: Iterable[Batch], probes: int | None
) -> Iterator[tuple[Piece, Expected]]:
    """Every piece with its E[IF], exact or from probes."""
    if probes is None:
        for piece, influence in influences(evaluation, batches):
            yield piece, Expected(complexity.expected_influence(piece.probability, influence), influence)
        return
    classes = evaluation.factors.num_classes
    check_probes(probes, classes)
    for piece in pieces(evaluation, batches, probes):
        cotangents = probe_cotangents(piece.probability, probes, evaluation.factors.settings.seed)
        forms = finite(piece, piece.evaluator.forms(cotangents))
        yield piece, Expected(forms.sum(1), error=standard_error(forms, classes) if probes > 1 else None)


def score_key(evaluation: Evaluation, options: ScoreOptions) -> dict[str, Any]:
    """What scores depend on besides the model and the data, in words and plain JSON."""
    blocks = evaluation.factors.blocks.values()
    bases = [(block.basis.inputs, block.basis.outputs) for block in blocks if block.basis is not None]
    parts = [*(block.second_moments for block in blocks), *(part for pair in bases for part in pair)]
    return {
        "work": "score",
        "fit": digest_tensors(part for part in parts if part is not None)[:16],
        "settings": asdict(evaluation.factors.settings),
        "options": asdict(options),
        "damping": repr(evaluation.damping),
        "device": str(evaluation.session.device),
        "autocast": evaluation.session.autocast,
        "max_memory": evaluation.limit,
    }


def score_columns(
    evaluation: Evaluation, batches: Iterable[Batch], options: ScoreOptions, work: ResumableWork = NO_CHECKPOINT
) -> dict[str, Tensor]:
    """Every column of `ScoreTable` by name, with a number an example; none without examples. ``work`` saves rows."""
    typical = evaluation.effective_parameters or 1.0
    parts: list[dict[str, Tensor]] = []

    def joined() -> dict[str, Tensor]:
        parts[:] = [_joined(parts)] if parts else []
        return parts[0] if parts else {}

    saved = work.begin_stage(
        ROWS, lambda: {f"{place:03}/{name}": value for place, (name, value) in enumerate(joined().items())}
    )
    if saved:
        parts.append({key.split("/", 1)[1]: saved[key] for key in sorted(saved)})  # columns in their order
    with evaluation.session.attached():
        for piece, expected in expected_influences(evaluation, batches, options.probes):
            log_probability = torch.log_softmax(evaluation.beta * piece.logits.double(), 1)
            columns = _input_columns(piece, expected, log_probability, typical, evaluation.factors.count, options)
            if piece.batch.labels is not None:
                parametric = columns["parametric_complexity"]
                columns |= _label_columns(
                    piece, parametric, expected.influence, log_probability, typical, evaluation, options
                )
            index = torch.arange(piece.batch.position, piece.batch.position + piece.batch.size, device="cpu")
            _append(parts, {"index": index} | {name: value.detach().cpu() for name, value in columns.items()})
    return joined()


def _append(parts: list[dict[str, Tensor]], part: dict[str, Tensor]) -> None:
    """Add rows, and join them with parts before them that are no larger: few are left, each larger than the next.

    Small tensors that stay lie between the large ones of every batch, and memory that these leave cannot be used again.
    """
    parts.append(part)
    while len(parts) > 1 and len(parts[-2]["index"]) <= len(parts[-1]["index"]):
        parts[-2:] = [_joined(parts[-2:])]


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    if any(part.keys() != parts[0].keys() for part in parts):
        raise DataError("Some batches have labels and others have none. Give labels for all or for none.")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _input_columns(
    piece: Piece, expected: Expected, log_probability: Tensor, typical: float, count: int, options: ScoreOptions
) -> dict[str, Tensor]:
    top = piece.probability.max(1)
    error = {} if expected.error is None else {"expected_influence_error": expected.error}
    parametric = complexity.parametric_complexity(expected.value, count, options.alpha, options.linearized)
    bounded = {}
    if expected.influence is not None:
        bounded["bounded_complexity"] = complexity.bounded_complexity(log_probability, expected.influence, typical)
        if options.capped:
            parametric = complexity.capped_complexity(piece.probability, expected.influence, count, options.alpha)
    return {
        "prediction": piece.logits.argmax(1),
        "confidence": top.values,
        "expected_influence": expected.value,
        **error,
        "parametric_complexity": parametric,
        **bounded,
        "surprise": expected.value / typical,
    }


def _label_columns(
    piece: Piece,
    parametric: Tensor,
    influence: Tensor | None,
    log_probability: Tensor,
    typical: float,
    evaluation: Evaluation,
    options: ScoreOptions,
) -> dict[str, Tensor]:
    factors = evaluation.factors
    assert piece.batch.labels is not None
    labels = piece.batch.labels.to(parametric.device)
    error = complexity.codelength(log_probability, labels)
    others = piece.logits.scatter(1, labels.unsqueeze(1), -torch.inf)
    suggested = others.argmax(1)
    columns = {
        "label": labels,
        "label_probability": (-error).exp(),
        "suggested_label": suggested,
        "suggested_probability": piece.probability.gather(1, suggested.unsqueeze(1)).squeeze(1),
        "error": error,
    }
    suggested_error = complexity.codelength(log_probability, suggested)
    contrast = piece.evaluator.forms(pair_cotangents(labels, suggested, factors.num_classes)).squeeze(1)
    columns["label_complexity"] = complexity.label_complexity(error, suggested_error, contrast, typical)
    regret = None
    if influence is not None:
        own = influence.gather(1, labels.unsqueeze(1)).squeeze(1)
        regret = complexity.regret(own, factors.count, options.alpha, options.linearized)
        columns |= {"influence": own, "regret": regret}
    hindsight = None if options.seen else regret
    return columns | {"stochastic_complexity": complexity.stochastic_complexity(error, parametric, hindsight)}
