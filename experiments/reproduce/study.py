"""Studies: named steps with JSON results, and table, plot and claims computed from these results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.bootstrap import UNDECIDED, Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Results of the finished steps by name. The result of a step must be JSON-serialisable.
Results = Mapping[str, Any]
Step = Callable[[Results], Any]

#: Presets in the order of their cost.
PRESET_NAMES = ("digits", "mnist", "mnist-lambdas", "cifar10", "cifar10-resnet56", "cifar10-resnet18", "paper")


@dataclass(frozen=True)
class Claim:
    """One claim of the paper and our result.

    Attributes:
        claim: The claim.
        paper: Number of the paper.
        ours: Our number.
        size: Number of images, seeds or measurements behind our number.
        difference: Difference that is positive if our numbers agree with the claim; None without an interval.
        margin: The claim holds if the difference is above minus this value.
        digits: Decimal places of the difference.
    """

    claim: str
    paper: str
    ours: str
    size: str
    difference: Interval | None
    margin: float = 0.0
    digits: int = 2

    @property
    def verdict(self) -> str:
        """Verdict by the rule of `experiments.bootstrap`; undecided without an interval."""
        return UNDECIDED if self.difference is None else self.difference.shifted(self.margin).verdict


@dataclass(frozen=True)
class Record:
    """Content of a result file.

    Attributes:
        study: Name of the study.
        preset: Name of the settings.
        settings: Settings as JSON.
        results: Results by step.
        steps: Wall-clock and processor seconds and index of the run, by step.
        runs: Date, command, software and hardware of each run.
    """

    study: str
    preset: str
    settings: Mapping[str, Any]
    results: Mapping[str, Any]
    steps: Mapping[str, Mapping[str, Any]]
    runs: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper.

    Attributes:
        name: Name on the command line.
        title: Title of the table or figure.
        presets: Settings by preset: JSON-serialisable frozen dataclasses.
        needs: Function that returns the required data sets and splits.
        steps: Function that returns the steps in order. A step receives the results of the steps before it.
        table: Function that formats our numbers and those of the paper as Markdown.
        draw: Function that draws the figure.
        claims: Function that compares the claims of the paper with the results.
        durations: Function that estimates the seconds of every step on one core.
    """

    name: str
    title: str
    presets: Mapping[str, Any]
    needs: Callable[[Any], Iterable[tuple[str, str]]]
    steps: Callable[[Any], Mapping[str, Step]]
    table: Callable[[Record], str]
    draw: Callable[[Record, Figure], None]
    claims: Callable[[Record], list[Claim]]
    durations: Callable[[Any], Mapping[str, float]] = lambda _: {}
