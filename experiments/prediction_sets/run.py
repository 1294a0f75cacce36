"""Measure coverage and size of `IFComp.predict_set` over random splits of held-out data, beside the plain softmax.

IFCOMP_DATA=... python -m experiments.prediction_sets.run
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from experiments.datasets import FASHION, MNIST, Batches, Dataset, Normalisation, convert, load
from experiments.recipes import Recipe
from experiments.training import train
from ifcomp import IFComp
from ifcomp.io.files import atomic_write
from ifcomp.tasks.calibration_fit import split_halves
from ifcomp.tasks.prediction_sets import SetRule, label_scores

RESULTS = Path(__file__).parent / "results.json"
COVERAGES = (0.9, 0.95)
SPLITS = 20
#: Columns of the page, by key of a result.
COLUMNS = {
    "coverage": "coverage, %",
    "size": "labels per set",
    "softmax_coverage": "coverage of the softmax, %",
    "softmax_size": "labels per set of the softmax",
}


@dataclass(frozen=True)
class Situation:
    """A network and the sizes of its data.

    Attributes:
        data: Name of the data set.
        normalisation: Normalisation of its images.
        training: Number of training images.
        epochs: Number of epochs; many of them make predictions overconfident.
        held_out: Number of test images for `IFComp.calibrate`.
        new: Number of other test images, on which sets are measured.
    """

    data: str
    normalisation: Normalisation
    training: int
    epochs: int
    held_out: int
    new: int

    @property
    def name(self) -> str:
        """Description in the table."""
        return f"{self.data}, {self.training:,} training images, {self.epochs} epochs"

    def load(self, split: str) -> Dataset:
        """Load images of 28x28 pixels."""
        data = load(self.data, split)
        return data if data.images.shape[1] == 28 else convert(data, 28, 1)


SITUATIONS = (
    Situation("digits", MNIST, 300, 40, 300, 200),
    Situation("fashion-mnist", FASHION, 20_000, 10, 2_000, 2_000),
    Situation("fashion-mnist", FASHION, 5_000, 60, 2_000, 2_000),
)


def measure(situation: Situation, splits: int, coverages: Sequence[float]) -> dict[str, dict[str, float]]:
    """Return means over random splits by coverage, and the accuracy on the test images."""
    data = situation.load("train").first(situation.training)
    recipe = Recipe("one-cycle", situation.epochs, 0.05)
    trained = train("lenet", data, recipe, normalisation=situation.normalisation, seed=0, progress=False)
    model = trained.model()
    ifc = IFComp(model).fit(Batches(data, situation.normalisation), progress=False)
    test = situation.load("test")
    assert test.labels is not None
    images, labels = situation.normalisation(test.images), test.labels
    rows = [_split(ifc, images, labels, situation, seed, coverages) for seed in range(splits)]
    result = {str(level): _means([row[level] for row in rows]) for level in coverages}
    probability = _softmax(model, images)
    return {"accuracy": {"test": float((probability.argmax(1) == labels.numpy()).mean())}, **result}


def _split(
    ifc: IFComp, images: Tensor, labels: Tensor, situation: Situation, seed: int, coverages: Sequence[float]
) -> dict[float, dict[str, float]]:
    """Return coverage and mean size of sets for one random split of the test images."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    known, new = order[: situation.held_out], order[situation.held_out :][: situation.new]
    ifc.calibrate([(images[known], labels[known])], progress=False)
    conformal = known[split_halves(len(known), ifc.settings.seed)[1]]
    scores = label_scores(_softmax(ifc.model, images[conformal]), 0.0, 1)[np.arange(len(conformal)), labels[conformal]]
    softmax = SetRule(np.sort(scores), 0.0, 1)
    found: dict[float, dict[str, float]] = {}
    for level in coverages:
        ours, plain = ifc.predict_set(images[new], level).numpy(), softmax.sets(_softmax(ifc.model, images[new]), level)
        covered, size = _measures(ours, labels[new])
        softmax_covered, softmax_size = _measures(plain, labels[new])
        values = (covered, size, softmax_covered, softmax_size)
        found[level] = dict(zip(COLUMNS, values, strict=True))
    return found


def _measures(sets: np.ndarray, labels: Tensor) -> tuple[float, float]:
    return float(sets[np.arange(len(sets)), labels.numpy()].mean()), float(sets.sum(1).mean())


def _softmax(model: nn.Module, images: Tensor) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model(images).double().softmax(1).numpy())


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every measure, and the standard deviation of the coverage over splits."""
    means = {name: float(np.mean([row[name] for row in rows])) for name in COLUMNS}
    return {**means, "coverage_deviation": float(np.std([row["coverage"] for row in rows], ddof=1))}


def table(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return the table of the documentation."""
    lines = [f"| LeNet on | accuracy, % | nominal coverage, % | {' | '.join(COLUMNS.values())} |", f"|{'---|' * 7}"]
    for name, result in results.items():
        for level in (key for key in result if key != "accuracy"):
            row = result[level]
            lines.append(
                f"| {name} | {100 * result['accuracy']['test']:.1f} | {100 * float(level):g} "
                f"| {100 * row['coverage']:.1f} ± {100 * row['coverage_deviation']:.1f} | {row['size']:.2f} "
                f"| {100 * row['softmax_coverage']:.1f} | {row['softmax_size']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure all situations, write the results and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=SPLITS)
    splits = parser.parse_args().splits
    torch.set_num_threads(1)
    results = {situation.name: measure(situation, splits, COVERAGES) for situation in SITUATIONS}
    with atomic_write(RESULTS) as scratch:
        scratch.write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(f"{table(results)}\n")


if __name__ == "__main__":
    main()
