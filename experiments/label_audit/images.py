"""Image tasks of the study: training data with wrong labels, and networks at several stages of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from experiments import noise
from experiments.datasets import CIFAR10, FASHION, MNIST, Dataset, Normalisation, load
from experiments.noise import NoisyData
from experiments.recipes import Recipe
from experiments.runs import Trained
from experiments.training import train

#: Training and validation images of every task.
CIFAR_IMAGES, LENET_IMAGES, VALIDATION_IMAGES = 10_000, 6_000, 2_000
#: Weights of every epoch, from the first useful one to memorised labels.
CIFAR_RECIPE = Recipe("one-cycle", 30, 0.1, checkpoint_every=1, autocast=True)
AUGMENTED = replace(CIFAR_RECIPE, epochs=40, augment=True)
LENET_RECIPE = Recipe("one-cycle", 100, 0.05, weight_decay=0.0, checkpoint_every=1)
FOLDS = 5
#: Epochs of the schedule of a five-fold network on CIFAR-10.
CIFAR_FOLD_EPOCHS = 10
#: Epochs without a better validation accuracy after which a five-fold network stops.
FOLD_PATIENCE = 8


@dataclass(frozen=True)
class ImageTask:
    """Images with label noise, and the recipe of their network.

    Attributes:
        name: Unique name.
        model: Name in `experiments.models.MODELS`.
        source: Name of the data set.
        images: Number of training images.
        noise: Maps clean data and a seed to data with wrong labels.
        normalisation: Normalisation of the inputs.
        recipe: Training recipe.
        seeds: Seeds of noise, images and training.
        is_development: Whether settings were chosen on this task.
        folds_seeds: Number of seeds for which five-fold networks are trained.
    """

    name: str
    model: str
    source: str
    images: int
    noise: Callable[[Dataset, int], NoisyData]
    normalisation: Normalisation
    recipe: Recipe
    seeds: tuple[int, ...]
    is_development: bool
    folds_seeds: int = 0

    def data(self, seed: int) -> tuple[NoisyData, Dataset]:
        """Return the training data and validation data, both with label noise."""
        noisy = self.noise(load(self.source, "train"), seed)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(noisy.data)))
        chosen, held_out = order[: self.images], order[self.images : self.images + VALIDATION_IMAGES]
        training = noisy.data.take(chosen, f"{self.images}s{seed}")
        return NoisyData(training, noisy.wrong[chosen]), noisy.data.take(held_out, f"validation-s{seed}")

    def train(self, seed: int, progress: bool | None = None) -> Trained:
        """Train the network on all training images, or return it from the cache."""
        noisy, validation = self.data(seed)
        return self.fit(noisy.data, validation, self.recipe, seed, progress=progress)

    @property
    def fold_recipe(self) -> Recipe:
        """The recipe with early stopping; for CIFAR-10 with a schedule that ends before labels are memorised."""
        if self.source == "cifar10":
            return replace(self.recipe, epochs=CIFAR_FOLD_EPOCHS)
        return replace(self.recipe, patience=FOLD_PATIENCE)

    def train_fold(self, seed: int, fold: int, progress: bool | None = None) -> tuple[Trained, torch.Tensor]:
        """Train without one of five folds. Also return the indices of that fold."""
        noisy, validation = self.data(seed)
        folds = torch.arange(len(noisy.data)) % FOLDS
        rest = noisy.data.take((folds != fold).nonzero().flatten(), f"fold{fold}")
        trained = self.fit(rest, validation, self.fold_recipe, seed, progress=progress)
        return trained, (folds == fold).nonzero().flatten()

    def fit(
        self,
        data: Dataset,
        validation: Dataset,
        recipe: Recipe,
        seed: int,
        *,
        until: int | None = None,
        progress: bool | None = None,
    ) -> Trained:
        """Train to the end of the recipe, or until an epoch; ``until=0`` only reads the cache."""
        return train(
            self.model,
            data,
            recipe,
            normalisation=self.normalisation,
            seed=seed,
            validation=validation,
            until=until,
            progress=progress,
        )


def _symmetric(data: Dataset, seed: int, fraction: float) -> NoisyData:
    return noise.symmetric(data, fraction, seed=seed)


def _asymmetric(data: Dataset, seed: int, fraction: float, mapping: tuple[int, ...]) -> NoisyData:
    return noise.asymmetric(data, fraction, mapping, seed=seed)


def _human(data: Dataset, seed: int, kind: str) -> NoisyData:
    return noise.human(data, kind)


def _data_dependent(data: Dataset, seed: int) -> NoisyData:
    return noise.data_dependent(data)


def _cifar(
    name: str,
    kind: Callable[[Dataset, int], NoisyData],
    recipe: Recipe = CIFAR_RECIPE,
    folds: int = 0,
    is_development: bool = False,
) -> ImageTask:
    return ImageTask(
        f"cifar10-{name}",
        "resnet18-width32",
        "cifar10",
        CIFAR_IMAGES,
        kind,
        CIFAR10,
        recipe,
        (0,),
        is_development,
        folds,
    )


def _lenet(
    source: str, name: str, kind: Callable[[Dataset, int], NoisyData], normalisation: Normalisation
) -> ImageTask:
    return ImageTask(
        f"{source}-{name}",
        "lenet",
        source,
        LENET_IMAGES,
        kind,
        normalisation,
        LENET_RECIPE,
        (0, 1, 2),
        source == "fashion-mnist",
        3,
    )


_SYMMETRIC = partial(_symmetric, fraction=0.6)
_NEXT_CLASS = partial(_asymmetric, fraction=0.3, mapping=noise.next_class(10))
_CLEAN = partial(_symmetric, fraction=0.0)

#: All image tasks by name.
TASKS: Mapping[str, ImageTask] = {
    task.name: task
    for task in (
        _cifar("random1", partial(_human, kind="random1"), folds=1, is_development=True),
        _lenet("fashion-mnist", "symmetric", _SYMMETRIC, FASHION),
        _lenet("fashion-mnist", "asymmetric", _NEXT_CLASS, FASHION),
        _lenet("fashion-mnist", "clean", _CLEAN, FASHION),
        _lenet("mnist", "symmetric", _SYMMETRIC, MNIST),
        _lenet("mnist", "asymmetric", _NEXT_CLASS, MNIST),
        _cifar("worse", partial(_human, kind="worse")),
        _cifar("asymmetric", partial(_asymmetric, fraction=0.3, mapping=noise.CIFAR10_PAIRS), folds=1),
        _cifar("symmetric", _SYMMETRIC),
        _cifar("data-dependent", _data_dependent),
        _cifar("random1-augmented", partial(_human, kind="random1"), AUGMENTED),
    )
}
