"""Network and data of a study: trained by a recipe, or with published weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from experiments.datasets import CIFAR10, FASHION, MNIST, Batches, Dataset, Normalisation, convert, load, separate
from experiments.models import PRETRAINED, pretrained
from experiments.recipes import Recipe
from experiments.runs import Trained
from experiments.training import train
from ifcomp.curvature.factors import FisherKind

_NORMALISATIONS = {"digits": MNIST, "mnist": MNIST, "fashion-mnist": FASHION, "cifar10": CIFAR10}


@dataclass(frozen=True)
class Subject:
    """A network and its data.

    Attributes:
        data: Name of the data set.
        model: Name of the network.
        recipe: Training recipe; None uses published weights.
        held_out: Number of validation examples. They come from the training set, or from the test set for published
            weights, which were trained on the whole training set.
        examples: Number of training examples, the first of the data; None uses all.
        seed: Seed of the training.
    """

    data: str
    model: str
    recipe: Recipe | None
    held_out: int
    examples: int | None = None
    seed: int = 0

    @property
    def normalisation(self) -> Normalisation:
        """Normalisation of the inputs."""
        return _NORMALISATIONS[self.data] if self.recipe else PRETRAINED[self.model][1]

    @property
    def fisher(self) -> FisherKind:
        """Labels of the Fisher: exact for LeNets; one sample per pass, as in the paper, for larger networks."""
        return "exact" if self.model.startswith("lenet") else "sampled"

    def fitted_to(self, data: Dataset) -> Dataset:
        """Convert images to the size and channels of the network."""
        size, channels = (28, 1) if self.model.startswith("lenet") else (32, 3)
        is_ready = data.images.shape[1:] == ((size, size) if channels == 1 else (size, size, channels))
        return data if is_ready else convert(data, size, channels)

    def parts(self) -> tuple[Dataset, Dataset, Dataset]:
        """Return training, validation and test data."""
        known, test = (self.fitted_to(load(self.data, split)) for split in ("train", "test"))
        if self.recipe is None:
            test, validation = separate(test, self.held_out)
        else:
            known, validation = separate(known, self.held_out)
        return (known if self.examples is None else known.first(self.examples)), validation, test

    def training(self, data: Dataset, validation: Dataset | None, *, until: int | None = None) -> Trained:
        """Return the training on ``data``, from the cache if possible."""
        assert self.recipe is not None
        return train(
            self.model,
            data,
            self.recipe,
            normalisation=self.normalisation,
            seed=self.seed,
            validation=validation,
            until=until,
        )

    def network(self) -> nn.Module:
        """Return the network trained on the training data, in eval mode."""
        if self.recipe is None:
            return pretrained(self.model)[0]
        data, validation, _ = self.parts()
        return self.training(data, validation).model()

    def batches(self, data: Dataset, batch_size: int = 250) -> Batches:
        """Return batches of inputs, with labels if present."""
        return Batches(data, self.normalisation, batch_size)

    def inputs(self, data: Dataset) -> Batches:
        """Return batches of inputs without labels."""
        return self.batches(replace(data, labels=None))


def sample(data: Dataset, count: int, seed: int = 0) -> Dataset:
    """Return ``count`` random examples in the original order; all if there are fewer."""
    if count >= len(data):
        return data
    selected = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:count].sort().values
    return data.take(selected, f"sample{count}s{seed}")
