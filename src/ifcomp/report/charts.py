"""Geometry of the charts: positions in SVG units, computed from arrays. The templates draw them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ifcomp.report.data import Curve, Floats, ReliabilityPair
from ifcomp.report.summary import interval

#: SVG units; one is about a pixel on a phone.
WIDTH = 440.0
MARGIN_LEFT = 48.0
MARGIN_RIGHT = 14.0
BINS = 40
ROW_HEIGHT = 58.0
SINGLE_ROW_HEIGHT = 150.0
ROW_GAP = 30.0
LARGEST_DOT = 6.5


@dataclass(frozen=True)
class Tick:
    """A tick of an axis."""

    position: float
    text: str


@dataclass(frozen=True)
class Dot:
    """One bin of a reliability curve.

    Attributes:
        x, y: Centre of the mark.
        radius: Radius of the mark; its area is proportional to ``count``.
        top, bottom: Vertical ends of the interval.
        confidence: Mean confidence.
        accuracy: Share of correct predictions.
        interval: The 95 % interval of the accuracy.
        count: Number of examples.
    """

    x: float
    y: float
    radius: float
    top: float
    bottom: float
    confidence: float
    accuracy: float
    interval: tuple[float, float]
    count: int


@dataclass(frozen=True)
class Line:
    """One reliability curve."""

    name: str
    ece: float
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class Reliability:
    """Reliability diagrams on common axes: accuracy (upwards) over confidence (to the right). Both axes end at 1.

    Attributes:
        left, right, top, bottom: The square of a diagram.
        ticks_x, ticks_y: Ticks of the axes.
        lines: One diagram per curve: before and after calibration, or one if they are the same.
    """

    left: float
    right: float
    top: float
    bottom: float
    ticks_x: tuple[Tick, ...]
    ticks_y: tuple[Tick, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Row:
    """One group of a histogram.

    Attributes:
        name: Name of the group.
        count: Number of examples.
        median: Median score.
        flagged: Number of scores above the threshold.
        top: Vertical position of the highest bar's top.
        baseline: Vertical position of the bars' bottom.
        area: The bars as one closed SVG path.
        reference: The bars of the first group, for comparison; empty in the first row.
    """

    name: str
    count: int
    median: float
    flagged: int
    top: float
    baseline: float
    area: str
    reference: str


@dataclass(frozen=True)
class Histogram:
    """Histograms of groups, one below the other, over one axis of scores. Each is scaled to its peak."""

    left: float
    right: float
    height: float
    ticks: tuple[Tick, ...]
    rows: tuple[Row, ...]
    threshold_x: float


def reliability(pair: ReliabilityPair) -> Reliability:
    """Compute the reliability diagrams of both curves."""
    named = {pair.before_name: pair.before, pair.after_name: pair.after}
    curves = [_bins(curve) for curve in named.values()]
    lowest = min(float(curve[:, :2].min()) for curve in curves)
    low = min(math.floor(10 * lowest) / 10, 0.9)
    top, side = 14.0, WIDTH - MARGIN_LEFT - MARGIN_RIGHT
    left, right, bottom = MARGIN_LEFT, WIDTH - MARGIN_RIGHT, top + side
    step = 0.2 if low < 0.4 else 0.1 if low < 0.8 else 0.05
    values = [round(1 - step * index, 10) for index in range(int((1 - low) / step + 1e-9) + 1)]
    largest = max(curve[:, 2].max() for curve in curves)

    def height(accuracy: float) -> float:
        return bottom - (accuracy - low) / (1 - low) * side

    def dot(confidence: float, accuracy: float, count: float) -> Dot:
        ends = interval(accuracy, int(count))
        return Dot(
            x=left + (confidence - low) / (1 - low) * side,
            y=height(accuracy),
            radius=max(2.5, LARGEST_DOT * math.sqrt(count / largest)),
            top=height(ends[1]),
            bottom=min(bottom, height(ends[0])),
            confidence=confidence,
            accuracy=accuracy,
            interval=ends,
            count=int(count),
        )

    return Reliability(
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        ticks_x=tuple(Tick(left + (value - low) / (1 - low) * side, f"{value:g}") for value in values),
        ticks_y=tuple(Tick(bottom - (value - low) / (1 - low) * side, f"{value:g}") for value in values),
        lines=tuple(
            Line(name, float(curve.ece), tuple(dot(*values) for values in bins.tolist()))
            for (name, curve), bins in zip(named.items(), curves, strict=True)
        ),
    )


def histogram(groups: Mapping[str, Floats], threshold: float) -> Histogram:
    """Compute the histograms of all groups in common bins, from the smallest to the largest value.

    Args:
        groups: Finite scores [N] by name. The first group is the reference.
        threshold: Threshold, marked on the axis.
    """
    low, high = _range(groups.values(), threshold)
    row_height = SINGLE_ROW_HEIGHT if len(groups) == 1 else ROW_HEIGHT
    left, right = MARGIN_RIGHT, WIDTH - MARGIN_RIGHT

    def position_of(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    rows: list[Row] = []
    shares: list[Floats] = []
    for number, (name, values) in enumerate(groups.items()):
        counts = np.histogram(values, BINS, (low, high))[0]
        shares.append(counts / counts.max())
        top = number * (row_height + ROW_GAP) + ROW_GAP
        baseline = top + row_height
        rows.append(
            Row(
                name=name,
                count=len(values),
                median=float(np.median(values)),
                flagged=int((values > threshold).sum()),
                top=top,
                baseline=baseline,
                area=_bars(shares[-1], (left, right), (top, baseline)),
                reference=_bars(shares[0], (left, right), (top, baseline)) if number else "",
            )
        )
    return Histogram(
        left=left,
        right=right,
        height=rows[-1].baseline,
        ticks=tuple(Tick(position_of(value), f"{value:g}") for value in round_ticks(low, high)),
        rows=tuple(rows),
        threshold_x=position_of(threshold),
    )


def round_ticks(low: float, high: float, at_most: int = 9) -> list[float]:
    """Return at most ``at_most`` multiples of 1, 2 or 5 times a power of ten between two values."""
    power = 10.0 ** math.floor(math.log10((high - low) / (at_most - 1)))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if (high - low) / step <= at_most - 1)
    return [float(f"{step * number:.12g}") for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _bins(curve: Curve) -> Floats:
    """Return confidence, accuracy and count of the bins that are not empty, sorted by confidence, [bins, 3]."""
    values = np.stack([np.asarray(part, dtype=np.float64) for part in (curve.confidence, curve.accuracy, curve.count)])
    values = values.T[values[2] > 0]
    return np.array(values[np.argsort(values[:, 0], kind="stable")])


def _range(groups: Iterable[Floats], threshold: float) -> tuple[float, float]:
    """Return both ends of the axis."""
    values = np.concatenate([[threshold], *groups])
    low, high = float(values.min()), float(values.max())
    margin = 0.0 if high > low else max(abs(low), 1.0) / 10
    return low - margin, high + margin


def _bars(shares: Floats, sides: tuple[float, float], heights: tuple[float, float]) -> str:
    """Return bars without gaps as a closed SVG path. A share of 1 reaches from the baseline to the top."""
    (left, right), (top, baseline) = sides, heights
    width = (right - left) / len(shares)
    corners = [(left, baseline)]
    for number, share in enumerate(shares.tolist()):
        height = baseline - share * (baseline - top)
        corners += [(left + number * width, height), (left + (number + 1) * width, height)]
    return f"{_path([*corners, (right, baseline)])}Z"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
