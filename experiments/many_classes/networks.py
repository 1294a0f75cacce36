"""Networks that classify pairs of MNIST digits, trained on clean labels, with test pairs and OOD pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.datasets import MNIST, Dataset, load
from experiments.label_audit.cases import cached
from experiments.label_audit.fitting import Plan, memorise
from experiments.label_audit.pairs import CLASSES, network, pair_up
from experiments.models import resnet20
from experiments.runs import cache_folder

TRAINING_PAIRS, HELD_OUT, TEST_PAIRS, OOD_PAIRS = 30_000, 1_000, 1_000, 500
BATCH = 250

#: Sources of OOD pairs.
OOD_SOURCES = ("notmnist", "kmnist", "fashion-mnist")


class GreyResNet20(nn.Module):
    """ResNet-20 for grey images: the channel is repeated three times."""

    def __init__(self) -> None:
        super().__init__()
        self.body = resnet20(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 1, 28, 56] to logits [B, 100]."""
        logits: Tensor = self.body(x.expand(-1, 3, -1, -1))
        return logits


#: Builder and training of every network, by name.
NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], Plan]] = {
    "LeNet": (network, Plan(epochs=4, target=0.995)),
    "ResNet-20": (GreyResNet20, Plan(epochs=2, target=0.995)),
}


@dataclass(frozen=True)
class Problem:
    """A trained network with its data.

    Attributes:
        name: Name of the network.
        model: The network in eval mode.
        train: Training batches ``(x, y)``.
        held_out: Held-out pairs and their labels.
        test: Test pairs and their labels.
        ood: OOD pairs by name.
    """

    name: str
    model: nn.Module
    train: list[tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    ood: Mapping[str, Tensor]


def build(name: str, seed: int = 0) -> Problem:
    """Train a network on pairs, or read its weights from the cache."""
    x, y = _pairs(load("mnist", "train"), TRAINING_PAIRS, seed)
    tensors = cached(f"many-classes-{name}-s{seed}", lambda: _train(name, x, y, seed))
    model = NETWORKS[name][0]()
    model.load_state_dict({key: value for key, value in tensors.items() if key != "epoch"})
    digits = load("mnist", "test")
    held_out, test = digits.take(torch.arange(5_000), "first"), digits.take(torch.arange(5_000, 10_000), "last")
    ood = {source: _pairs(load(source, "test"), OOD_PAIRS, seed)[0] for source in OOD_SOURCES}
    images, _ = _pair_images(test, OOD_PAIRS, seed + 1)
    ood["inverted"] = MNIST(255 - images)
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    pairs = _pairs(held_out, HELD_OUT, seed), _pairs(test, TEST_PAIRS, seed)
    return Problem(name, model.eval(), batches, *pairs, ood)


def _pairs(data: Dataset, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return normalised pairs [count, 1, 28, 56] and their classes."""
    images, classes = _pair_images(data, count, seed)
    return MNIST(images), classes


def _pair_images(data: Dataset, count: int, seed: int) -> tuple[Tensor, Tensor]:
    labels = torch.zeros(len(data), dtype=torch.int64) if data.labels is None else data.labels
    return pair_up(data.images, labels, count, seed)


def _train(name: str, x: Tensor, y: Tensor, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    builder, plan = NETWORKS[name]
    model = builder()
    folder = cache_folder() / "many_classes"
    folder.mkdir(parents=True, exist_ok=True)
    epoch = memorise(model, x, y, plan, seed, folder / f"{name}-s{seed}-state.safetensors")
    return {**model.state_dict(), "epoch": torch.tensor(epoch)}
