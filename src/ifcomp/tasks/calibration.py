"""How far probabilities can be trusted: metrics, reliability curves and their plot.

Everything takes what ``numpy.asarray`` takes, tensors on the CPU included: ``probability`` [N, K] with rows that sum to
1, ``label`` [N] integers in 0 ... K-1. Of every metric but accuracy, smaller is better.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import softmax

from ifcomp.complexity import pnml_distribution
from ifcomp.curvature.factors import check_number
from ifcomp.errors import DataError, LabelError, SettingError
from ifcomp.io.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

#: Bins of equally many examples, as in the paper; or of equal width in confidence, the usual ones.
Spacing = Literal["mass", "width"]

#: As in the paper.
BINS = 20

#: Where an inverse temperature is searched.
INVERSE_TEMPERATURES = (0.02, 50.0)

#: How far a row of probabilities may be from a sum of 1: float32 over a thousand classes is much closer.
SUM_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class ReliabilityCurve:
    """Confidence against accuracy, over bins of confidence; empty bins are left out.

    Attributes:
        confidence: Mean of the largest probability in each bin, [M], increasing.
        accuracy: Share of right predictions in each bin, [M].
        count: Examples in each bin, [M].
    """

    confidence: Floats
    accuracy: Floats
    count: Integers

    @property
    def ece(self) -> float:
        """Expected calibration error: mean of ``|confidence - accuracy|``, weighted by the bins' counts."""
        return float(np.average(abs(self.confidence - self.accuracy), weights=self.count))


def reliability_curve(
    probability: ArrayLike, label: ArrayLike, bins: int = BINS, spacing: Spacing = "mass"
) -> ReliabilityCurve:
    """Confidence (the largest probability) and accuracy in each bin of confidence.

    The result does not depend on the order of the examples: those of equal confidence count as equally often right.

    Args:
        probability: [N, K].
        label: [N].
        bins: Number of bins; of equal mass there are at most N.
        spacing: "mass": sorted by confidence, sizes differ by at most one. "width": ``(i / bins, (i + 1) / bins]``.
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise SettingError(f"bins must be a whole number of at least 1, but is {bins!r}.")
    if spacing not in ("mass", "width"):
        raise SettingError(f"spacing must be 'mass' or 'width', but is {spacing!r}.")
    values, truth = checked_probabilities(probability, label)
    levels, level, repeats = np.unique(values.max(1), return_inverse=True, return_counts=True)
    right = np.bincount(level, values.argmax(1) == truth) / repeats
    confidence, correct = np.repeat(levels, repeats), np.repeat(right, repeats)
    if spacing == "mass":
        sizes = [len(part) for part in np.array_split(confidence, min(bins, len(confidence)))]
        bin_of = np.repeat(np.arange(len(sizes)), sizes)
    else:
        bin_of = np.digitize(confidence, np.arange(1, bins) / bins, right=True)
    count = np.bincount(bin_of)
    used = count > 0
    sums = [np.bincount(bin_of, weights)[used] for weights in (confidence, correct)]
    return ReliabilityCurve(sums[0] / count[used], sums[1] / count[used], count[used])


def expected_calibration_error(
    probability: ArrayLike, label: ArrayLike, bins: int = BINS, spacing: Spacing = "mass"
) -> float:
    """Mean distance between confidence and accuracy over bins of confidence; see `reliability_curve`."""
    return reliability_curve(probability, label, bins, spacing).ece


def negative_log_likelihood(probability: ArrayLike, label: ArrayLike) -> float:
    """Mean ``-log p`` of the labels in nats; infinite where a label has no probability."""
    values, truth = checked_probabilities(probability, label)
    with np.errstate(divide="ignore"):
        return float(-np.log(values[np.arange(len(truth)), truth]).mean())


def brier_score(probability: ArrayLike, label: ArrayLike) -> float:
    """Mean squared distance of the probabilities to the one-hot label, ``sum_k (p_k - [k = y])^2``; from 0 to 2."""
    values, truth = checked_probabilities(probability, label)
    own = values[np.arange(len(truth)), truth]
    return float((np.square(values).sum(1) - 2 * own + 1).mean())


def accuracy(probability: ArrayLike, label: ArrayLike) -> float:
    """Share of examples whose largest probability is the label's; larger is better."""
    values, truth = checked_probabilities(probability, label)
    return float((values.argmax(1) == truth).mean())


def calibration_summary(probability: ArrayLike, label: ArrayLike) -> dict[str, float]:
    """All metrics: ``accuracy``, mean ``confidence``, ``nll`` (nats), ``brier``, ``ece`` (mass), ``ece_width``."""
    values, truth = checked_probabilities(probability, label)
    return {
        "accuracy": accuracy(values, truth),
        "confidence": float(values.max(1).mean()),
        "nll": negative_log_likelihood(values, truth),
        "brier": brier_score(values, truth),
        "ece": expected_calibration_error(values, truth),
        "ece_width": expected_calibration_error(values, truth, spacing="width"),
    }


