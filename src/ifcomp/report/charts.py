"""From arrays to positions on a drawing: pure geometry that the templates turn into SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ifcomp.report.data import Curve, Floats, ReliabilityPair

#: Drawing units; on a phone about a pixel each, on a desktop a little more.
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
    """A mark on an axis."""

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
        """Through all dots, as SVG path data."""
        return _path([(dot.x, dot.y) for dot in self.dots])


@dataclass(frozen=True)
class Reliability:
    """The reliability diagram: confidence to the right, accuracy upwards, both from the lowest value shown to 1."""

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
        name: Of the group.
        count: Examples in it.
        median: In nats.
        median_x: Where the median is.
        top: Where the highest bar ends.
        baseline: Where the bars stand.
        area: The bars as one closed path.
        reference: The first group's bars, for comparison; empty in the first row.
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
    """Groups above each other over one logarithmic axis of nats; each is as high as its own peak."""

    left: float
    right: float
    height: float
    ticks: tuple[Tick, ...]
    rows: tuple[Row, ...]
    threshold_x: float | None


def reliability(pair: ReliabilityPair) -> Reliability:
    """Place both curves in one square."""
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
    """Count every group in the same bins.

    The axis runs from the smallest 1 % quantile of a group to the largest value; what is below is in the first bar.

    Args:
        groups: Finite complexities [N] in nats by name; the first is what the others are compared with.
        threshold: Marked on the axis, in nats.
    """
    low, high = _range(groups.values(), threshold)
    row_height = SINGLE_ROW_HEIGHT if len(groups) == 1 else ROW_HEIGHT
    edges = np.linspace(low, high, BINS + 1)
    left, right = MARGIN_RIGHT, WIDTH - MARGIN_RIGHT

    def place(value: float) -> float:
        position = (math.log10(max(value, 10**low)) - low) / (high - low)
        return left + min(position, 1.0) * (right - left)

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
                median_x=place(median),
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
        ticks=tuple(Tick(place(value), f"{value:g}") for value in log_ticks(low, high)),
        rows=tuple(rows),
        threshold_x=None if threshold is None else place(threshold),
    )


def log_ticks(low: float, high: float, at_most: int = 9) -> list[float]:
    """Round numbers between ``10**low`` and ``10**high``: 1, 2, 5, powers of ten, or only every few of these."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    choices: list[Sequence[float]] = [
        [round(mantissa * 10.0**decade, 12 - min(decade, 0)) for decade in decades for mantissa in mantissas]
        for mantissas in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1,))
    ]
    choices += [choices[-1][::stride] for stride in range(2, len(decades) + 1)]
    inside = [[value for value in values if low <= math.log10(value) <= high] for values in choices]
    return next((values for values in inside if len(values) <= at_most), [])


def _bins(curve: Curve) -> Floats:
    """Confidence, accuracy and count of the bins that are not empty, by confidence, [bins, 3]."""
    values = np.stack([np.asarray(part, dtype=np.float64) for part in (curve.confidence, curve.accuracy, curve.count)])
    values = values.T[values[2] > 0]
    return np.array(values[np.argsort(values[:, 0], kind="stable")])


def _range(groups: Iterable[Floats], threshold: float | None) -> tuple[float, float]:
    """Logarithms of the smallest and largest value on the axis."""
    positive = [values[values > 0] for values in groups]
    bounds = [float(bound) for part in positive if part.size for bound in (np.quantile(part, 0.01), part.max())]
    if threshold is not None and threshold > 0:
        bounds.append(threshold)
    if not bounds:
        return -1.0, 0.0
    low, high = math.log10(min(bounds)), math.log10(max(bounds))
    return (low, high) if high - low > 0.1 else (low - 0.05, high + 0.05)


def _bars(shares: Floats, sides: tuple[float, float], heights: tuple[float, float]) -> str:
    """Bars without gaps between left and right, a share of 1 reaching from the baseline to the top."""
    (left, right), (top, baseline) = sides, heights
    width = (right - left) / len(shares)
    corners = [(left, baseline)]
    for number, share in enumerate(shares.tolist()):
        height = baseline - share * (baseline - top)
        corners += [(left + number * width, height), (left + (number + 1) * width, height)]
    return f"{_path([*corners, (right, baseline)])}Z"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
