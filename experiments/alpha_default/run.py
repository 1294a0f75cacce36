"""Measure the NLL of predictions over the training mean of ``alpha/n E[IF]``, which sets the default alpha.

Networks of Fashion-MNIST must be in the cache (`experiments.label_audit.train`).

    IFCOMP_DATA=... python -m experiments.alpha_default.run
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.corruptions import corrupt
from experiments.datasets import FASHION, Dataset, Normalisation, load
from experiments.label_audit import stages
from experiments.models import pretrained
from ifcomp import IFComp
from ifcomp.complexity import argmax_keeping_distribution
from ifcomp.io.files import atomic_write

RESULTS = Path(__file__).parent / "results.json"
#: Training means of ``alpha/n E[IF]``; 0 is the softmax.
ADDED = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
EPOCHS = (5, 100)
BATCH = 250


@dataclass(frozen=True)
class Situation:
    """A network, its training batches, and test data by name."""

    name: str
    model: nn.Module
    train: Sequence[tuple[Tensor, Tensor]]
    test: Mapping[str, tuple[Tensor, Tensor]]


def situations() -> Iterator[Situation]:
    """Build the networks one by one."""
    task, test = stages.TASKS["fashion-mnist-clean"], load("fashion-mnist").first(2000)
    for epoch in EPOCHS:
        case = task.case(0, epoch)
        shifted = _test_data(test, FASHION, ("gaussian_noise",))
        yield Situation(f"Fashion-MNIST, LeNet, epoch {epoch}", case.model, case.batches, shifted)
    model, normalisation = pretrained("resnet20")
    train, test = load("cifar10", "train").first(1500), load("cifar10").first(500)
    assert train.labels is not None
    x = normalisation(train.images)
    batches = list(zip(x.split(BATCH), train.labels.split(BATCH), strict=True))
    shifted = _test_data(test, normalisation, ("gaussian_noise", "defocus_blur"))
    yield Situation("CIFAR-10, ResNet-20", model, batches, shifted)


def _test_data(test: Dataset, normalisation: Normalisation, kinds: Sequence[str]) -> dict[str, tuple[Tensor, Tensor]]:
    assert test.labels is not None
    images = {"clean": test.images} | {kind: corrupt(test.images, kind, 3) for kind in kinds}
    return {name: (normalisation(pixels), test.labels) for name, pixels in images.items()}


def measure(situation: Situation) -> dict[str, dict[str, float]]:
    """Return the NLL in nats by test data and training mean."""
    ifc = IFComp(situation.model).fit(situation.train, progress=False)
    count = sum(len(labels) for _, labels in situation.train)
    train = torch.cat([_expected_influence(ifc, x, count) for x, _ in situation.train])
    result = {}
    for name, (x, labels) in situation.test.items():
        parts = x.split(BATCH)
        with torch.no_grad():
            p = torch.cat([situation.model(part).double().softmax(1) for part in parts])
        expected = torch.cat([_expected_influence(ifc, part, count) for part in parts])
        result[name] = {
            str(added): nll(
                argmax_keeping_distribution(p, expected, count, added * count / float(train.mean())), labels
            )
            for added in ADDED
        }
    return result


def _expected_influence(ifc: IFComp, x: Tensor, count: int) -> Tensor:
    """Return E[IF], [B]."""
    return count * torch.expm1(ifc.parametric_complexity(x, alpha=1.0).double())


def nll(p: Tensor, labels: Tensor) -> float:
    """Return the mean negative log-likelihood in nats of distributions [N, K]."""
    return float(-p.gather(1, labels.unsqueeze(1)).log().mean())


def main() -> None:
    """Measure all situations and write the results."""
    torch.set_num_threads(1)
    results = {situation.name: measure(situation) for situation in situations()}
    with atomic_write(RESULTS) as scratch:
        scratch.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