def fitted_inverse_temperature(logits: ArrayLike, label: ArrayLike) -> float:
    """The beta for which ``softmax(beta * logits)`` has the smallest NLL: 1 over the fitted temperature.

    Below 1 the model is overconfident. The NLL is convex in beta, and its derivative, the mean of ``E_p[f] - f_y``, is
    zero at the best one; where that is outside `INVERSE_TEMPERATURES`, the nearer bound is given.

    Args:
        logits: f, [N, K].
        label: y, [N].
    """
    values = np.asarray(logits, dtype=np.float64)
    _, truth = checked_probabilities(softmax(values, axis=1), label)
    values = values - values[np.arange(len(truth)), truth][:, np.newaxis]

    def slope(beta: float) -> float:
        return float((softmax(beta * values, axis=1) * values).sum(1).mean())

    low, high = INVERSE_TEMPERATURES
    if slope(low) >= 0 or slope(high) <= 0:
        return low if slope(low) >= 0 else high
    return float(brentq(slope, low, high))


def pnml_grid(
    probability: ArrayLike, influence: ArrayLike, label: ArrayLike, count: int, alphas: Iterable[float]
) -> pd.DataFrame:
    """Metrics of the pNML distribution (eq. pnml_dist) for every alpha, as it is and with the predicted class kept.

    Args:
        probability: The model's distribution at beta, [N, K].
        influence: Boltzmann influence of every label at the same beta, [N, K].
        label: [N].
        count: Training examples n.
        alphas: Weights of an example beside a training example; 0 gives the model's distribution.

    Returns:
        One row for each alpha and variant: ``alpha``, ``keep_argmax``, ``nll`` (nats), ``ece``, ``accuracy``,
        ``brier``.
    """
    values, truth = checked_probabilities(probability, label)
    forms = np.asarray(influence, dtype=np.float64)
    if forms.shape != values.shape or not (forms >= 0).all():
        raise DataError(f"influence must be at least 0 and of shape {list(values.shape)}, but has {list(forms.shape)}.")
    rows = []
    for alpha in alphas:
        check_number("alpha", alpha)
        for keep_argmax in (False, True):
            found = pnml_distribution(torch.tensor(values), torch.tensor(forms), count, alpha, keep_argmax)
            summary = calibration_summary(found, truth)
            kept = {name: summary[name] for name in ("nll", "ece", "accuracy", "brier")}
            rows.append({"alpha": float(alpha), "keep_argmax": keep_argmax, **kept})
    return pd.DataFrame(rows)


def plot_reliability(curves: Mapping[str, ReliabilityCurve], target: str | os.PathLike[str] | Axes) -> None:
    """Draw accuracy over confidence, with the diagonal of perfect calibration: below it is overconfident.

    Args:
        curves: By name.
        target: Axes to draw into; or a file to write, whose ending says the format (png, svg, pdf). Atomic.
    """
    if not curves:
        raise DataError("plot_reliability needs at least one curve, but got none.")
    if not isinstance(target, str | os.PathLike):
        _draw(curves, target)
        return
    from matplotlib.figure import Figure  # not needed for any metric, and slow to import

    figure = Figure(figsize=(5, 5), layout="constrained")
    kind, known = Path(target).suffix.removeprefix(".").lower(), figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise SettingError(f"Cannot draw into '{target}': the ending must be one of {', '.join(sorted(known))}.")
    _draw(curves, figure.add_subplot())
    with atomic_write(target) as scratch:
        figure.savefig(scratch, format=kind)


def _draw(curves: Mapping[str, ReliabilityCurve], axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="perfect")
    for name, curve in curves.items():
        axes.plot(curve.confidence, curve.accuracy, marker="o", markersize=3, label=f"{name}: ECE {curve.ece:.3f}")
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.legend(loc="upper left")


def checked_probabilities(probability: ArrayLike, label: ArrayLike) -> tuple[Floats, Integers]:
    """Probabilities as float64 [N, K] and labels as int64 [N].

    Raises:
        DataError: If the probabilities are none.
        LabelError: If the labels are not integers in 0 ... K-1, one for each row.
    """
    values, truth = np.asarray(probability, dtype=np.float64), np.asarray(label)
    if values.ndim != 2 or not values.size:
        raise DataError(f"probabilities must have shape [N, K] with N > 0, but have {list(values.shape)}.")
    if not (values >= 0).all() or not (abs(values.sum(1) - 1) <= SUM_TOLERANCE).all():
        raise DataError("Every row of probabilities must be at least 0 and sum to 1. For logits use softmax first.")
    if truth.shape != (len(values),) or truth.dtype.kind not in "iu":
        raise LabelError(
            f"labels must be integers of shape [{len(values)}], but are {truth.dtype} of shape {list(truth.shape)}."
        )
    if truth.min() < 0 or truth.max() >= values.shape[1]:
        raise LabelError(f"labels must be in 0 ... {values.shape[1] - 1}, but go from {truth.min()} to {truth.max()}.")
    return values, truth.astype(np.int64)
