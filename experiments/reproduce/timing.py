"""Time of the pNML distribution per input (table of inference times of the paper).

The numbers are those of the benchmark `benchmarks.suites.table1`, with date and hardware. Results of ``ifcomp bench
table1 --threads 1`` are reused; missing ones are measured and stored. Networks are not trained, because time does not
depend on the weights.
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
from experiments.bootstrap import Interval
from experiments.reproduce.publish import markdown
from experiments.reproduce.study import Claim, Record, Results, Step, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, ACNML, GRADNORM, PLAIN = "ours", "ACNML", "GradNorm", "GradNorm, ours"
#: Names of the timed methods in our table and in the paper.
#: Size of the measurements.
ROUNDS = "2 to 3 rounds; range instead of an interval"
METHODS = {
    GRADNORM: ("GradNorm (vmap, as in the paper)", "GradNorm"),
    PLAIN: ("GradNorm (this library)", None),
    ACNML: ("ACNML-EKFAC", "ACNML"),
    OURS: ("IF-COMP (this library)", "IF-COMP"),
}


@dataclass(frozen=True)
class Settings:
    """Settings of the study.

    Attributes:
        tiny: Use small networks and few examples, and store nothing, to test that the study runs.
        threads: Number of threads of torch.
        rounds: Number of timed rounds; the best one is used.
    """

    tiny: bool
    threads: int = 1
    rounds: int = 5


PRESETS = {"digits": Settings(tiny=True, rounds=1), "paper": Settings(tiny=False)}


def _subject(settings: Settings, name: str, _: Results) -> dict[str, Any]:
    """Return the stored result of a network, or measure it."""
    return asdict(_recorded(settings).get(name) or _measure(settings, name))


def _recorded(settings: Settings) -> dict[str, recorded.Run]:
    """Return stored results by network, of one processor.

    The first processor with all networks is used, preferably that of this machine; otherwise this machine.
    """
    by_processor: dict[str, dict[str, recorded.Run]] = {environment()["cpu"]: {}}
    for recorded_run in [] if settings.tiny else recorded.read(SUITE.name, recorded.RESULTS):
        if recorded_run.threads == settings.threads:
            by_processor.setdefault(recorded_run.processor, {})[recorded_run.subject] = recorded_run
    here, *_ = by_processor.values()
    return next((runs for runs in by_processor.values() if runs.keys() >= PAPER.keys()), here)


def _measure(settings: Settings, name: str) -> recorded.Run:
    (section,) = SUITE.sections
    single = replace(SUITE, sections=(replace(section, subjects={name: section.subjects[name]}),))
    folder = None if settings.tiny else recorded.RESULTS
    runs = run([single], [settings.threads], settings.rounds, settings.tiny, folder, Console(quiet=True))
    (result,) = runs[SUITE.name]
    return result


def steps(settings: Settings) -> dict[str, Step]:
    """Evaluate one network after the other."""
    return {name: partial(_subject, settings, name) for name in PAPER}


def measured(record: Record) -> dict[str, Measured]:
    """Return the measurements by network."""
    return {
        name: Measured({key: Times(**times) for key, times in row["measured"]["times"].items()})
        for name, row in record.results.items()
    }


def table(record: Record) -> str:
    """Format milliseconds per input, and times relative to IF-COMP."""
    networks, rows = measured(record), []
    for key, (title, published) in METHODS.items():
        times = [f"{network.milliseconds(key):,.2f}" for network in networks.values()]
        paper = [f"{1e3 * PAPER[name][published]:,.4g}" if published else "" for name in networks]
        rows.append([title, *times, *paper])
    for key in (ACNML, GRADNORM, PLAIN):
        title, published = METHODS[key]
        ratios = [f"{network.ratio(key, OURS):,.2f}" for network in networks.values()]
        paper = [f"{PAPER[name][published] / PAPER[name]['IF-COMP']:,.2f}" if published else "" for name in networks]
        rows.append([f"{title} / IF-COMP", *ratios, *paper])
    text = (
        "Milliseconds per input for the pNML distribution over all labels, and ratios. The weights are random. ACNML "
        "takes five steps per label; of 100 labels ten were fitted, and the time was multiplied by ten. "
        f"{_sources(record)} The times of the paper are for an A40 GPU.\n\n"
    )
    header = ["", *(f"{name}, ours" for name in networks), *(f"{name}, paper" for name in networks)]
    return text + markdown(header, rows)


def _sources(record: Record) -> str:
    """Format date, commit and hardware of the measurements."""
    sources = {
        f"Measured by `ifcomp bench table1` on {where['date']} at commit {(where['commit'] or 'unknown')[:7]}, "
        f"{where['threads']} thread of {where['cpu']}, torch {where['torch']}."
        for where in (row["environment"] for row in record.results.values())
    }
    loads = ", ".join(f"{row['environment']['load']:.1f}" for row in record.results.values())
    return f"{' '.join(sorted(sources))} Load at the end of each network: {loads}."


def draw(record: Record, figure: Figure) -> None:
    """Plot times relative to IF-COMP, ours and those of the paper."""
    axes, networks = figure.add_subplot(), measured(record)
    positions = np.arange(len(networks))
    keys = [key for key in METHODS if key != OURS]
    for index, key in enumerate(keys):
        title, published = METHODS[key]
        shifted = positions + 0.27 * (index - 1)
        axes.bar(shifted, [network.ratio(key, OURS) for network in networks.values()], 0.25, label=title)
        if published:
            axes.plot(shifted, [PAPER[name][published] / PAPER[name]["IF-COMP"] for name in networks], "kx")
    axes.plot([], [], "kx", label="in the paper")
    axes.axhline(1, color="0.4", linewidth=1)
    axes.set_xticks(positions, list(networks))
    axes.set(yscale="log", ylabel="time / time of IF-COMP")
    axes.set_ylim(top=10 * axes.get_ylim()[1])
    axes.legend(loc="upper left", ncols=2)


def _range(network: Measured, first: str, second: str) -> Interval:
    """Return a ratio of times, and the range over all pairs of rounds."""
    slow, fast = network.times[first], network.times[second]
    ratios = [one / slow.examples / (other / fast.examples) for one in slow.seconds for other in fast.seconds]
    return Interval(network.ratio(first, second), min(ratios), max(ratios))


def claims(record: Record) -> list[Claim]:
    """Compare the claims in the caption of the table. The intervals are ranges over pairs of rounds."""
    if record.settings["tiny"]:
        return []
    networks, small = measured(record), next(iter(PAPER))
    network, published = networks[small], PAPER[small]
    ratio = 1 / network.ratio(PLAIN, OURS)
    statements = [
        Claim(
            f"{small}: IF-COMP takes at most 1.25 times as long as a gradient norm",
            f"{published['IF-COMP'] / published['GradNorm']:.2f} times as long",
            f"{ratio:.2f} times as long as our gradient norm, {1 / network.ratio(GRADNORM, OURS):.2f} times as long as "
            "with vmap",
            ROUNDS,
            -_range(network, OURS, PLAIN).shifted(-1.25),
        )
    ]
    for name, factor in zip(PAPER, (7, 10, 10), strict=True):
        speedup = PAPER[name]["ACNML"] / PAPER[name]["IF-COMP"]
        ours = networks[name].ratio(ACNML, OURS)
        text = f"{name}: IF-COMP is {factor} times as fast as ACNML"
        difference = _range(networks[name], ACNML, OURS).shifted(-factor)
        statements.append(Claim(text, f"{speedup:.1f} times", f"{ours:.0f} times", ROUNDS, difference, digits=0))
    return statements


STUDY = Study("timing", "Inference time of the pNML distribution", PRESETS, lambda _: (), steps, table, draw, claims)
