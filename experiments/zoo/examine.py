"""Examination of one architecture: fit, score, and compare with the dense reference and with other batches."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from experiments.zoo.entry import Entry, Inputs
from experiments.zoo.precision import KeepDouble
from experiments.zoo.reference import Reference, alive, uncovered
from ifcomp import IFComp
from ifcomp.curvature.factors import Relative
from ifcomp.errors import IfcompError

#: Results: exact, an error of the library, wrong, another error, no result in time, the process ended.
VERDICTS = ("exact", "refused", "wrong", "crash", "timeout", "killed")
#: Largest relative error that counts as exact.
TOLERANCE = 1e-6

#: Largest difference between fits with different batches. Eigenvectors of equal eigenvalues are arbitrary and depend on
#: rounding errors.
CUT_TOLERANCE = 1e-4
#: Error of results that are not finite.
UNBOUNDED = 1e99
TRAIN, TEST = 12, 8
#: Packages whose models cast values to float32. `KeepDouble` would hide the fast path of `nn.TransformerEncoder`.
CASTING = ("timm", "transformers", "peft")
#: Largest change of logits by padding. Beyond it scores are not compared, because the model itself depends on padding.
LOGITS_TOLERANCE = 1e-8
#: Sizes of the batches of the second fit. The first four examples of token models have equal lengths.
FIT_CUT = (4, 5, 3)
DAMPING = Relative(0.1)


@dataclass
class Result:
    """The outcome of an examination.

    Attributes:
        name: Name of the architecture.
        source: Its package.
        verdict: One of `VERDICTS`.
        parameters: Number of parameters.
        trainable: Number of parameters that require a gradient.
        ekfac: Share of the trainable parameters with EKFAC blocks.
        diagonal: Share with diagonal blocks.
        errors: Relative errors by comparison.
        worst: Blocks with the largest errors of second moments.
        dead: Blocks whose gradients are rounding errors.
        others: Parameters with diagonal blocks that belong to no layer.
        message: Text of an error.
        times: Seconds of forward pass, fit and score, and units: score over forward pass.
    """

    name: str
    source: str
    verdict: str = "exact"
    parameters: int = 0
    trainable: int = 0
    ekfac: float = 0.0
    diagonal: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    message: str = ""
    times: dict[str, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """The largest error. The difference between fits with different batches has a separate limit."""
        return max((error for name, error in self.errors.items() if name != "fit cut"), default=0.0)

    @property
    def is_exact(self) -> bool:
        """Whether all errors are below their limits."""
        return self.error <= TOLERANCE and self.errors.get("fit cut", 0.0) <= CUT_TOLERANCE


def examine(entry: Entry) -> Result:
    """Fit, score and compare; errors of the library and crashes are part of the result."""
    result = Result(entry.name, entry.source)
    with warnings.catch_warnings(), KeepDouble() if entry.source in CASTING else nullcontext():
        warnings.simplefilter("ignore")
        try:
            _examine(entry, result)
        except IfcompError as error:
            result.verdict, result.message = "refused", f"{type(error).__name__}: {error}"
        except Exception as error:
            result.verdict, result.message = "crash", f"{type(error).__name__}: {error}"
    if result.verdict == "exact" and not result.is_exact:
        result.verdict = "wrong"
    return result


def _examine(entry: Entry, result: Result) -> None:
    model = entry.model()
    result.parameters = sum(parameter.numel() for parameter in model.parameters())
    result.trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    train, test = entry.inputs(TRAIN, seed=1), entry.inputs(TEST, seed=2)
    result.times["forward"] = _seconds(lambda: logits(model, test), 5)
    beta = inverse_temperature(model, train)
    started = time.perf_counter()
    ifc = fit(model, [train], beta)
    result.times["fit"] = time.perf_counter() - started
    _describe(ifc, result)
    _compare_with_reference(entry, ifc, train, test, result)
    scores = ifc.influence(test)
    result.times["score"] = _seconds(lambda: ifc.influence(test), 3)
    result.times["units"] = result.times["score"] / result.times["forward"]
    _compare_batches(entry, ifc, model, train, test, scores, result)
    result.errors["model after"] = _difference(model, entry.model(), test)


def _difference(model: nn.Module, original: nn.Module, inputs: Inputs) -> float:
    """Return the difference of the logits of a model from those of the original; `UNBOUNDED` if its flags differ."""
    error = row_error(logits(model, inputs), logits(original, inputs))  # first, since BigBird exchanges modules in it
    return error if _flags(model) == _flags(original) else UNBOUNDED


def _flags(model: nn.Module) -> list[bool]:
    return [*(module.training for module in model.modules()), *(value.requires_grad for value in model.parameters())]


def _compare_with_reference(entry: Entry, ifc: IFComp, train: Inputs, test: Inputs, result: Result) -> None:
    assert ifc.factors is not None
    original = entry.model()
    shapes = {name: parameter.shape for name, parameter in original.named_parameters() if parameter.requires_grad}
    reference = Reference(ifc, original)
    if missing := uncovered(reference.views, shapes):
        result.message = f"Not in exactly one block: {', '.join(missing)}."
        result.errors["blocks"] = UNBOUNDED
    moments = reference.second_moments(entry.cut(train, [1]))
    living = alive(moments)
    result.dead = sorted(moments.keys() - living)
    errors = {name: relative_error(ifc.factors.blocks[name].second_moments, moments[name]) for name in living}
    result.worst = dict(sorted(errors.items(), key=lambda item: -item[1])[:5])
    result.errors["moments"] = max(errors.values(), default=0.0)
    dampings = {name: ifc.factors.damping_of(name, DAMPING) for name in living}
    examples = entry.cut(test, [1])
    expected = reference.influence(examples, dampings)
    result.errors["influence"] = row_error(ifc.influence(test, damping=DAMPING), expected)
    absolute = float(torch.tensor(list(dampings.values())).mean())
    expected = reference.influence(examples, dict.fromkeys(moments, absolute))
    result.errors["absolute"] = row_error(ifc.influence(test, damping=absolute), expected)


def _compare_batches(
    entry: Entry, ifc: IFComp, model: nn.Module, train: Inputs, test: Inputs, scores: Tensor, result: Result
) -> None:
    for size in (1, 3):
        parts = torch.cat([ifc.influence(part) for part in entry.cut(test, [size])])
        result.errors[f"batch {size}"] = row_error(parts, scores)
    result.errors["fit cut"] = row_error(fit(model, entry.cut(train, FIT_CUT), ifc.beta).influence(test), scores)
    if entry.pad is None:
        return
    if row_error(logits(model, entry.pad(test, 3)), logits(model, test)) > LOGITS_TOLERANCE:
        result.message = "Its logits depend on padding."
    else:
        result.errors["padded score"] = row_error(ifc.influence(entry.pad(test, 3)), scores)
        result.errors["padded fit"] = row_error(fit(model, [entry.pad(train, 3)], ifc.beta).influence(test), scores)


def inverse_temperature(model: nn.Module, inputs: Inputs) -> float:
    """Return a beta at which random weights give no confident predictions, at most 1."""
    return float(2.0 / logits(model, inputs).abs().max().clamp_min(2.0))


def fit(model: nn.Module, batches: Sequence[Inputs], beta: float = 1.0, **options: Any) -> IFComp:
    """Fit the exact Fisher."""
    return IFComp(model, beta, damping=DAMPING, fisher="exact", **options).fit(list(batches), progress=False)


def logits(model: nn.Module, inputs: Inputs) -> Tensor:
    """Run the model without gradients, [B, K]."""
    with torch.no_grad():
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return output if isinstance(output, Tensor) else output.logits


def _describe(ifc: IFComp, result: Result) -> None:
    """Add the shares of EKFAC and diagonal blocks, and the names of diagonal blocks without a layer."""
    assert ifc._recorder is not None
    rows = [row for row in ifc.coverage.rows if row.covered]
    ekfac = sum(row.parameters for row in rows if row.treatment.startswith("EKFAC"))
    covered = sum(row.parameters for row in rows)
    result.ekfac = ekfac / result.trainable
    result.diagonal = (covered - ekfac) / result.trainable
    result.others = sorted(block.name for block in ifc._recorder.inventory.others)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value; `UNBOUNDED` if a value is not finite."""
    if not (actual.isfinite().all() and expected.isfinite().all()):
        return UNBOUNDED
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


def row_error(actual: Tensor, expected: Tensor) -> float:
    """Largest `relative_error` of a row."""
    return max(map(relative_error, actual, expected))


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the shortest duration of a call."""
    durations = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        durations.append(time.perf_counter() - started)
    return min(durations)
