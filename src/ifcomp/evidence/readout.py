"""Readouts: ridge regressions of the label on the features of a layer, with closed-form leave-one-out predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ifcomp.evidence.seeds import seeded_sample

#: Number of rows of one block of matrix products.
BLOCK_ROWS = 8192

#: Grid of ridges, as multiples of the number of examples. It is extended if its edge is the best.
_RIDGES = tuple(10.0**power for power in range(-5, 1))

#: Grid of scales of the softmax over predictions. It is extended if its edge is the best.
_SCALES = tuple(2.0**power for power in range(-1, 6))

#: Largest number of steps beyond the edge of a grid.
_MAX_EXTENSION = 4

#: Ridge and scale are chosen on a sample with at most this number of predictions, but at least this number of examples.
_CHOICE_ELEMENTS, _MIN_CHOICE = 200_000, 2_000

#: Smallest ``1 - h`` of leave-one-out predictions, as a multiple of the rounding error of the features.
_MIN_COMPLEMENT = 1000.0

#: Largest share of examples with a leverage of 1 up to rounding. Smaller ridges are not chosen.
_MAX_INTERPOLATED = 0.05


@dataclass(frozen=True)
class Spectrum:
    """Mean and principal directions of the features of a layer.

    Attributes:
        count: Number of examples n.
        mean: Mean of the features, [d] in float64.
        values: Eigenvalues of ``X^T X`` of the centred features X, [d], largest first.
        vectors: Eigenvectors, [d, d].
        rounding: Relative rounding error of the features.
    """

    count: int
    mean: Tensor
    values: Tensor
    vectors: Tensor
    rounding: float

    def rotate(self, features: np.ndarray) -> None:
        """Replace features [n, d] by the centred features in the eigenbasis, in place."""
        for part, rows in blocks(features):
            features[part] = ((rows - self.mean) @ self.vectors).numpy()


def blocks(features: np.ndarray) -> Iterator[tuple[slice, Tensor]]:
    """Iterate over features [n, d] in blocks of rows, as tensors in float64."""
    for start in range(0, len(features), BLOCK_ROWS):
        part = slice(start, min(start + BLOCK_ROWS, len(features)))
        yield part, torch.from_numpy(np.asarray(features[part])).double()


def find_spectrum(features: np.ndarray) -> Spectrum:
    """Decompose the covariance of features [n, d] in float64. Cost: n d^2 + d^3."""
    size = features.shape[1]
    total, gram = torch.zeros(size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    for _, rows in blocks(features):
        total += rows.sum(0)
    mean = total / len(features)
    for _, rows in blocks(features):
        gram.addmm_((rows - mean).T, rows - mean)
    values, vectors = torch.linalg.eigh(gram)
    rounding = float(np.finfo(features.dtype).eps)
    return Spectrum(len(features), mean, values.flip(0).clamp(min=0), vectors.flip(1), rounding)


@dataclass(frozen=True)
class Readout:
    """A fitted ridge regression of the centred one-hot label, and a softmax over its predictions.

    Attributes:
        spectrum: Spectrum of the features that the regression was fitted on.
        frequencies: Class frequencies, [K]: the intercept.
        moments: ``V^T X^T Y`` of centred features and labels in the eigenbasis, [d, K].
        ridge: Ridge penalty.
        scale: Scale of the softmax.
    """

    spectrum: Spectrum
    frequencies: Tensor
    moments: Tensor
    ridge: float
    scale: float

    def probabilities(self, rotated: np.ndarray, labels: Tensor | None = None) -> np.ndarray:
        """Return the predicted distributions [n, K] in float64.

        Args:
            rotated: Rotated features [n, d].
            labels: Labels [n] if these are the examples that the regression was fitted on. Each is then left out of
                its prediction. None for other examples.
        """
        result = np.empty((len(rotated), len(self.frequencies)))
        for part, rows in blocks(rotated):
            predictions = self.predictions(rows, None if labels is None else labels[part])
            result[part] = torch.softmax(self.scale * predictions, 1).numpy()
        return result

    def predictions(self, rotated: Tensor, labels: Tensor | None) -> Tensor:
        """Return the predictions [B, K] of rotated features [B, d], leave-one-out if labels are given.

        The leave-one-out prediction of example i is ``y - (y - f) / (1 - h)`` with the leverage h. If h is 1 up to
        rounding, it is the class frequencies of the other examples. Otherwise outliers and regressions that interpolate
        the labels would repeat them.
        """
        inverse = 1 / (self.spectrum.values + self.ridge)
        fitted = self.frequencies + rotated @ (inverse.unsqueeze(1) * self.moments)
        if labels is None:
            return fitted
        target = torch.nn.functional.one_hot(labels, len(self.frequencies)).double()
        count, complement = self.spectrum.count, 1 - self.leverages(rotated).unsqueeze(1)
        others = (count * self.frequencies - target) / max(count - 1, 1)
        return torch.where(self.interpolates(rotated), others, target - (target - fitted) / complement)

    def leverages(self, rotated: Tensor) -> Tensor:
        """Return the leverages ``h = 1/n + sum_j z_ij^2 / (s_j + ridge)`` of rotated features [B, d], [B]."""
        return 1 / self.spectrum.count + rotated.square() @ (1 / (self.spectrum.values + self.ridge))

    def interpolates(self, rotated: Tensor) -> Tensor:
        """Return whether leverages are 1 up to rounding, [B, 1]."""
        return (1 - self.leverages(rotated) <= _MIN_COMPLEMENT * self.spectrum.rounding).unsqueeze(1)


def fit_readout(rotated: np.ndarray, labels: Tensor, num_classes: int, spectrum: Spectrum, *, seed: int = 0) -> Readout:
    """Fit a readout. The ridge is chosen by leave-one-out error, the scale by leave-one-out likelihood.

    Args:
        rotated: Features [n, d], rotated by the spectrum.
        labels: Labels [n].
        num_classes: Number of classes K.
        spectrum: Spectrum of the features.
        seed: Seed of the sample on which ridge and scale are chosen if n K is large.
    """
    frequencies = torch.bincount(labels, minlength=num_classes).double() / len(labels)
    moments = torch.zeros(rotated.shape[1], num_classes, dtype=torch.float64)
    for part, rows in blocks(rotated):
        moments += rows.T @ (torch.nn.functional.one_hot(labels[part], num_classes).double() - frequencies)
    chosen = seeded_sample(len(labels), max(_MIN_CHOICE, _CHOICE_ELEMENTS // num_classes), seed)
    sample, given = torch.from_numpy(rotated[chosen.numpy()]).double(), labels[chosen]
    target = torch.nn.functional.one_hot(given, num_classes).double()

    def readout(ridge: float) -> Readout:
        return Readout(spectrum, frequencies, moments, ridge, 1.0)

    def error(multiple: float) -> float:
        candidate = readout(multiple * len(labels))
        if candidate.interpolates(sample).double().mean() > _MAX_INTERPOLATED:
            return math.inf
        return float((candidate.predictions(sample, given) - target).square().mean())

    ridge = minimise_on_grid(error, _RIDGES) * len(labels)
    found = readout(ridge).predictions(sample, given)

    def codelength(scale: float) -> float:
        return float(torch.nn.functional.cross_entropy(scale * found, given))

    return Readout(spectrum, frequencies, moments, ridge, minimise_on_grid(codelength, _SCALES))


def minimise_on_grid(function: Callable[[float], float], grid: tuple[float, ...]) -> float:
    """Return the best point of a geometric grid, the largest of equally good ones.

    If the best point is at an edge, the grid grows there, by at most `_MAX_EXTENSION` points.
    """

    def cost(point: float) -> tuple[float, float]:
        return values[point], -point

    factor = grid[1] / grid[0]
    values = {point: function(point) for point in grid}
    for _ in range(_MAX_EXTENSION):
        best = min(values, key=cost)
        if best == min(values):
            new = best / factor
        elif best == max(values):
            new = best * factor
        else:
            break
        values[new] = function(new)
    return min(values, key=cost)
