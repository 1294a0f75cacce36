"""Two processes with one thread each against one process with one thread."""

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.child import in_child
from benchmarks.networks import RESNET20
from benchmarks.references import forward
from benchmarks.suite import Goal, Measured, Section, Setup, Suite, milliseconds, number, times_faster
from benchmarks.timing import Timed, interleaved
from ifcomp import IFComp, Relative
from ifcomp.distributed import all_gather_objects, data_parallel, process_info

CLASSES = 10
#: Damping at which the influence does not depend on the eigenbasis of degenerate eigenvalues.
LARGE_DAMPING = Relative(1e6)


def measure(setup: Setup) -> Measured:
    """Time fit and scoring with one and with two processes in turns."""
    fitted, scored = setup.size(2048), setup.size(256)
    results = in_child(alone_and_shared, fitted, scored, setup.rounds, setup.tiny, processes=2)
    measured = Measured(numbers={"difference": abs(results["mean, 2"] / results["mean, 1"] - 1)})
    for step, examples in (("fit", fitted), ("score", scored), ("forward", fitted)):
        for name in (f"{step}, 1", f"{step}, 2"):
            measured.add({name: Timed(results[name], None)}, examples)
    return measured


def alone_and_shared(fitted: int, scored: int, rounds: int, tiny: bool) -> dict[str, Any]:
    """Return the seconds of fit, scoring and forward passes by one process and by all, and the mean scores of both."""
    model, x = RESNET20.model(CLASSES, Setup(1, rounds, tiny)), RESNET20.images(fitted)
    fit_batches, score_batches = (list(part.split(2 * RESNET20.batch)) for part in (x, x[:scored]))
    alone, shared = (_Work(IFComp(model, sua=True), fit_batches, score_batches) for _ in range(2))
    with data_parallel():
        IFComp(model, sua=True).fit(fit_batches[:1], progress=False)
        timings = interleaved(_in_turns(alone.fit, shared.fit), rounds, warm_up=False)
        timings |= interleaved(_in_turns(alone.score, shared.score), rounds)
        timings |= interleaved(_in_turns(alone.forward, shared.forward), rounds)
        means = {"mean, 1": _by_one_process(alone.mean), "mean, 2": shared.mean()}
    return {name: timed.seconds for name, timed in timings.items()} | means


def measure_audit(setup: Setup) -> Measured:
    """Time a label audit with one and with two processes in turns."""
    count = setup.size(2048, 40)
    results = in_child(audits_alone_and_shared, count, setup.slow_rounds, setup.tiny, processes=2)
    measured = Measured()
    for name, seconds in results.items():
        measured.add({name: Timed(seconds, None)}, count)
    return measured


def audits_alone_and_shared(count: int, rounds: int, tiny: bool) -> dict[str, list[float]]:
    """Return the seconds of audits by one process and by all."""
    ifc = IFComp(RESNET20.model(CLASSES, Setup(1, rounds, tiny)))
    size, labels = 2 * RESNET20.batch, torch.arange(count) // 2 % CLASSES
    batches = list(zip(RESNET20.images(count).split(size), labels.split(size), strict=True))

    def audit() -> None:
        ifc.audit(batches, progress=False)

    with data_parallel():
        return {name: timed.seconds for name, timed in interleaved(_in_turns(audit, audit), rounds).items()}


@dataclass(frozen=True)
class _Work:
    """The timed functions, with the batches of fit and scoring."""

    ifc: IFComp
    fitted: list[Tensor]
    scored: list[Tensor]

    def fit(self) -> None:
        self.ifc.fit(self.fitted, progress=False)

    def score(self) -> None:
        self.ifc.score(self.scored, progress=False)

    def forward(self) -> None:
        """Forward passes without communication: the best possible speed-up of the machine."""
        for batch in self.fitted[process_info().rank :: process_info().world_size]:
            forward(self.ifc.model, batch)
        all_gather_objects(None)

    def mean(self) -> float:
        """Return the mean expected influence of 16 examples."""
        frame = self.ifc.score([self.scored[0][:16]], damping=LARGE_DAMPING, progress=False).frame
        return float(frame["expected_influence"].mean())


def _in_turns(alone: Callable[[], Any], shared: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """Return the functions of one process and of all processes, by the names of their timings."""
    return {f"{alone.__name__}, 1": partial(_by_one_process, alone), f"{shared.__name__}, 2": shared}


def _by_one_process(work: Callable[[], Any]) -> Any:
    """Call a function in the first process outside of `data_parallel`; return its result to all processes."""
    result = Context().run(work) if process_info().rank == 0 else None  # an empty context is outside of `data_parallel`
    return all_gather_objects(result)[0]


SUITE = Suite(
    "processes",
    "Two processes",
    "two processes with one thread each under torchrun, against one process with one thread. The start of the "
    "processes and the first scoring, which allocates memory, are not timed.",
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
        Section(
            f"Label audit, K = {CLASSES}",
            (
                milliseconds("audit, one process", "audit, 1"),
                milliseconds("two", "audit, 2"),
                times_faster("one / two", "audit, 1", "audit, 2"),
            ),
            {"audit of ResNet-20": measure_audit},
            threads=(1,),
        ),
    ),
)
