"""Two processes with one thread each, against one process with one thread."""

from benchmarks.child import in_child
from benchmarks.networks import RESNET20
from benchmarks.references import forward
from benchmarks.suite import Goal, Measured, Section, Setup, Suite, milliseconds, number, times_faster
from benchmarks.timing import Timed, timed
from ifcomp import IFComp, Relative
from ifcomp.distributed import ranks, sharing

CLASSES = 10
#: With it influence does not depend on the basis of directions of equal curvature, which rounding decides.
FLAT = Relative(1e6)


def measure(setup: Setup) -> Measured:
    """Fit and scoring with one process and with two, by turns."""
    measured, means = Measured(), {}
    for _ in range(setup.slow_rounds):
        for processes in (1, 2):
            found = in_child(fit_and_score, setup.size(2048), setup.size(512), setup.tiny, processes=processes)
            sizes = {"fit": found["fitted"], "score": found["scored"], "forward": found["fitted"]}
            for name, examples in sizes.items():
                measured.add({f"{name}, {processes}": Timed(found[name], None)}, examples)
            means[processes] = found["mean"]
    measured.numbers["difference"] = abs(means[2] / means[1] - 1)
    return measured


def fit_and_score(fitted: int, scored: int, tiny: bool) -> dict[str, object]:
    """Seconds of a fit, of a scoring and of plain forward passes that are shared with the other processes, if there
    are any. Forward passes have nothing to say to each other: they show what the machine can give.
    """
    setup = Setup(1, 1, tiny)
    model, x = RESNET20.model(CLASSES, setup), RESNET20.images(fitted)
    batches, some = (list(own.split(2 * RESNET20.batch)) for own in (x, x[:scored]))
    with sharing():
        IFComp(model, sua=True).fit(batches[:1], progress=False)
        ifc = IFComp(model, sua=True)
        fit = timed(lambda: ifc.fit(batches, progress=False))
        compared = ifc.score([some[0][:16]], damping=FLAT, progress=False).frame
        score = timed(lambda: ifc.score(some, progress=False))
        own = batches[ranks().rank :: ranks().world]
        passes = timed(lambda: [forward(model, batch) for batch in own])
    mean = float(compared["expected_influence"].mean())
    seconds = {"fit": fit.seconds, "score": score.seconds, "forward": passes.seconds}
    return {**seconds, "fitted": fitted, "scored": scored, "mean": mean}


SUITE = Suite(
    "processes",
    "two processes with one thread each under torchrun, against one process with one thread; starting them is not "
    "counted.",
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
