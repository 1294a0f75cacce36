"""Run data through the recorded model and turn influence into columns of scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ifcomp import complexity
from ifcomp.curvature.factors import Damping, Factors, check_number
from ifcomp.curvature.labels import pair_cotangents, probabilities
from ifcomp.curvature.sizes import factor_bytes
from ifcomp.data.batches import Batch
from ifcomp.errors import DataError, NonFiniteError, SettingError
from ifcomp.influence.forms import FormEvaluator
from ifcomp.influence.probes import check_probes, probe_cotangents, standard_error
from ifcomp.influence.weights import Weights, invert
from ifcomp.io.resumable import NO_CHECKPOINT, ResumableWork
from ifcomp.layers.recorder import Recorder
from ifcomp.layers.recording import Recording
from ifcomp.microbatches import LabelUse, Microbatches, check_batch
from ifcomp.precision import as_double
from ifcomp.scores import DESCRIPTIONS

T = TypeVar("T")

#: The stage of scoring, as checkpoints name it.
ROWS = "rows"

#: Largest number of bytes per row.
ROW_BYTES = 8 * len(DESCRIPTIONS)


@dataclass(frozen=True)
class Evaluation:
    """A recorded model with its fitted curvature, inverted with one damping.

    Attributes:
        recorder: Records the model.
        factors: Its curvature.
        weights: Inverse curvature by block.
        damping: Added to the curvature.
        microbatches: Splits batches into microbatches.
    """

    recorder: Recorder
    factors: Factors
    weights: Mapping[str, Weights]
    damping: Damping
    microbatches: Microbatches

    @property
    def beta(self) -> float:
        """Inverse temperature."""
        return self.factors.settings.beta

    def with_limit(self, limit: int | None) -> Evaluation:
        """Return a copy with a memory limit and without measured peaks.

        Args:
            limit: Memory limit of tensors other than model and data, in bytes.
        """
        device, fixed_bytes = self.recorder.device, self.microbatches.fixed_bytes
        microbatches = Microbatches(device, limit=limit, fixed_bytes=fixed_bytes, repeat_trials=True)
        return replace(self, microbatches=microbatches)

    @cached_property
    def effective_parameters(self) -> float:
        """Mean expected influence of the training examples."""
        return self.factors.effective_parameters(self.damping)


def build_evaluation(recorder: Recorder, factors: Factors, damping: Damping) -> Evaluation:
    """Invert the curvature.

    Args:
        recorder: Records the model.
        factors: Its curvature.
        damping: Added to the curvature.
    """
    with recorder.computing():
        weights = invert(factors, damping)
    inverse_bytes = sum(block.values.nbytes for block in weights.values())
    fixed_bytes = factor_bytes(recorder.blocks, recorder.dtype.itemsize) + inverse_bytes
    microbatches = Microbatches(recorder.device, fixed_bytes=fixed_bytes, repeat_trials=True)
    return Evaluation(recorder, factors, weights, damping, microbatches)


@dataclass(frozen=True)
class Microbatch:
    """A recorded microbatch.

    Attributes:
        batch: The examples.
        logits: [B, K] in float64.
        probability: ``softmax(beta * logits)`` in float64, [B, K].
        recording: The forward pass.
        evaluator: Evaluates quadratic and bilinear forms.
    """

    batch: Batch
    logits: Tensor
    probability: Tensor
    recording: Recording
    evaluator: FormEvaluator

    def check_finite(self, values: Tensor) -> Tensor:
        """Return results [B, ...], or raise NonFiniteError if they overflowed."""
        wrong = ~values.flatten(1).isfinite().all(1)
        if wrong.any():
            raise NonFiniteError(
                f"{self.batch.name}: the influence of {self.batch.describe_example(wrong)} of the batch overflowed: "
                "the input is too far from the training data. Scale the inputs, raise the damping, use model.double(), "
                "or leave the example out."
            )
        return values


def evaluate(
    evaluation: Evaluation,
    batches: Iterable[Batch],
    cotangents: int,
    step: Callable[[Microbatch], T],
    labels: LabelUse = "optional",
    work: str = "",
) -> Iterator[T]:
    """Record every batch in microbatches and run a step on each.

    Args:
        evaluation: The recorded model and its curvature.
        batches: The data.
        cotangents: Number of cotangents per example.
        step: Receives a recorded microbatch.
        labels: Whether labels are needed.
        work: Name of the step. Steps of different memory need different names.

    Yields:
        The results of the step, in the order of the data.
    """
    recorder, factors = evaluation.recorder, evaluation.factors

    def record_and_run(batch: Batch, chunk_size: int) -> T:
        with recorder.attached():
            recording = recorder.record(batch)
            with recorder.computing():
                evaluator = FormEvaluator(factors, evaluation.weights, recording, chunk_size, cotangents)
                logits = as_double(recording.logits.detach(), recorder.dtype)
                return step(Microbatch(batch, logits, probabilities(logits, evaluation.beta), recording, evaluator))

    for batch in batches:
        checked = replace(check_batch(batch, factors.num_classes, labels), shared=recorder.shared)
        yield from evaluation.microbatches.run(checked, cotangents, record_and_run, work)


def label_influence(microbatch: Microbatch) -> Tensor:
    """Influence of every label (eq. bif), [B, K]."""
    return microbatch.check_finite(microbatch.evaluator.labels(microbatch.probability))


def logit_kernel(microbatch: Microbatch) -> Tensor:
    """The logit kernel M, [B, K, K]."""
    size, classes = microbatch.logits.shape
    axes = torch.eye(classes, dtype=torch.float64, device=microbatch.logits.device)
    cotangents = axes.unsqueeze(1).expand(classes, size, classes)
    return microbatch.check_finite(microbatch.evaluator.bilinear(cotangents))


@dataclass(frozen=True)
class ExpectedInfluence:
    """Expected influence of a microbatch.

    Attributes:
        value: E[IF], [B].
        influence: Influence of every label, [B, K]; None if E[IF] is estimated from probes.
        error: Standard error of an estimate, [B]; None if it is exact or from a single probe.
    """

    value: Tensor
    influence: Tensor | None = None
    error: Tensor | None = None


def expected_influence(microbatch: Microbatch, probes: int | None, seed: int) -> ExpectedInfluence:
    """E[IF] from all labels, or from random probes.

    Args:
        microbatch: The recorded examples.
        probes: Number of probes; None evaluates all labels.
        seed: Seed of the probes.
    """
    if probes is None:
        influence = label_influence(microbatch)
        return ExpectedInfluence(complexity.expected_influence(microbatch.probability, influence), influence)
    cotangents = probe_cotangents(microbatch.probability, probes, seed)
    forms = microbatch.check_finite(microbatch.evaluator.quadratic(cotangents))
    error = standard_error(forms, microbatch.logits.shape[1]) if probes > 1 else None
    return ExpectedInfluence(forms.sum(1), error=error)


@dataclass(frozen=True)
class ScoreOptions:
    """Options of codelengths; see `IFComp.score`."""

    seen: bool = True
    alpha: float = 1.0
    linearized: bool = False
    probes: int | None = None
    capped: bool = False

    def __post_init__(self) -> None:
        """Validate the options."""
        check_number("alpha", self.alpha)
        if self.probes is not None and not self.seen:
            raise SettingError("seen=False needs the influence of the given label. probes= does not compute it.")
        if self.capped and (self.linearized or self.probes is not None):
            given = "linearized=True" if self.linearized else f"probes={self.probes}"
            raise SettingError(
                f"capped=True needs the hindsight probability of every label, which {given} does not give. Leave one "
                "out."
            )


def score_key(evaluation: Evaluation, options: ScoreOptions) -> dict[str, Any]:
    """Everything but the model and the data that scores depend on, as plain JSON."""
    return {
        "work": "score",
        "fit": evaluation.factors.digest(),
        "settings": asdict(evaluation.factors.settings),
        "options": asdict(options),
        "damping": repr(evaluation.damping),
        "device": str(evaluation.recorder.device),
        "autocast": evaluation.recorder.autocast,
        "max_memory": evaluation.microbatches.limit,
    }


def score_columns(
    evaluation: Evaluation, batches: Iterable[Batch], options: ScoreOptions, work: ResumableWork = NO_CHECKPOINT
) -> dict[str, Tensor]:
    """Columns of `ScoreTable` by name, with one row per example; empty without examples.

    Args:
        evaluation: The recorded model and its curvature.
        batches: The data.
        options: How codelengths are formed.
        work: Saves rows from time to time.
    """
    classes = evaluation.factors.num_classes
    if options.probes is not None:
        check_probes(options.probes, classes)
    parts: list[dict[str, Tensor]] = []

    def joined() -> dict[str, Tensor]:
        parts[:] = [_join(parts)] if parts else []
        return parts[0] if parts else {}

    saved = work.begin_stage(
        ROWS, lambda: {f"{place:03}/{name}": value for place, (name, value) in enumerate(joined().items())}
    )
    if saved:
        parts.append({key.split("/", 1)[1]: saved[key] for key in sorted(saved)})
    step = partial(_columns, evaluation, options)
    for columns in evaluate(evaluation, batches, options.probes or classes, step):
        _append(parts, columns)
    return joined()


def _append(parts: list[dict[str, Tensor]], part: dict[str, Tensor]) -> None:
    """Append rows and join parts of similar size: long runs keep few small tensors, and the heap fragments less."""
    parts.append(part)
    while len(parts) > 1 and len(parts[-2]["index"]) <= len(parts[-1]["index"]):
        parts[-2:] = [_join(parts[-2:])]


def _join(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    if any(part.keys() != parts[0].keys() for part in parts):
        raise DataError("Some batches have labels and others have none. Give labels for all or for none.")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _columns(evaluation: Evaluation, options: ScoreOptions, microbatch: Microbatch) -> dict[str, Tensor]:
    """All columns of a microbatch, on the CPU."""
    batch = microbatch.batch
    expected = expected_influence(microbatch, options.probes, evaluation.factors.settings.seed)
    log_probability = torch.log_softmax(evaluation.beta * microbatch.logits, 1)
    columns = _input_columns(evaluation, options, microbatch, expected, log_probability)
    if batch.labels is not None:
        parametric = columns["parametric_complexity"]
        columns |= _label_columns(evaluation, options, microbatch, expected, log_probability, parametric)
    index = torch.arange(batch.position, batch.position + batch.size, device="cpu")
    return {"index": index} | {name: value.detach().cpu() for name, value in columns.items()}


def _input_columns(
    evaluation: Evaluation,
    options: ScoreOptions,
    microbatch: Microbatch,
    expected: ExpectedInfluence,
    log_probability: Tensor,
) -> dict[str, Tensor]:
    """Columns that need no labels."""
    count, mean_influence = evaluation.factors.count, evaluation.effective_parameters or 1.0
    probability, influence = microbatch.probability, expected.influence
    parametric = complexity.parametric_complexity(expected.value, count, options.alpha, options.linearized)
    if options.capped and influence is not None:
        parametric = complexity.capped_complexity(probability, influence, count, options.alpha)
    columns = {
        "prediction": microbatch.logits.argmax(1),
        "confidence": probability.max(1).values,
        "expected_influence": expected.value,
    }
    if expected.error is not None:
        columns["expected_influence_error"] = expected.error
    columns["parametric_complexity"] = parametric
    if influence is not None:
        columns["bounded_complexity"] = complexity.bounded_complexity(log_probability, influence, mean_influence)
    return columns


def _label_columns(
    evaluation: Evaluation,
    options: ScoreOptions,
    microbatch: Microbatch,
    expected: ExpectedInfluence,
    log_probability: Tensor,
    parametric: Tensor,
) -> dict[str, Tensor]:
    """Columns of the given labels."""
    factors, mean_influence = evaluation.factors, evaluation.effective_parameters or 1.0
    assert microbatch.batch.labels is not None
    labels = microbatch.batch.labels.to(parametric.device)
    suggested = microbatch.logits.scatter(1, labels.unsqueeze(1), -torch.inf).argmax(1)
    error, suggested_error = (complexity.codelength(log_probability, chosen) for chosen in (labels, suggested))
    contrast = microbatch.evaluator.quadratic(pair_cotangents(labels, suggested, factors.num_classes)).squeeze(1)
    columns = {
        "label": labels,
        "label_probability": (-error).exp(),
        "suggested_label": suggested,
        "suggested_probability": microbatch.probability.gather(1, suggested.unsqueeze(1)).squeeze(1),
        "error": error,
        "label_complexity": complexity.label_complexity(error, suggested_error, contrast, mean_influence),
    }
    regret = None
    if expected.influence is not None:
        influence = expected.influence.gather(1, labels.unsqueeze(1)).squeeze(1)
        regret = complexity.regret(influence, factors.count, options.alpha, options.linearized)
        columns |= {"influence": influence, "regret": regret}
    hindsight = None if options.seen else regret
    return columns | {"stochastic_complexity": complexity.stochastic_complexity(error, parametric, hindsight)}
