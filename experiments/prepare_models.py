"""Train the networks that the experiments share: ``python -m experiments.prepare_models --preset mnist``.

Trainings are cached in the folder IFCOMP_CACHE and resume after an interruption. Experiments get a network with
``trained(job)``, which trains it if it is not cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
import typer

from experiments import noise
from experiments.datasets import FASHION, MNIST, Dataset, Normalisation, convert, load, separate
from experiments.recipes import QUICK, Recipe
from experiments.runs import Trained
from experiments.training import train
from ifcomp.errors import SettingError

#: Number of training examples held out for early stopping and tuning.
HELD_OUT_EXAMPLES = 5000
#: Number of examples with label noise, few enough for a LeNet to memorise.
NOISY_EXAMPLES = 20000
#: Base network with the weights of every epoch, then thirty samples for SWA and SWAG.
WITH_TAIL = replace(QUICK, epochs=10, tail_epochs=30, checkpoint_every=1)
#: Weights of every epoch, from the first useful one to memorised wrong labels.
MEMORISE = Recipe("one-cycle", 80, 0.05, weight_decay=0.0, checkpoint_every=1)
ENSEMBLE = 30


@dataclass(frozen=True)
class Job:
    """One training. Its data is loaded on demand.

    Attributes:
        model: Name in `experiments.models.MODELS`.
        data: Function that loads training and validation data.
        normalisation: Normalisation of the inputs.
        recipe: Training recipe.
        seed: Seed of the training.
    """

    model: str
    data: Callable[[], tuple[Dataset, Dataset]]
    normalisation: Normalisation
    recipe: Recipe
    seed: int = 0


def parts(name: str) -> tuple[Dataset, Dataset]:
    """Split a training set into training and validation data."""
    return separate(load(name, "train"), HELD_OUT_EXAMPLES)


def noisy_parts(name: str, kind: str, fraction: float) -> tuple[noise.NoisyData, Dataset]:
    """Return the first training examples with label noise, and clean validation data.

    Args:
        name: Name of the data set.
        kind: "symmetric", or "asymmetric" (the next class).
        fraction: Fraction of wrong labels.
    """
    data, validation = parts(name)
    data = data.first(NOISY_EXAMPLES)
    if kind == "symmetric":
        return noise.symmetric(data, fraction, seed=0), validation
    return noise.asymmetric(data, fraction, noise.next_class(len(data.class_names)), seed=0), validation


def trained(job: Job, *, until: int | None = None, progress: bool | None = None) -> Trained:
    """Return the training of a job, from the cache if possible."""
    data, validation = job.data()
    return train(
        job.model,
        data,
        job.recipe,
        normalisation=job.normalisation,
        seed=job.seed,
        validation=validation,
        until=until,
        progress=progress,
    )


def _noisy(name: str, kind: str, fraction: float) -> tuple[Dataset, Dataset]:
    noisy, validation = noisy_parts(name, kind, fraction)
    return noisy.data, validation


def _digits() -> tuple[Dataset, Dataset]:
    return separate(convert(load("digits", "train"), 28, 1), 200)


def _mnist_jobs() -> dict[str, Job]:
    fashion = partial(parts, "fashion-mnist")
    symmetric, asymmetric = (
        partial(_noisy, "fashion-mnist", kind, fraction) for kind, fraction in (("symmetric", 0.6), ("asymmetric", 0.3))
    )
    jobs = {
        "mnist": Job("lenet", partial(parts, "mnist"), MNIST, QUICK),
        "fashion": Job("lenet", fashion, FASHION, WITH_TAIL),
        "fashion-dropout": Job("lenet-dropout", fashion, FASHION, replace(QUICK, epochs=12)),
        "fashion-symmetric": Job("lenet", symmetric, FASHION, MEMORISE),
        "fashion-asymmetric": Job("lenet", asymmetric, FASHION, MEMORISE),
    }
    members = range(1, ENSEMBLE + 1)
    return jobs | {f"fashion-{seed}": Job("lenet", fashion, FASHION, QUICK, seed) for seed in members}


#: Jobs of each preset by name, in training order.
PRESETS: Mapping[str, Mapping[str, Job]] = {
    "digits": {"digits": Job("lenet", _digits, MNIST, replace(QUICK, epochs=10, rate=0.02, batch_size=20))},
    "mnist": _mnist_jobs(),
}


def main(
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "mnist",
    only: Annotated[str | None, typer.Option(help="The name of a single job.")] = None,
) -> None:
    """Train all networks of a preset, or resume them, and print one line per network."""
    if preset not in PRESETS:
        raise SettingError(f"There is no preset '{preset}'. Choose one of {', '.join(PRESETS)}.")
    jobs = PRESETS[preset]
    if only is not None and only not in jobs:
        raise SettingError(f"'{preset}' has no job '{only}'. Choose one of {', '.join(jobs)}.")
    torch.set_num_threads(1)
    for name in jobs if only is None else [only]:
        result = trained(jobs[name])
        accuracy = result.epochs[-1].validation_accuracy
        typer.echo(f"{name}: validation accuracy {accuracy:.4f}, {len(result.epochs)} epochs, {result.folder}")


if __name__ == "__main__":
    typer.run(main)
