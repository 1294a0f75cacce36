"""Calibration metrics, reliability curves and their plot.

All arguments are array-like, including tensors on the CPU: ``probability`` [N, K] with rows that sum to 1, ``label``
[N] with integers in 0 ... K-1. Smaller is better for every metric except accuracy.
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

from ifcomp.complexity import pnml_distribution
from ifcomp.curvature.factors import check_number
from ifcomp.errors import DataError, SettingError
from ifcomp.io.files import atomic_write
from ifcomp.tasks.metrics import checked_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

#: "mass": bins with equal numbers of examples, as in the paper. "width": bins of equal width in confidence.
Spacing = Literal["mass", "width"]

#: Number of bins, as in the paper.
BINS = 20

#: Largest deviation of a row of probabilities from a sum of 1. In float32 with a thousand classes it is far smaller.
SUM_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class ReliabilityCurve:
    """Confidence and accuracy over M bins of confidence; empty bins are left out.

    Attributes:
        confidence: Mean of the largest probability in each bin, [M], increasing.
        accuracy: Share of correct predictions in each bin, [M].
        count: Number of examples in each bin, [M].
    """

    confidence: Floats
    accuracy: Floats
    count: Integers

    @property
    def ece(self) -> float:
        """Expected calibration error: mean of ``|confidence - accuracy|``, weighted by ``count``."""
        return float(np.average(abs(self.confidence - self.accuracy), weights=self.count))


def reliability_curve(
    probability: ArrayLike, label: ArrayLike, bins: int = BINS, spacing: Spacing = "mass"
) -> ReliabilityCurve:
    """Return confidence (the largest probability) and accuracy per bin of confidence.

    The result does not depend on the order of the examples: examples of equal confidence share their mean accuracy.

    Args:
        probability: Probabilities, [N, K].
        label: Labels, [N].
        bins: Number of bins; at most N are used with "mass".
        spacing: "mass": sort by confidence, bin sizes differ by at most one. "width": ``(i / bins, (i + 1) / bins]``.
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise SettingError(f"bins must be a whole number of at least 1, but is {bins!r}.")
    if spacing not in ("mass", "width"):
        raise SettingError(f"spacing must be 'mass' or 'width', but is {spacing!r}.")
    values, truth = checked_probabilities(probability, label)
    levels, level, repeats = np.unique(values.max(1), return_inverse=True, return_counts=True)
    accuracy_of_level = np.bincount(level, values.argmax(1) == truth) / repeats
    confidence, correct = np.repeat(levels, repeats), np.repeat(accuracy_of_level, repeats)
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
    """Mean of ``|confidence - accuracy|`` over bins of confidence (ECE); see `reliability_curve`."""
    return reliability_curve(probability, label, bins, spacing).ece


def negative_log_likelihood(probability: ArrayLike, label: ArrayLike) -> float:
    """Mean ``-log p_y`` in nats; infinite if a label has probability 0."""
    values, truth = checked_probabilities(probability, label)
    with np.errstate(divide="ignore"):
        return float(-np.log(values[np.arange(len(truth)), truth]).mean())


def brier_score(probability: ArrayLike, label: ArrayLike) -> float:
    """Mean of ``sum_k (p_k - [k = y])^2``, the squared distance to the one-hot label, between 0 and 2."""
    values, truth = checked_probabilities(probability, label)
    label_probability = values[np.arange(len(truth)), truth]
    return float((np.square(values).sum(1) - 2 * label_probability + 1).mean())


def accuracy(probability: ArrayLike, label: ArrayLike) -> float:
    """Share of examples whose label has the largest probability; larger is better."""
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


def pnml_grid(
    probability: ArrayLike, influence: ArrayLike, label: ArrayLike, count: int, alphas: Iterable[float]
) -> pd.DataFrame:
    """Return the metrics of the pNML distribution (eq. pnml_dist) for every alpha, with and without ``keep_argmax``.

    Args:
        probability: Model distribution at beta, [N, K].
        influence: Boltzmann influence of every label at the same beta, [N, K].
        label: Labels, [N].
        count: Number of training examples n.
        alphas: Weights of an example relative to one training example; 0 gives the model distribution.

    Returns:
        One row per alpha and form: ``alpha``, ``keep_argmax``, ``nll`` (nats), ``ece``, ``accuracy``, ``brier``.
    """
    values, truth = checked_probabilities(probability, label)
    scores = np.asarray(influence, dtype=np.float64)
    if scores.shape != values.shape:
        raise DataError(f"influence must have shape {list(values.shape)}, but has {list(scores.shape)}.")
    if not (scores >= 0).all():
        raise DataError("influence must be at least 0, but has negative values or NaN.")
    rows = []
    for alpha in alphas:
        check_number("alpha", alpha)
        for keep_argmax in (False, True):
            pnml = pnml_distribution(torch.tensor(values), torch.tensor(scores), count, alpha, keep_argmax)
            summary = calibration_summary(pnml, truth)
            metrics = {name: summary[name] for name in ("nll", "ece", "accuracy", "brier")}
            rows.append({"alpha": float(alpha), "keep_argmax": keep_argmax, **metrics})
    return pd.DataFrame(rows)


def plot_reliability(curves: Mapping[str, ReliabilityCurve], target: str | os.PathLike[str] | Axes) -> None:
    """Plot accuracy over confidence. Curves below the diagonal are overconfident.

    Args:
        curves: Reliability curves by name.
        target: Matplotlib axes, or the path of a file to write. The suffix sets the format (png, svg, pdf). Atomic.
    """
    if not curves:
        raise DataError("plot_reliability needs at least one curve, but got none.")
    if not isinstance(target, str | os.PathLike):
        _draw(curves, target)
        return
    figure = draw_reliability(curves)
    suffix, supported = Path(target).suffix.removeprefix(".").lower(), figure.canvas.get_supported_filetypes()
    if suffix not in supported:
        raise SettingError(
            f"Cannot write a plot to '{target}': the suffix must be one of {', '.join(sorted(supported))}."
        )
    with atomic_write(target) as scratch:
        figure.savefig(scratch, format=suffix)


def draw_reliability(curves: Mapping[str, ReliabilityCurve]) -> Figure:
    """Return a figure of accuracy over confidence. Curves below the diagonal are overconfident.

    Args:
        curves: Reliability curves by name.
    """
    from matplotlib.figure import Figure  # slow import that the metrics do not need

    figure = Figure(figsize=(5, 5), layout="constrained")
    _draw(curves, figure.add_subplot())
    return figure


def _draw(curves: Mapping[str, ReliabilityCurve], axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="perfect")
    for name, curve in curves.items():
        axes.plot(curve.confidence, curve.accuracy, marker="o", markersize=3, label=f"{name}: ECE {curve.ece:.3f}")
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.legend(loc="upper left")


def checked_probabilities(probability: ArrayLike, label: ArrayLike) -> tuple[Floats, Integers]:
    """Return the probabilities as float64 [N, K] and the labels as int64 [N].

    Raises:
        DataError: If the values are not probabilities.
        LabelError: If the labels are not integers in 0 ... K-1, one for each row.
    """
    values = np.asarray(probability, dtype=np.float64)
    if values.ndim != 2 or not values.size:
        raise DataError(f"probabilities must have shape [N, K] with N > 0, but have {list(values.shape)}.")
    if not (values >= 0).all() or not (abs(values.sum(1) - 1) <= SUM_TOLERANCE).all():
        raise DataError("Every row of probabilities must be at least 0 and sum to 1. For logits use softmax first.")
    return values, checked_labels(label, *values.shape)
