"""Two processes with one thread each, against one process with one thread."""

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.child import in_child
from benchmarks.networks import RESNET20
from benchmarks.references import forward
from benchmarks.suite import Goal, Measured, Section, Setup, Suite, milliseconds, number, times_faster
from benchmarks.timing import Timed, interleaved
from ifcomp import IFComp, Relative
from ifcomp.distributed import all_gather_objects, data_parallel, process_info

CLASSES = 10
#: With it influence does not depend on the basis of directions of equal curvature, which rounding decides.
FLAT = Relative(1e6)


def measure(setup: Setup) -> Measured:
    """Fit and scoring with one process and with two, by turns."""
    fitted, scored = setup.size(2048), setup.size(256)
    found = in_child(alone_and_shared, fitted, scored, setup.rounds, setup.tiny, processes=2)
    measured = Measured(numbers={"difference": abs(found["mean, 2"] / found["mean, 1"] - 1)})
    for step, examples in (("fit", fitted), ("score", scored), ("forward", fitted)):
        for name in (f"{step}, 1", f"{step}, 2"):
            measured.add({name: Timed(found[name], None)}, examples)
    return measured


def alone_and_shared(fitted: int, scored: int, rounds: int, tiny: bool) -> dict[str, Any]:
    """Seconds of fits, scorings and plain forward passes, each by the first process while the others wait and then by
    all; and the mean of what scoring gives.
    """
    model, x = RESNET20.model(CLASSES, Setup(1, rounds, tiny)), RESNET20.images(fitted)
    batches, some = (list(own.split(2 * RESNET20.batch)) for own in (x, x[:scored]))
    alone, shared = (_Work(IFComp(model, sua=True), batches, some) for _ in range(2))
    with data_parallel():
        IFComp(model, sua=True).fit(batches[:1], progress=False)
        took = interleaved(_by_turns(alone.fit, shared.fit), rounds, warm_up=False)
        took |= interleaved(_by_turns(alone.score, shared.score), rounds)
        took |= interleaved(_by_turns(alone.forward, shared.forward), rounds)
        means = {"mean, 1": _by_the_first(alone.mean), "mean, 2": shared.mean()}
    return {name: own.seconds for name, own in took.items()} | means


@dataclass(frozen=True)
class _Work:
    """What is timed, over batches to fit on and batches to score."""

    ifc: IFComp
    fitted: list[Tensor]
    scored: list[Tensor]

    def fit(self) -> None:
        self.ifc.fit(self.fitted, progress=False)

    def score(self) -> None:
        self.ifc.score(self.scored, progress=False)

    def forward(self) -> None:
        """Passes that have nothing to say to each other until all are done: what the machine can give."""
        for batch in self.fitted[process_info().rank :: process_info().world_size]:
            forward(self.ifc.model, batch)
        all_gather_objects(None)

    def mean(self) -> float:
        """Of what scoring gives for some examples."""
        frame = self.ifc.score([self.scored[0][:16]], damping=FLAT, progress=False).frame
        return float(frame["expected_influence"].mean())


def _by_turns(alone: Callable[[], Any], shared: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """Work of the first process and the same work of all, by their names in what is measured."""
    return {f"{alone.__name__}, 1": partial(_by_the_first, alone), f"{shared.__name__}, 2": shared}


def _by_the_first(work: Callable[[], Any]) -> Any:
    """What the first process makes as if it were the only one, which all wait for."""
    found = Context().run(work) if process_info().rank == 0 else None  # outside `data_parallel`
    return all_gather_objects(found)[0]


SUITE = Suite(
    "processes",
    "two processes with one thread each under torchrun, against one process with one thread; starting them and the "
    "first scoring of each, which asks the system for memory, are not counted.",
    minutes=6,
    sections=(
        Section(
            f"Fit and scoring, K = {CLASSES}",
            (
                milliseconds("fit, one process", "fit, 1"),
                milliseconds("two", "fit, 2"),
                times_faster("one / two", "fit, 1", "fit, 2", Goal("≥", 1.8)),
                milliseconds("scoring, one process", "score, 1"),
                milliseconds("two", "score, 2"),
                times_faster("one / two", "score, 1", "score, 2", Goal("≥", 1.8)),
                times_faster("forward passes alone, one / two", "forward, 1", "forward, 2"),
                number("difference", "difference", ".0e", Goal("≤", 1e-4)),
            ),
            {"ResNet-20": measure},
            threads=(1,),
        ),
    ),
)
