"""Raw member scores of the OOD detector on image networks, saved outside the repository.

For every set of images: logits, bounded complexity and penultimate features. Joins and their AUROC follow from these
files in seconds (`experiments.ood_defaults.joins`). A file that exists is kept, so the command can be interrupted.

    IFCOMP_DATA=... IFCOMP_CACHE=... python -m experiments.ood_defaults.members
"""

from pathlib import Path

import numpy as np
import torch

from experiments.baselines.features import split_classifier
from experiments.baselines.inference import run_data
from experiments.datasets import Batches, Dataset, load
from experiments.recipes import QUICK
from experiments.reproduce.subject import Subject, sample
from experiments.runs import cache_folder
from ifcomp import IFComp
from ifcomp.io.files import atomic_write
from ifcomp.tasks.ood import OOD_DAMPING

#: Networks that choose the members of the default score, then those that report it.
CHOICE = {
    "MNIST, LeNet": Subject("mnist", "lenet", QUICK, 5000),
    "CIFAR-10, ResNet-56": Subject("cifar10", "resnet56", None, 2000),
}
REPORT = {
    "CIFAR-10, ResNet-20": Subject("cifar10", "resnet20", None, 2000),
    "CIFAR-10, ResNet-18 of width 32": Subject("cifar10", "resnet18-width32", None, 2000),
}
#: OOD sets; the training data of a network is not one of its sets.
SETS = ("tinyimagenet", "mnist", "fashion-mnist", "kmnist", "notmnist")
#: Training images of the curvature and of the reference set, and images per set.
FIT_IMAGES, REFERENCE_IMAGES, IMAGES = 5000, 20000, 1000


def sets_of(subject: Subject) -> dict[str, Dataset]:
    """Return held-out images, test images and the images of every OOD set."""
    _, validation, test = subject.parts()
    inside = {"held out": sample(validation, IMAGES, 1), "in": sample(test, IMAGES, 1)}
    others = [name for name in SETS if name != subject.data]
    return inside | {name: subject.fitted_to(sample(load(name), IMAGES, 1)) for name in others}


def fitted(subject: Subject) -> tuple[IFComp, Batches]:
    """Return a predictor fitted at the default settings, and the inputs of the reference set."""
    known, _, _ = subject.parts()
    ifc = IFComp(subject.network()).fit(subject.inputs(sample(known, FIT_IMAGES, 1)), progress=False)
    return ifc, subject.inputs(sample(known, REFERENCE_IMAGES, 1))


def collect(name: str, subject: Subject) -> None:
    """Write the arrays of one network, one file per set of images."""
    folder = member_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    sets = sets_of(subject)
    missing = [key for key in ("reference", *sets) if not (folder / f"{key}.npz").exists()]
    if not missing:
        (folder / "complete").touch()
        return
    ifc, reference = fitted(subject)
    _, head = split_classifier(ifc.model, next(iter(reference)))
    for key in missing:
        batches = reference if key == "reference" else subject.inputs(sets[key])
        outputs = run_data(ifc.model, batches, labels=False, head=head, progress=False)
        assert outputs.features is not None
        arrays = {"features": outputs.features.numpy()}
        if key != "reference":
            bounded = torch.cat([ifc.bounded_complexity(x, damping=OOD_DAMPING) for (x,) in batches])
            arrays |= {"logits": outputs.logits.numpy(), "complexity": bounded.numpy()}
        with atomic_write(folder / f"{key}.npz") as scratch, scratch.open("wb") as file:
            np.savez(file, **arrays)
    (folder / "complete").touch()


def member_folder(name: str) -> Path:
    """Return the folder of the arrays of a network."""
    return cache_folder() / "ood_members" / name


def main() -> None:
    """Collect the missing arrays."""
    torch.set_num_threads(1)
    for name, subject in (CHOICE | REPORT).items():
        collect(name, subject)


if __name__ == "__main__":
    main()
