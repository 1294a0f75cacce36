"""`Evidence`: the distributions over labels that the layers of a model predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: Layer and predictor of the member that is the model's softmax.
MODEL = "model"


@dataclass(frozen=True)
class Member:
    """A predictor of labels.

    Attributes:
        layer: Name of the layer; "model" for the softmax.
        predictor: "votes", "readout" or "model".
        probabilities: [n, K].
        is_trained: Whether the features depend on the weights of the model. Those of the raw input and of counted
            tokens do not, so that they cannot have memorised a label.
    """

    layer: str
    predictor: str
    probabilities: np.ndarray
    is_trained: bool = True


@dataclass(frozen=True)
class Evidence:
    """Distributions over labels from every layer.

    Attributes:
        labels: Given labels [n].
        members: Predictors in the order of the layers; the last is the model's softmax.
        neighbours: Positions of the nearest reference examples by layer, nearest first, [n, a few].
        reference_labels: Labels of the reference examples.
        is_left_out: Whether the data is its own reference, so that every example is left out of its prediction.
    """

    labels: np.ndarray
    members: Sequence[Member]
    neighbours: Mapping[str, np.ndarray]
    reference_labels: np.ndarray
    is_left_out: bool
