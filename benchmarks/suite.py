"""What a suite is: subjects that are measured, and columns with goals that are computed from the raw measurements."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from benchmarks.timing import Timed

#: Called so in every suite: one forward pass of the same batch in eval mode, with the same threads. It is the unit.
FORWARD = "forward"


@dataclass(frozen=True)
class Setup:
    """How to measure.

    Attributes:
        threads: Of torch.
        rounds: Timed rounds of what is quick.
        tiny: Small networks and few examples: whether it runs, not how fast it is.
    """

    threads: int
    rounds: int
    tiny: bool = False

    @property
    def slow_rounds(self) -> int:
        """Timed rounds of what takes many seconds; not warmed up."""
        return max(1, self.rounds // 2)

    @property
    def turn(self) -> float:
        """Seconds that a turn of what is quick lasts at least."""
        return 0.0 if self.tiny else 1.0

    def size(self, full: int, tiny: int = 3) -> int:
        """A number of examples."""
        return min(full, tiny) if self.tiny else full


@dataclass(frozen=True)
class Times:
    """Seconds of every round, and how many examples each went over; part of one where only some labels were done."""

    examples: float
    seconds: list[float]


@dataclass(frozen=True)
class Measured:
    """The raw numbers of one subject.

    Attributes:
        times: By the name of what was timed.
        numbers: All else, such as differences of results and bytes.
    """

    times: dict[str, Times] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def add(self, timed: Mapping[str, Timed], examples: float) -> None:
        """Note timings over so many examples; rounds of what was timed before are added to it."""
        for name, own in timed.items():
            before = self.times.get(name)
            known = before.seconds if before and before.examples == examples else []
            self.times[name] = Times(examples, [*known, *own.seconds])

    def milliseconds(self, name: str) -> float:
        """The best round, an example."""
        times = self.times[name]
        return 1e3 * min(times.seconds) / times.examples

    def units(self, name: str) -> float:
        """The best round in forward passes of the same batch."""
        return self.milliseconds(name) / self.milliseconds(FORWARD)

    def typical_units(self, name: str) -> float:
        """The median over rounds that had both: what a lucky forward pass in one of them cannot change."""
        own, unit = self.times[name], self.times[FORWARD]
        pairs = zip(own.seconds, unit.seconds, strict=True)
        return median(took / own.examples / (forward / unit.examples) for took, forward in pairs)

    def ratio(self, slow: str, fast: str) -> float:
        """How many times as long one thing takes as another."""
        return self.milliseconds(slow) / self.milliseconds(fast)


@dataclass(frozen=True)
class Goal:
    """A bound on a figure; one for all subjects, or one for each that has any."""

    sign: Literal["≤", "≥"]
    bound: float | Mapping[str, float]

    def of(self, subject: str) -> float | None:
        """The bound for a subject."""
        return self.bound.get(subject) if isinstance(self.bound, Mapping) else self.bound

    def met(self, subject: str, value: float) -> bool | None:
        """Whether a figure keeps to it; None without a bound."""
        bound = self.of(subject)
        if bound is None:
            return None
        return value <= bound if self.sign == "≤" else value >= bound


@dataclass(frozen=True)
class Column:
    """A figure of a table.

    Attributes:
        heading: With its unit.
        value: From the raw measurements.
        form: How it is written, as in an f-string.
        goal: What it should be.
    """

    heading: str
    value: Callable[[Measured], float]
    form: str = ",.1f"
    goal: Goal | None = None


@dataclass(frozen=True)
class Section:
    """One table: subjects that have the same columns.

    Attributes:
        title: What the table shows.
        columns: Its figures.
        subjects: Name to what measures it, in the order of the rows.
        threads: Only with these; None for all that are asked for.
    """

    title: str
    columns: tuple[Column, ...]
    subjects: Mapping[str, Callable[[Setup], Measured]]
    threads: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Suite:
    """Tables that belong together.

    Attributes:
        name: On the command line and of its file of results.
        about: What is measured, and against what.
        minutes: About how long it takes on a quiet machine with both numbers of threads.
        sections: Its tables.
    """

    name: str
    about: str
    minutes: float
    sections: tuple[Section, ...]


def milliseconds(heading: str, name: str, form: str = ",.2f") -> Column:
    """A column with the milliseconds an example."""
    return Column(f"{heading}, ms", lambda measured: measured.milliseconds(name), form)


def units(heading: str, name: str, goal: Goal | None = None) -> Column:
    """A column in forward passes."""
    return Column(f"{heading}, units", lambda measured: measured.units(name), ",.2f", goal)


def typical_units(heading: str, name: str) -> Column:
    """A column in forward passes of the same round."""
    return Column(f"{heading}, units in a typical round", lambda measured: measured.typical_units(name), ",.2f")


def times_faster(heading: str, slow: str, fast: str, goal: Goal | None = None) -> Column:
    """A column that says how many times as long the slow thing takes."""
    return Column(heading, lambda measured: measured.ratio(slow, fast), ",.1f", goal)


def number(heading: str, name: str, form: str, goal: Goal | None = None) -> Column:
    """A column with a number that is not a time."""
    return Column(heading, lambda measured: measured.numbers[name], form, goal)
