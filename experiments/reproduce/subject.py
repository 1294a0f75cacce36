"""The network that a study is about, and its data: trained by a recipe, or with published weights."""

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
        recipe: How it is trained; None takes published weights.
        held_out: Examples for validation: of the training set, or, since published weights have seen all of that, of
            the test set.
        examples: Train on the first so many only; None takes all.
        seed: Of the training.
    """

    data: str
    model: str
    recipe: Recipe | None
    held_out: int
    examples: int | None = None
    seed: int = 0

    @property
    def normalisation(self) -> Normalisation:
        """Of the inputs."""
        return _NORMALISATIONS[self.data] if self.recipe else PRETRAINED[self.model][1]

    @property
    def fisher(self) -> FisherKind:
        """How labels of the curvature are chosen: all of them, or, where a network is too slow for that, the paper's
        one sample a pass.
        """
        return "exact" if self.model.startswith("lenet") else "sampled"

    def fitted_to(self, data: Dataset) -> Dataset:
        """Images in the size and colour that the network takes."""
        size, channels = (28, 1) if self.model.startswith("lenet") else (32, 3)
        is_ready = data.images.shape[1:] == ((size, size) if channels == 1 else (size, size, channels))
        return data if is_ready else convert(data, size, channels)

    def parts(self) -> tuple[Dataset, Dataset, Dataset]:
        """Training, validation and test data."""
        known, test = (self.fitted_to(load(self.data, split)) for split in ("train", "test"))
        if self.recipe is None:
            test, validation = separate(test, self.held_out)
        else:
            known, validation = separate(known, self.held_out)
        return (known if self.examples is None else known.first(self.examples)), validation, test

    def training(self, data: Dataset, validation: Dataset | None, *, until: int | None = None) -> Trained:
        """The network trained on ``data``, now or before."""
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
        """Trained on the training data, in eval mode."""
        if self.recipe is None:
            return pretrained(self.model)[0]
        data, validation, _ = self.parts()
        return self.training(data, validation).model()

    def batches(self, data: Dataset, batch_size: int = 250) -> Batches:
        """Inputs of the network; labels where there are any."""
        return Batches(data, self.normalisation, batch_size)

    def inputs(self, data: Dataset) -> Batches:
        """Inputs of the network alone."""
        return self.batches(replace(data, labels=None))


def sample(data: Dataset, count: int, seed: int = 0) -> Dataset:
    """``count`` examples at random, in the original order; all if there are no more."""
    if count >= len(data):
        return data
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:count].sort().values
    return data.take(chosen, f"sample{count}s{seed}")
