"""A page of tables from the raw results: ``python -m benchmarks.page docs/speed.md``."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import profile, record
from benchmarks.suite import Suite
from benchmarks.suites import SUITES
from benchmarks.tables import markdown_table
from ifcomp.io.files import atomic_write

INTRODUCTION = """# Speed

Made by `python -m benchmarks.page` from the raw numbers in `benchmarks/results`, which `make bench` writes. What is
compared was timed by turns in one run, and the best of several rounds counts. A turn lasts a second at least: what is
quicker is called several times, and the mean counts, since single short calls meet quiet moments that longer work
cannot. Tables of commits before d0679b9 are older than that: theirs are single calls. A *unit* is one forward pass of
the same batch in eval mode with the same threads; times are milliseconds an example. Goals stand beside the figures. A
*typical round* is the median over rounds of both in the same round.

Ratios depend on the processor. The AMD EPYC has vectors of 8 numbers (AVX2). The Intel Xeon has vectors of 16
(AVX-512): a forward pass of ResNet-18 takes less than half of the time there, and whatever waits for memory counts for
more. Where a table does not name a C library it is older than that, and all was done by PyTorch.

All of 100 labels take LeNet far less than the 201 units that they are worth, and whatever makes them quicker makes them
less of a multiple of two probes, which share the forward pass with them: this ratio is near the line there, and
single calls scatter: of eight of each by turns on the AMD EPYC (2026-11-17), the best were 25.5 (one thread) and 26.6
(two) times apart, the medians 26.3 and 21.8.
"""


def page(folder: Path) -> str:
    """Markdown: a chapter for every suite that has results, and where the time goes."""
    chapters = [_chapter(suite, record.read(suite.name, folder)) for suite in SUITES.values()]
    return "\n".join([INTRODUCTION, *filter(None, chapters), *_profiles(folder / "profile.json")])


def _chapter(suite: Suite, runs: Sequence[record.Run]) -> str:
    if not runs:
        return ""
    heading = f"## {suite.name}\n\n{suite.about[0].upper()}{suite.about[1:]}\n"
    command = f"`ifcomp bench {suite.name}`, about {suite.minutes:g} minutes.\n"
    processors = sorted({run.processor for run in runs})
    return "\n".join([heading, command, *(_tables(suite, runs, processor) for processor in processors)])


def _tables(suite: Suite, runs: Sequence[record.Run], processor: str) -> str:
    own = [run for run in runs if run.processor == processor]
    threads = sorted({run.threads for run in own})
    tables = [markdown_table(section, own, count) for count in threads for section in suite.sections]
    places = sorted({f"Threads: {run.threads}; {_place(run.environment)}" for run in own})
    return "\n".join([f"### {suite.name}, {processor}\n", *filter(None, tables), " ".join(places) + "\n"])


def _profiles(path: Path) -> list[str]:
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    before = content.get("before", {"commit": "", "networks": {}})
    parts = [
        "## Where the time goes\n\nMilliseconds an example and label, layer by layer, with T positions, O outputs and "
        f"J inputs, K = {content['classes']}. {_place(content['environment'])} `python -m benchmarks.profile`.\n"
    ]
    if before["networks"]:
        parts.append(f"*Before* are the first kernels, commit {before['commit'][:7]}.\n")
    for name, own in content["networks"].items():
        found, first = profile.as_profile(own), before["networks"].get(name)
        text = profile.markdown(found) if first is None else profile.comparison(profile.as_profile(first), found)
        parts.append(f"{name}:\n\n{text}")
    return parts


def _place(environment: dict[str, Any]) -> str:
    commit = (environment["commit"] or "unknown")[:7]
    library = f", C library: {environment['library']}" if "library" in environment else ""
    place = f"{environment['cpu']}, torch {environment['torch']}{library}, {environment['date']}, commit {commit}."
    return " ".join(filter(None, (place, environment.get("note"))))


def main(arguments: Sequence[str]) -> None:
    """Write the page to the path that is given."""
    with atomic_write(arguments[0]) as scratch:
        scratch.write_text(page(record.RESULTS), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
