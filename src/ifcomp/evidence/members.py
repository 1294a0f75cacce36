"""Evidence about labels: the distributions that the predictors of all layers return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: Name of the layer and of the predictor of the model's softmax.
MODEL = "model"


@dataclass(frozen=True)
class Member:
    """One member of the pool: a predictor of labels, evaluated on all examples.

    Attributes:
        layer: Name of the layer; "model" for the softmax.
        predictor: "votes", "readout" or "model".
        probabilities: Predicted distributions [n, K].
        is_trained: Whether the features depend on the weights of the model. Raw input and token counts do not, so
            they cannot have memorised a label.
    """

    layer: str
    predictor: str
    probabilities: np.ndarray
    is_trained: bool = True


@dataclass(frozen=True)
class Evidence:
    """Predictions of all members about the labels of a data set.

    Attributes:
        labels: Given labels [n].
        members: Members in the order of the layers; the last is the model's softmax.
        neighbours: Positions of the k nearest reference examples by layer, nearest first, [n, k].
        reference_labels: Labels of the reference examples.
        is_left_out: Whether the reference is the data itself. Every example is then left out of its prediction.
    """

    labels: np.ndarray
    members: Sequence[Member]
    neighbours: Mapping[str, np.ndarray]
    reference_labels: np.ndarray
    is_left_out: bool
