"""Time of the pNML distribution for one input (the paper's table of inference times).

Nothing is timed here: the numbers are those of the benchmark ``table1`` (`benchmarks.suites.table1`), with where and
when they were measured. What ``ifcomp bench table1 --threads 1`` has recorded is taken; what it has not is measured by
the same code and recorded first. Time does not depend on the weights, so the networks are not trained.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from benchmarks import record as recorded
from benchmarks.run import run
from benchmarks.suite import Measured, Times
from benchmarks.suites.table1 import PAPER, SUITE
from benchmarks.timing import environment
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, ACNML, GRADNORM, PLAIN = "ours", "ACNML", "GradNorm", "GradNorm, ours"
#: Names in the table, and in the paper's, of what the benchmark times.
METHODS = {
    GRADNORM: ("GradNorm (vmap, as the paper's)", "GradNorm"),
    PLAIN: ("GradNorm (this library)", None),
    ACNML: ("ACNML-EKFAC", "ACNML"),
    OURS: ("IF-COMP (this library)", "IF-COMP"),
}


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Attributes:
        tiny: Small networks and few examples, nothing read or recorded: whether it runs, not how fast it is.
        threads: Of torch.
        rounds: Timed rounds; the best one counts.
    """

    tiny: bool
    threads: int = 1
    rounds: int = 5


PRESETS = {"digits": Settings(tiny=True, rounds=1), "paper": Settings(tiny=False)}


def _subject(settings: Settings, name: str, _: Results) -> dict[str, Any]:
    """What the benchmark has recorded of a network, or measures now."""
    return asdict(_recorded(settings).get(name) or _measure(settings, name))


def _recorded(settings: Settings) -> dict[str, recorded.Run]:
    """Records of one processor by network: of one that has them all, this machine's first, or what this one's has."""
    found: dict[str, dict[str, recorded.Run]] = {environment()["cpu"]: {}}
    for own in [] if settings.tiny else recorded.read(SUITE.name, recorded.RESULTS):
        if own.threads == settings.threads:
            found.setdefault(own.processor, {})[own.subject] = own
    here, *_ = found.values()
    return next((runs for runs in found.values() if runs.keys() >= PAPER.keys()), here)


def _measure(settings: Settings, name: str) -> recorded.Run:
    (section,) = SUITE.sections
    single = replace(SUITE, sections=(replace(section, subjects={name: section.subjects[name]}),))
    folder = None if settings.tiny else recorded.RESULTS
    made = run([single], [settings.threads], settings.rounds, settings.tiny, folder, Console(quiet=True))
    (found,) = made[SUITE.name]
    return found


def steps(settings: Settings) -> dict[str, Step]:
    """One network after the other."""
    return {name: partial(_subject, settings, name) for name in PAPER}


def measured(record: Record) -> dict[str, Measured]:
    """The benchmark's measurements by network."""
    return {
        name: Measured({key: Times(**own) for key, own in row["measured"]["times"].items()})
        for name, row in record.results.items()
    }


def table(record: Record) -> str:
    """Milliseconds an input, and how many times as long as IF-COMP the others take."""
    found, rows = measured(record), []
    for key, (title, published) in METHODS.items():
        times = [f"{own.milliseconds(key):,.2f}" for own in found.values()]
        paper = [f"{1e3 * PAPER[name][published]:,.4g}" if published else "" for name in found]
        rows.append([title, *times, *paper])
    for key in (ACNML, GRADNORM, PLAIN):
        title, published = METHODS[key]
        ratios = [f"{own.ratio(key, OURS):,.2f}" for own in found.values()]
        paper = [f"{PAPER[name][published] / PAPER[name]['IF-COMP']:,.2f}" if published else "" for name in found]
        rows.append([f"{title} / IF-COMP", *ratios, *paper])
    words = (
        "Milliseconds an input for the pNML distribution over all labels, and ratios; random weights, on which time "
        f"does not depend. ACNML takes five steps for every label (of 100 labels ten were fitted, and the time taken "
        f"times ten). {_places(record)} The paper's were measured on an "
        "A40 GPU.\n\n"
    )
    header = ["", *(f"{name}, ours" for name in found), *(f"{name}, paper" for name in found)]
    return words + markdown(header, rows)


def _places(record: Record) -> str:
    """Where and when the benchmark measured."""
    places = {
        f"Measured by `ifcomp bench table1` on {own['date']} at commit {(own['commit'] or 'unknown')[:7]}, "
        f"{own['threads']} thread of {own['cpu']}, torch {own['torch']}."
        for own in (row["environment"] for row in record.results.values())
    }
    loads = ", ".join(f"{row['environment']['load']:.1f}" for row in record.results.values())
    return f"{' '.join(sorted(places))} Load of the machine at the end of each network: {loads}."


def draw(record: Record, figure: Figure) -> None:
    """Time in that of IF-COMP, ours beside the paper's."""
    axes, found = figure.add_subplot(), measured(record)
    places = np.arange(len(found))
    keys = [key for key in METHODS if key != OURS]
    for index, key in enumerate(keys):
        title, published = METHODS[key]
        shifted = places + 0.27 * (index - 1)
        axes.bar(shifted, [own.ratio(key, OURS) for own in found.values()], 0.25, label=title)
        if published:
            axes.plot(shifted, [PAPER[name][published] / PAPER[name]["IF-COMP"] for name in found], "kx")
    axes.plot([], [], "kx", label="in the paper")
    axes.axhline(1, color="0.4", linewidth=1)
    axes.set_xticks(places, list(found))
    axes.set(yscale="log", ylabel="time / that of IF-COMP")
    axes.set_ylim(top=10 * axes.get_ylim()[1])
    axes.legend(loc="upper left", ncols=2)


def claims(record: Record) -> list[Claim]:
    """What the caption of the paper's table says."""
    if record.settings["tiny"]:
        return []
    found, small = measured(record), next(iter(PAPER))
    own, published = found[small], PAPER[small]
    ratio = 1 / own.ratio(PLAIN, OURS)
    made = [
        Claim(
            f"{small}: IF-COMP is almost as quick as a gradient norm",
            f"{published['IF-COMP'] / published['GradNorm']:.2f} times as long",
            f"{ratio:.2f} times as long as our gradient norm, {1 / own.ratio(GRADNORM, OURS):.2f} times as that "
            "with vmap",
            ratio < 1.25,
        )
    ]
    for name, least in zip(PAPER, (7, 10, 10), strict=True):
        speedup = PAPER[name]["ACNML"] / PAPER[name]["IF-COMP"]
        ours = found[name].ratio(ACNML, OURS)
        text = f"{name}: IF-COMP is {least} times as quick as ACNML"
        made.append(Claim(text, f"{speedup:.1f} times", f"{ours:.0f} times", ours > least))
    return made


STUDY = Study("timing", "Inference time of the pNML distribution", PRESETS, lambda _: (), steps, table, draw, claims)
