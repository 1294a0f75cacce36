"""Suites: subjects to measure, and table columns with goals computed from the raw measurements."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from benchmarks.timing import Timed

#: Name of the unit in every suite: one forward pass of the same batch in eval mode with the same number of threads.
FORWARD = "forward"


@dataclass(frozen=True)
class Setup:
    """Settings of a measurement.

    Attributes:
        threads: Number of threads of torch.
        rounds: Number of timed rounds of fast functions.
        tiny: Use small networks and few examples, to test that a suite runs.
    """

    threads: int
    rounds: int
    tiny: bool = False

    @property
    def slow_rounds(self) -> int:
        """Number of timed rounds of functions that take many seconds."""
        return max(1, self.rounds // 2)

    @property
    def turn(self) -> float:
        """Minimum duration of a measurement in seconds; short calls are repeated."""
        return 0.0 if self.tiny else 1.0

    def size(self, full: int, tiny: int = 3) -> int:
        """Return the number of examples, reduced for tiny runs."""
        return min(full, tiny) if self.tiny else full


@dataclass(frozen=True)
class Times:
    """Seconds per round and number of examples; below 1 if only a part of the labels was evaluated."""

    examples: float
    seconds: list[float]


@dataclass(frozen=True)
class Measured:
    """Raw measurements of one subject.

    Attributes:
        times: Timings by name of the function.
        numbers: Other values by name, such as differences of results and bytes.
    """

    times: dict[str, Times] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def add(self, timed: Mapping[str, Timed], examples: float) -> None:
        """Add timings over a number of examples. Further rounds of the same function are appended."""
        for name, result in timed.items():
            saved = self.times.get(name)
            previous = saved.seconds if saved and saved.examples == examples else []
            self.times[name] = Times(examples, [*previous, *result.seconds])

    def milliseconds(self, name: str) -> float:
        """Return the time of the best round in milliseconds per example."""
        times = self.times[name]
        return 1e3 * min(times.seconds) / times.examples

    def units(self, name: str) -> float:
        """Return the time of the best round in forward passes of the same batch."""
        return self.milliseconds(name) / self.milliseconds(FORWARD)

    def median_units(self, name: str) -> float:
        """Return the median over rounds of the time in forward passes of the same round; robust to outliers."""
        times, unit = self.times[name], self.times[FORWARD]
        pairs = zip(times.seconds, unit.seconds, strict=True)
        return median(seconds / times.examples / (forward / unit.examples) for seconds, forward in pairs)

    def ratio(self, slow: str, fast: str) -> float:
        """Return the time of ``slow`` divided by that of ``fast``."""
        return self.milliseconds(slow) / self.milliseconds(fast)


@dataclass(frozen=True)
class Goal:
    """Bound of a value: one for all subjects, or one per subject."""

    sign: Literal["≤", "≥"]
    bound: float | Mapping[str, float]

    def of(self, subject: str) -> float | None:
        """Return the bound of a subject, or None."""
        return self.bound.get(subject) if isinstance(self.bound, Mapping) else self.bound

    def met(self, subject: str, value: float) -> bool | None:
        """Return whether a value meets the bound; None without a bound."""
        bound = self.of(subject)
        if bound is None:
            return None
        return value <= bound if self.sign == "≤" else value >= bound


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        heading: Heading with unit.
        value: Function of the raw measurements.
        format_spec: Format specification of the value.
        goal: Bound of the value, or None.
    """

    heading: str
    value: Callable[[Measured], float]
    format_spec: str = ",.1f"
    goal: Goal | None = None


@dataclass(frozen=True)
class Section:
    """One table of subjects with the same columns.

    Attributes:
        title: Title of the table.
        columns: Columns of the table.
        subjects: Measuring functions by name, in the order of the rows.
        threads: Numbers of threads to measure with; None for all that are requested.
    """

    title: str
    columns: tuple[Column, ...]
    subjects: Mapping[str, Callable[[Setup], Measured]]
    threads: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Suite:
    """Named group of tables.

    Attributes:
        name: Name on the command line and of the results file.
        title: Heading of the page of results.
        about: Description of the measurement and its references.
        minutes: Approximate duration on an idle machine with 1 and 2 threads.
        sections: Tables of the suite.
    """

    name: str
    title: str
    about: str
    minutes: float
    sections: tuple[Section, ...]


def milliseconds(heading: str, name: str, format_spec: str = ",.2f") -> Column:
    """Return a column with milliseconds per example."""
    return Column(f"{heading}, ms", lambda measured: measured.milliseconds(name), format_spec)


def units(heading: str, name: str, goal: Goal | None = None) -> Column:
    """Return a column in forward passes."""
    return Column(f"{heading}, units", lambda measured: measured.units(name), ",.2f", goal)


def median_units(heading: str, name: str) -> Column:
    """Return a column with the median over rounds in forward passes."""
    return Column(f"{heading}, units, median", lambda measured: measured.median_units(name), ",.2f")


def times_faster(heading: str, slow: str, fast: str, goal: Goal | None = None) -> Column:
    """Return a column with the ratio of two times."""
    return Column(heading, lambda measured: measured.ratio(slow, fast), ",.1f", goal)


def number(heading: str, name: str, format_spec: str, goal: Goal | None = None) -> Column:
    """Return a column with a number that is not a time."""
    return Column(heading, lambda measured: measured.numbers[name], format_spec, goal)
