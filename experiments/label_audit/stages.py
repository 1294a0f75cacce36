"""Stages of the image networks: early stopping, half memorised, last epoch, and held-out images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from experiments.datasets import Dataset, load
from experiments.label_audit.cases import FOLDS, Case, cached, fold_indices, probabilities
from experiments.label_audit.images import TASKS as IMAGES
from experiments.label_audit.images import VALIDATION_IMAGES, ImageTask
from experiments.noise import NoisyData
from experiments.runs import Trained
from experiments.training import is_over

#: Examples with label complexity on a ResNet-18, where it takes 0.2 s per example, and on a LeNet.
RESNET_COMPLEXITY, LENET_COMPLEXITY = 500, 1_500

#: Wrong labels by which the half memorised epoch is chosen.
HALF_EXAMPLES = 500


@dataclass(frozen=True)
class StagedImages:
    """An image task whose networks come from the cache. This class never trains."""

    task: ImageTask

    @property
    def name(self) -> str:
        """Unique name."""
        return self.task.name

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of noise, images and training."""
        return self.task.seeds

    @property
    def is_development(self) -> bool:
        """Whether settings were chosen on this task."""
        return self.task.is_development

    def cases(self, seed: int) -> Mapping[str, Callable[[], Case]]:
        """Return a function per stage that builds the case; none before the training is complete."""
        trained = self._finished(seed)
        if trained is None:
            return {}
        last = trained.epochs[-1].epoch
        stages = {"last": partial(self.case, seed, last)}
        if self.name.endswith("-clean"):
            return stages
        early = smallest_validation_loss(trained)
        return {
            "early": partial(self.case, seed, early),
            "half": lambda: self.case(seed, self._half(seed, trained)),
            **stages,
            "held-out": lambda: self._held_out(seed, early),
        }

    def case(self, seed: int, epoch: int) -> Case:
        """Return the network after an epoch with the training data."""
        noisy, _ = _data(self.name, seed)
        return self._build(seed, epoch, noisy.data, noisy.wrong)

    def epochs(self, seed: int) -> list[int]:
        """Return all epochs with stored weights."""
        trained = self._finished(seed)
        return [] if trained is None else [kept.epoch for kept in trained.checkpoints]

    def fold_probabilities(self, seed: int, may_train: bool) -> Tensor | None:
        """Return out-of-sample probabilities [N, K] of five early-stopped networks, if all are trained."""
        noisy, validation = _data(self.name, seed)
        parts = [fold_indices(len(noisy.data), fold) for fold in range(FOLDS)]
        recipe, pairs = self.task.fold_recipe, []
        for fold, (rest, inside) in enumerate(parts):
            trained = self.task.fit(noisy.data.take(rest, f"fold{fold}"), validation, recipe, seed, until=0)
            if not is_over(trained.epochs, recipe):
                return None
            pairs.append((trained, inside))
        return cached(f"{self.name}-s{seed}-folds", lambda: self._folds(noisy.data, pairs))["p"]

    def _folds(self, data: Dataset, pairs: list[tuple[Trained, Tensor]]) -> dict[str, Tensor]:
        result = torch.zeros(len(data), len(data.class_names), dtype=torch.float64)
        for trained, inside in pairs:
            model = trained.model(trained.best_epoch)
            result[inside] = probabilities(model, self.task.normalisation(data.images[inside]))
        return {"p": result}

    def _half(self, seed: int, trained: Trained) -> int:
        """Return the epoch at which the share of memorised wrong labels is nearest to one half."""
        noisy, _ = _data(self.name, seed)
        chosen = noisy.wrong.nonzero().flatten()[:HALF_EXAMPLES]
        assert noisy.data.labels is not None
        x, labels = self.task.normalisation(noisy.data.images[chosen]), noisy.data.labels[chosen]

        def distance(epoch: int) -> float:
            predicted = probabilities(trained.model(epoch), x).argmax(1)
            return abs(float((predicted == labels).double().mean()) - 0.5)

        def compute() -> dict[str, Tensor]:
            return {"epoch": torch.tensor(min((kept.epoch for kept in trained.checkpoints), key=distance))}

        return int(cached(f"{self.name}-s{seed}-half", compute)["epoch"])

    def _held_out(self, seed: int, epoch: int) -> Case:
        _, validation = _data(self.name, seed)
        clean = load(self.task.source, "train")
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(clean)))
        chosen = order[self.task.images : self.task.images + VALIDATION_IMAGES]
        assert clean.labels is not None
        assert validation.labels is not None
        return self._build(seed, epoch, validation, validation.labels != clean.labels[chosen])

    def _build(self, seed: int, epoch: int, data: Dataset, wrong: Tensor) -> Case:
        trained = self._finished(seed)
        assert trained is not None
        assert data.labels is not None
        x = self.task.normalisation(data.images)
        count = RESNET_COMPLEXITY if self.task.model.startswith("resnet") else LENET_COMPLEXITY
        return Case(trained.model(epoch), x, data.labels, wrong, len(data.class_names), x.flatten(1), epoch, count)

    def _finished(self, seed: int) -> Trained | None:
        noisy, validation = _data(self.name, seed)
        trained = self.task.fit(noisy.data, validation, self.task.recipe, seed, until=0)
        return trained if is_over(trained.epochs, self.task.recipe) else None


def smallest_validation_loss(trained: Trained) -> int:
    """Return the epoch with the smallest validation loss."""
    return min(trained.epochs, key=lambda row: row.validation_loss or 0.0).epoch


@cache
def _data(name: str, seed: int) -> tuple[NoisyData, Dataset]:
    return IMAGES[name].data(seed)


TASKS: Mapping[str, StagedImages] = {name: StagedImages(task) for name, task in IMAGES.items()}
