"""Train the networks that the experiments share: ``python -m experiments.prepare_models --preset mnist``.

Every training is kept (in the folder of IFCOMP_CACHE) and resumed after a kill, so the command can be given again at
any time. Experiments get a network with ``trained(job)``, which trains only what is not there yet.
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

#: Examples of the training set that no network sees: for early stopping and for tuning.
HELD_OUT_EXAMPLES = 5000
#: Size of the noisy data: small enough for a LeNet to memorise.
NOISY_EXAMPLES = 20000
#: Base network, checkpoints of every epoch, then thirty samples for SWA and SWAG.
WITH_TAIL = replace(QUICK, epochs=10, tail_epochs=30, checkpoint_every=1)
#: From the first useful epoch to memorised wrong labels, the weights of every epoch.
MEMORISE = Recipe("one-cycle", 80, 0.05, weight_decay=0.0, checkpoint_every=1)
ENSEMBLE = 30


@dataclass(frozen=True)
class Job:
    """One training; its data is loaded only when it is needed.

    Attributes:
        model: Name in `experiments.models.MODELS`.
        data: Loads training and validation data.
        normalisation: Of the inputs.
        recipe: How it is trained.
        seed: Of the training.
    """

    model: str
    data: Callable[[], tuple[Dataset, Dataset]]
    normalisation: Normalisation
    recipe: Recipe
    seed: int = 0


def parts(name: str) -> tuple[Dataset, Dataset]:
    """Training and validation data out of a training set."""
    return separate(load(name, "train"), HELD_OUT_EXAMPLES)


def noisy_parts(name: str, kind: str, fraction: float) -> tuple[noise.NoisyData, Dataset]:
    """The first examples with wrong labels, and clean validation data.

    Args:
        name: Of the data set.
        kind: "symmetric", or "asymmetric": the next class.
        fraction: Of labels that are wrong.
    """
    data, validation = parts(name)
    data = data.first(NOISY_EXAMPLES)
    if kind == "symmetric":
        return noise.symmetric(data, fraction, seed=0), validation
    return noise.asymmetric(data, fraction, noise.next_class(len(data.class_names)), seed=0), validation


def trained(job: Job, *, until: int | None = None, progress: bool | None = None) -> Trained:
    """The network of a job, trained now unless it was before."""
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


#: Jobs by name, in the order in which they are trained.
PRESETS: Mapping[str, Mapping[str, Job]] = {
    "digits": {"digits": Job("lenet", _digits, MNIST, replace(QUICK, epochs=10, rate=0.02, batch_size=20))},
    "mnist": _mnist_jobs(),
}


def main(
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "mnist",
    only: Annotated[str | None, typer.Option(help="The name of a single job.")] = None,
) -> None:
    """Train all networks of a preset, or go on with them; one line for each that is done."""
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
