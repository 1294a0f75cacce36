"""Examine the architectures of the zoo, one at a time, each in a forked process.

A crash, a timeout or too much memory is recorded and does not stop the run. Results are saved after every
architecture, so an interrupted run continues where it stopped.

    make zoo                                        # everything that has no result yet
    make zoo ZOO="'timm/*' --again"                 # selected architectures, examined again
    make zoo ZOO=--failed                           # everything that is not exact, examined again
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from experiments.zoo.entry import Entry
from experiments.zoo.examine import VERDICTS, Result, examine
from experiments.zoo.page import write_page
from experiments.zoo.sources import load_entries
from ifcomp.io.files import atomic_write

RESULTS = Path(__file__).parent / "results" / "zoo.json"
TIMEOUT = 120.0
MEMORY = 12 * 2**30


def run_in_process(entry: Entry, timeout: float) -> Result:
    """Examine an architecture in a forked process."""
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_work, args=(entry, send))
    started = time.perf_counter()
    process.start()
    send.close()
    result = Result(entry.name, entry.source, "timeout", message=f"No result after {timeout:.0f} s.")
    try:
        if receive.poll(timeout):
            result = Result(**receive.recv())
    except EOFError:
        process.join()
        result = Result(entry.name, entry.source, "killed", message=f"Exit code {process.exitcode}.")
    process.kill()
    process.join()
    result.times["total"] = time.perf_counter() - started
    return result


def _work(entry: Entry, send: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    send.send(asdict(examine(entry)))
    sys.stdout.flush()
    os._exit(0)


def run_entries(
    entries: Iterable[Entry], path: Path, again: Collection[str] = (), timeout: float = TIMEOUT
) -> dict[str, Result]:
    """Examine architectures and save each result.

    Args:
        entries: The architectures.
        path: File of the results. Architectures with a result are skipped.
        again: Verdicts whose architectures are examined again.
        timeout: Seconds per architecture.

    Returns:
        All results by ``source/name``, those of earlier runs included.
    """
    results = read_results(path)
    for entry in entries:
        known = results.get(entry.key)
        if known is None or known.verdict in again:
            results[entry.key] = run_in_process(entry, timeout)
            write_results(path, results)
            _print(_line(entry.key, results[entry.key]))
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Examine the selected architectures and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["*"], help="shell-style patterns of source/name")
    parser.add_argument("--again", action="store_true", help="examine again what has a result")
    parser.add_argument("--failed", action="store_true", help="examine again what is not exact")
    parser.add_argument("--list", action="store_true", help="print the names only")
    parser.add_argument("--page", action="store_true", help="write the page only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds per architecture")
    options = parser.parse_args(arguments)
    if options.page:
        write_page(read_results(options.results))
        return
    selected = (
        entry
        for entry in load_entries()
        if any(fnmatch.fnmatchcase(entry.key, pattern) for pattern in options.patterns)
    )
    if options.list:
        for entry in selected:
            _print(entry.key)
        return
    torch.set_num_threads(1)
    again = VERDICTS if options.again else VERDICTS[1:] if options.failed else ()
    write_page(run_entries(selected, options.results, again, options.timeout))


def read_results(path: Path) -> dict[str, Result]:
    """Read the results of earlier runs."""
    saved = json.loads(path.read_text()) if path.exists() else {}
    return {key: Result(**values) for key, values in saved.items()}


def write_results(path: Path, results: Mapping[str, Result]) -> None:
    """Write all results; a reader never sees a part of them."""
    path.parent.mkdir(exist_ok=True)
    plain = {key: asdict(result) for key, result in results.items()}
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(plain, indent=1, sort_keys=True) + "\n")


def _line(key: str, result: Result) -> str:
    parts = ", ".join(f"{name} {error:.1e}" for name, error in result.errors.items())
    first = result.message.splitlines()[0][:160] if result.message else ""
    units = result.times.get("units", 0.0)
    return (
        f"{result.verdict:8} {key:48} {result.trainable:8,} {100 * result.ekfac:5.1f} % {units:6.1f} units "
        f"{result.times['total']:5.1f} s  {parts} {first}"
    )


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
