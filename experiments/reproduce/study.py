"""What a study is: named steps whose results are plain JSON, and what can be made from that JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Results of the steps that are done, by name. What a step returns must survive JSON.
Results = Mapping[str, Any]
Step = Callable[[Results], Any]

#: Presets in the order of their cost.
PRESET_NAMES = ("digits", "mnist", "cifar10", "cifar10-resnet56", "paper")


@dataclass(frozen=True)
class Claim:
    """One statement of the paper beside what we find.

    Attributes:
        claim: In words.
        paper: The paper's number.
        ours: Ours.
        holds: Whether the statement holds in our numbers; None where they cannot say.
    """

    claim: str
    paper: str
    ours: str
    holds: bool | None


@dataclass(frozen=True)
class Record:
    """The content of a result file.

    Attributes:
        study: Name of the study.
        preset: Name of its settings.
        settings: As JSON.
        results: By step.
        steps: By step: seconds by the clock and of the processor, and which of the runs made it.
        runs: When, with what command, software and hardware.
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
        name: On the command line.
        title: What the paper calls it, and what it shows.
        presets: Settings by preset: frozen dataclasses that JSON can hold.
        needs: Data sets and their splits that settings need.
        steps: What to run, in order; a step gets the results of those before it.
        table: Markdown, ours beside the paper's.
        draw: The paper's kind of figure.
        claims: The paper's statements that these results speak to.
    """

    name: str
    title: str
    presets: Mapping[str, Any]
    needs: Callable[[Any], Iterable[tuple[str, str]]]
    steps: Callable[[Any], Mapping[str, Step]]
    table: Callable[[Record], str]
    draw: Callable[[Record, Figure], None]
    claims: Callable[[Record], list[Claim]]
