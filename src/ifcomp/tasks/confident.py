"""Confident learning: suspects and noise rate from out-of-sample probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ConfidentLearning:
    """Result of confident learning.

    Attributes:
        is_suspect: Labels that are confidently another class, [n].
        noise_rate: Estimated share of wrong labels.
    """

    is_suspect: np.ndarray
    noise_rate: float


def confident_learning(probabilities: np.ndarray, labels: np.ndarray) -> ConfidentLearning:
    """Compare every probability with the mean probability of its class.

    The threshold of a class is the mean probability of the class over the examples with this label. The confident class
    of an example is the most probable one among those at or above their threshold. A label is a suspect if its
    confident class and its most probable class are other classes. The noise rate is the share of suspects among the
    examples with a confident class, per given class, averaged over the examples.

    Args:
        probabilities: Out-of-sample probabilities [n, K].
        labels: Given labels [n].
    """
    classes = probabilities.shape[1]
    sizes = np.bincount(labels, minlength=classes)
    given = np.take_along_axis(probabilities, labels[:, None], 1)[:, 0]
    sums = np.bincount(labels, given, classes)
    thresholds = np.divide(sums, sizes, out=np.full(classes, np.inf), where=sizes > 0)
    is_confident = probabilities >= thresholds
    confident = np.where(is_confident, probabilities, -1.0).argmax(1)
    counted = is_confident.any(1)
    is_other = counted & (confident != labels)
    totals = np.bincount(labels, counted, classes)
    shares = np.divide(np.bincount(labels, is_other, classes), totals, out=np.zeros(classes), where=totals > 0)
    is_suspect = is_other & (probabilities.argmax(1) != labels)
    return ConfidentLearning(is_suspect, float((shares * sizes).sum() / sizes.sum()))
