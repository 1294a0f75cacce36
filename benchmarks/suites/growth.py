"""How cost and memory grow with the number of examples and of labels."""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from benchmarks.child import in_child, peak_memory
from benchmarks.networks import LENET
from benchmarks.references import forward
from benchmarks.suite import FORWARD, Column, Goal, Measured, Section, Setup, Suite
from benchmarks.suites.influence import fitted
from benchmarks.timing import Timed, interleaved, timed

BATCH = 100
EXAMPLES = (100, 1_000, 10_000, 100_000)
LABELS = (2, 4, 8, 16, 32, 64)


class Stream:
    """The same batch again and again: data that is never held."""

    def __init__(self, batch: Tensor, times: int) -> None:
        self._batch, self._times = batch, times

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self._times):
            yield self._batch.clone()


def measure_examples(setup: Setup) -> Measured:
    """Time and peak memory of scoring every number of examples in turns, each in a process of its own."""
    measured = Measured()
    for _ in range(setup.slow_rounds):
        for position, count in enumerate(EXAMPLES, start=1):
            used = setup.size(count, 3 * position)
            found = in_child(scored, used, setup.threads, setup.rounds, setup.tiny)
            measured.add({str(count): Timed(found["seconds"], None)}, used)
            name = f"bytes at {count}"
            measured.numbers[name] = max(measured.numbers.get(name, 0), found["bytes"])
    return measured


def scored(count: int, threads: int, rounds: int, tiny: bool) -> dict[str, object]:
    """Seconds of every round, and the bytes above those of a first batch, for a process of its own."""
    setup = Setup(threads, rounds, tiny)
    ifc, x = fitted(LENET, 10, setup, setup.size(BATCH))
    stream = Stream(x, max(1, count // len(x)))
    ifc.score([x], progress=False)
    found: list[float] = []
    rounds = max(1, min(rounds, max(EXAMPLES) // (2 * count)))
    score = partial(ifc.score, stream, progress=False)
    used = peak_memory(lambda: found.extend(timed(score, rounds, setup.turn).seconds))
    return {"seconds": found, "bytes": used}


def measure_labels(setup: Setup) -> Measured:
    """Influence of all labels for every number of labels, in turns."""
    fits = {str(count): fitted(LENET, count, setup, setup.size(LENET.batch)) for count in LABELS}
    ifc, x = fits[str(LABELS[0])]
    functions = {name: partial(own.influence, x) for name, (own, x) in fits.items()}
    measured = Measured()
    everything = {FORWARD: lambda: forward(ifc.model, x), **functions}
    measured.add(interleaved(everything, setup.rounds, turn=setup.turn), len(x))
    return measured


def spread_of_costs(measured: Measured) -> float:
    """The largest cost of an example over the smallest."""
    costs = [measured.milliseconds(name) for name in measured.times]
    return max(costs) / min(costs)


def bytes_an_example(measured: Measured) -> float:
    """Growth of the peak between the fewest and the most examples; a row of the table is part of it."""
    first, last = (str(count) for count in (EXAMPLES[0], EXAMPLES[-1]))
    grown = measured.numbers[f"bytes at {last}"] - measured.numbers[f"bytes at {first}"]
    return grown / (measured.times[last].examples - measured.times[first].examples)


def growth_of_a_label(measured: Measured) -> float:
    """What one more label costs in the upper half of their numbers, over the same in the lower half."""
    first, middle, last = LABELS[0], LABELS[-2], LABELS[-1]
    upper = (measured.milliseconds(str(last)) - measured.milliseconds(str(middle))) / (last - middle)
    lower = (measured.milliseconds(str(middle)) - measured.milliseconds(str(first))) / (middle - first)
    return upper / lower


def _cost(count: int, form: str) -> Column:
    return Column(f"{count:,}, ms", lambda measured: measured.milliseconds(str(count)), form)


def _peak(count: int) -> Column:
    return Column(f"{count:,}, peak MB", lambda measured: measured.numbers[f"bytes at {count}"] / 1e6, ",.1f")


SUITE = Suite(
    "growth",
    "cost of an example and peak memory above those of one batch as the streamed data grows, and cost as the number of "
    "labels grows. A row of the table of scores takes about 100 bytes.",
    minutes=5,
    sections=(
        Section(
            "Scoring, cost of an example by the number of examples",
            (
                *(_cost(count, ",.3f") for count in EXAMPLES),
                Column("largest / smallest", spread_of_costs, ",.2f", Goal("≤", 1.25)),
                *(_peak(count) for count in (EXAMPLES[0], EXAMPLES[-1])),
                Column("bytes an example", bytes_an_example, ",.0f", Goal("≤", 1000)),
            ),
            {"LeNet, K = 10": measure_examples},
        ),
        Section(
            "All-label influence, cost of an example by the number of labels",
            (
                *(_cost(count, ",.3f") for count in LABELS),
                Column("one more label, 33 to 64 / 3 to 32", growth_of_a_label, ",.2f", Goal("≤", 1.25)),
            ),
            {"LeNet": measure_labels},
        ),
    ),
)
