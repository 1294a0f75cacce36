"""Label audit: time in forward passes, peak memory, and the time of training five networks."""

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.child import in_child, peak_memory
from benchmarks.networks import LENET, RESNET18, RESNET20, Network
from benchmarks.references import forward
from benchmarks.suite import FORWARD, Column, Goal, Measured, Section, Setup, Suite, milliseconds, units
from benchmarks.timing import interleaved, timed
from ifcomp import IFComp

CLASSES = 10
NETWORKS = {"LeNet": LENET, "ResNet-20": RESNET20, "ResNet-18": RESNET18}

#: Examples of the audit by network.
COUNTS = {"LeNet": 10_000, "ResNet-20": 2_000, "ResNet-18": 1_000}

#: Epochs of each of the five trainings, on four fifths of the data.
EPOCHS, FOLDS, SHARE = 24, 5, 0.8


def measure(name: str, setup: Setup) -> Measured:
    """Time an audit, a forward pass and a training step in turns; measure memory in a separate process."""
    network, count = NETWORKS[name], setup.size(COUNTS[name], 40)
    model, batches = network.model(CLASSES, setup), labelled(network, count, setup)
    x, y = batches[0]
    measured = Measured()
    functions = {
        "audit": lambda: IFComp(model).audit(batches, progress=False),
        FORWARD: lambda: [forward(model, x) for x, _ in batches],
    }
    measured.add(interleaved(functions, setup.slow_rounds, warm_up=False, turn=setup.turn), count)
    trained = network.model(CLASSES, setup).train()
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3)
    step = timed(lambda: training_step(trained, optimizer, x, y), setup.rounds, setup.turn)
    measured.add({"training step": step}, len(x))
    measured.numbers["audit bytes"] = in_child(memory_of_audit, name, count, setup.threads, setup.tiny)
    return measured


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Run one step of SGD."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def memory_of_audit(name: str, count: int, threads: int, tiny: bool) -> int:
    """Return the peak memory of an audit in bytes above model and data; runs in a separate process."""
    setup, network = Setup(threads, 1, tiny), NETWORKS[name]
    model, batches = network.model(CLASSES, setup), labelled(network, count, setup)
    forward(model, batches[0][0])
    return peak_memory(lambda: IFComp(model).audit(batches, progress=False))


def labelled(network: Network, count: int, setup: Setup) -> list[tuple[Tensor, Tensor]]:
    """Return batches of random images with labels."""
    labels = torch.arange(count) % CLASSES
    size = setup.size(network.batch, 20)
    return list(zip(network.images(count).split(size), labels.split(size), strict=True))


def five_trainings(measured: Measured) -> float:
    """Return the time of five trainings in milliseconds per audited example."""
    return FOLDS * SHARE * EPOCHS * measured.milliseconds("training step")


SUITE = Suite(
    "audit",
    "Label audit",
    f"label audit of data with {CLASSES} classes. Beside it is the time of {FOLDS} trainings of {EPOCHS} epochs, which "
    "out-of-sample probabilities by cross-validation need.",
    minutes=10,
    sections=(
        Section(
            "Label audit",
            (
                milliseconds("forward", FORWARD),
                milliseconds("audit", "audit"),
                units("audit", "audit", Goal("≤", {"ResNet-18": 5.0, "ResNet-20": 12.0})),
                Column("audit, peak MB", lambda measured: measured.numbers["audit bytes"] / 1e6, ",.0f"),
                Column("five trainings, ms", five_trainings, ",.0f"),
                Column(
                    "five trainings / audit",
                    lambda measured: five_trainings(measured) / measured.milliseconds("audit"),
                    ",.0f",
                ),
            ),
            {name: partial(measure, name) for name in NETWORKS},
        ),
    ),
)
