"""Pairs of MNIST digits side by side: 100 classes, and a network that memorises their labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.datasets import MNIST, load
from experiments.label_audit.cases import Case, Labelled, cached, corrupt
from experiments.label_audit.fitting import Plan, memorise
from experiments.runs import cache_folder

TRAINING_PAIRS, TEST_PAIRS, CLASSES, FRACTION = 30_000, 5_000, 100, 0.3
PLAN = Plan(epochs=40, target=0.95)


def network() -> nn.Sequential:
    """Return a network like LeNet for images of 28 x 56 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(24 * 5 * 12, 400), nn.ReLU(), nn.Linear(400, 200), nn.ReLU(), nn.Linear(200, CLASSES),
    )  # fmt: skip


def pair_up(images: Tensor, labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images [count, H, 2 W] of two digits each, and the classes ``10 * left + right``."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randint(len(images), (count,), generator=generator) for _ in range(2))
    return torch.cat([images[left], images[right]], 2), 10 * labels[left] + labels[right]


@dataclass(frozen=True)
class PairTask:
    """Pairs with symmetric label noise."""

    name: str = "pairs-symmetric"
    is_development: bool = False
    seeds: tuple[int, ...] = (0,)

    def data(self, seed: int, split: str) -> Labelled:
        """Return the training pairs ("train") or the pairs of other digits ("test")."""
        source = load("mnist", split)
        assert source.labels is not None
        count = TRAINING_PAIRS if split == "train" else TEST_PAIRS
        images, labels = pair_up(source.images, source.labels, count, seed)
        given = corrupt(labels, "symmetric", FRACTION, CLASSES, seed)
        return Labelled(MNIST(images), given, given != labels)

    def cases(self, seed: int) -> Mapping[str, Callable[[], Case]]:
        """Return a function per stage that builds the case."""
        return {"last": lambda: self._case(seed, "train"), "held-out": lambda: self._case(seed, "test")}

    def fold_probabilities(self, seed: int, may_train: bool) -> Tensor | None:
        """Return None: no five-fold networks are trained for this task."""
        return None

    def _case(self, seed: int, split: str) -> Case:
        tensors = cached(f"{self.name}-s{seed}", lambda: self._train(seed))
        epoch = int(tensors.pop("epoch"))
        model = network()
        model.load_state_dict(tensors)
        data = self.data(seed, split)
        raw = data.x.flatten(1)
        return Case(model.eval(), data.x, data.labels, data.wrong, CLASSES, raw, epoch, 2_000)

    def _train(self, seed: int) -> dict[str, Tensor]:
        training = self.data(seed, "train")
        torch.manual_seed(seed)
        model = network()
        folder = cache_folder() / "label_audit"
        folder.mkdir(parents=True, exist_ok=True)
        state = folder / f"{self.name}-s{seed}-state.safetensors"
        epoch = memorise(model, training.x, training.labels, PLAN, seed, state)
        return {**model.state_dict(), "epoch": torch.tensor(epoch)}


TASKS: Mapping[str, PairTask] = {task.name: task for task in (PairTask(),)}
