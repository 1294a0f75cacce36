"""Geometry of the charts: positions in SVG units, computed from arrays. The templates draw them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ifcomp.report.data import Curve, Floats, ReliabilityPair

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
    """One bin of a reliability curve."""

    x: float
    y: float
    radius: float
    confidence: float
    accuracy: float
    count: int


@dataclass(frozen=True)
class Line:
    """One reliability curve."""

    name: str
    ece: float
    dots: tuple[Dot, ...]

    @property
    def path(self) -> str:
        """SVG path through all dots."""
        return _path([(dot.x, dot.y) for dot in self.dots])


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: accuracy (upwards) over confidence (to the right). Both axes end at 1."""

    left: float
    right: float
    top: float
    bottom: float
    ticks_x: tuple[Tick, ...]
    ticks_y: tuple[Tick, ...]
    before: Line
    after: Line


@dataclass(frozen=True)
class Row:
    """One group of a histogram.

    Attributes:
        name: Name of the group.
        count: Number of examples.
        median: Median in nats.
        median_x: Horizontal position of the median.
        top: Vertical position of the highest bar's top.
        baseline: Vertical position of the bars' bottom.
        area: The bars as one closed SVG path.
        reference: The bars of the first group, for comparison; empty in the first row.
    """

    name: str
    count: int
    median: float
    median_x: float
    top: float
    baseline: float
    area: str
    reference: str


@dataclass(frozen=True)
class Histogram:
    """Histograms of groups, one below the other, over one logarithmic axis of nats. Each is scaled to its peak."""

    left: float
    right: float
    height: float
    ticks: tuple[Tick, ...]
    rows: tuple[Row, ...]
    threshold_x: float | None


def reliability(pair: ReliabilityPair) -> Reliability:
    """Compute the reliability diagram of both curves, in one square."""
    curves = [_bins(pair.before), _bins(pair.after)]
    lowest = min(curve[:, :2].min() for curve in curves)
    low = min(math.floor(10 * lowest) / 10, 0.9)
    top, side = 14.0, WIDTH - MARGIN_LEFT - MARGIN_RIGHT
    left, right, bottom = MARGIN_LEFT, WIDTH - MARGIN_RIGHT, top + side
    step = 0.2 if low < 0.4 else 0.1 if low < 0.8 else 0.05
    values = [round(1 - step * index, 10) for index in range(int((1 - low) / step + 1e-9) + 1)]
    largest = max(curve[:, 2].max() for curve in curves)

    def line(name: str, ece: float, curve: Floats) -> Line:
        dots = (
            Dot(
                x=left + (confidence - low) / (1 - low) * side,
                y=bottom - (accuracy - low) / (1 - low) * side,
                radius=max(2.5, LARGEST_DOT * math.sqrt(count / largest)),
                confidence=confidence,
                accuracy=accuracy,
                count=int(count),
            )
            for confidence, accuracy, count in curve.tolist()
        )
        return Line(name, ece, tuple(dots))

    return Reliability(
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        ticks_x=tuple(Tick(left + (value - low) / (1 - low) * side, f"{value:g}") for value in values),
        ticks_y=tuple(Tick(bottom - (value - low) / (1 - low) * side, f"{value:g}") for value in values),
        before=line(pair.before_name, float(pair.before.ece), curves[0]),
        after=line(pair.after_name, float(pair.after.ece), curves[1]),
    )


def histogram(groups: Mapping[str, Floats], threshold: float | None = None) -> Histogram:
    """Compute the histograms of all groups in common bins.

    The axis runs from the smallest 1 % quantile of a group to the largest value. Smaller values are in the first bin.

    Args:
        groups: Finite complexities [N] in nats by name. The first group is the reference.
        threshold: Threshold in nats, marked on the axis.
    """
    low, high = _range(groups.values(), threshold)
    row_height = SINGLE_ROW_HEIGHT if len(groups) == 1 else ROW_HEIGHT
    edges = np.linspace(low, high, BINS + 1)
    left, right = MARGIN_RIGHT, WIDTH - MARGIN_RIGHT

    def position_of(value: float) -> float:
        share = (math.log10(max(value, 10**low)) - low) / (high - low)
        return left + min(share, 1.0) * (right - left)

    rows: list[Row] = []
    shares: list[Floats] = []
    for number, (name, values) in enumerate(groups.items()):
        logs = np.clip(np.log10(np.maximum(values, 10**low)), low, high)
        counts = np.histogram(logs, edges)[0]
        shares.append(counts / counts.max())
        top = number * (row_height + ROW_GAP) + ROW_GAP
        baseline = top + row_height
        median = float(np.median(values))
        rows.append(
            Row(
                name=name,
                count=len(values),
                median=median,
                median_x=position_of(median),
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
        ticks=tuple(Tick(position_of(value), f"{value:g}") for value in log_ticks(low, high)),
        rows=tuple(rows),
        threshold_x=None if threshold is None else position_of(threshold),
    )


def log_ticks(low: float, high: float, at_most: int = 9) -> list[float]:
    """Return at most ``at_most`` round numbers between ``10**low`` and ``10**high``.

    They are 1 ... 9, or 1, 2, 5, or 1 times powers of ten, or every few powers of ten.
    """
    decades = range(math.floor(low), math.ceil(high) + 1)
    choices: list[Sequence[float]] = [
        [round(mantissa * 10.0**decade, 12 - min(decade, 0)) for decade in decades for mantissa in mantissas]
        for mantissas in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1,))
    ]
    choices += [choices[-1][::stride] for stride in range(2, len(decades) + 1)]
    inside = [[value for value in values if low <= math.log10(value) <= high] for values in choices]
    return next((values for values in inside if len(values) <= at_most), [])


def _bins(curve: Curve) -> Floats:
    """Return confidence, accuracy and count of the bins that are not empty, sorted by confidence, [bins, 3]."""
    values = np.stack([np.asarray(part, dtype=np.float64) for part in (curve.confidence, curve.accuracy, curve.count)])
    values = values.T[values[2] > 0]
    return np.array(values[np.argsort(values[:, 0], kind="stable")])


def _range(groups: Iterable[Floats], threshold: float | None) -> tuple[float, float]:
    """Return the decimal logarithms of both ends of the axis."""
    positive = [values[values > 0] for values in groups]
    bounds = [float(bound) for part in positive if part.size for bound in (np.quantile(part, 0.01), part.max())]
    if threshold is not None and threshold > 0:
        bounds.append(threshold)
    if not bounds:
        return -1.0, 0.0
    low, high = math.log10(min(bounds)), math.log10(max(bounds))
    return (low, high) if high - low > 0.1 else (low - 0.05, high + 0.05)


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
