"""The pool: a weighted mixture of the predictors of all layers and the model's softmax.

A member that has memorised the labels agrees with a given label where the other members contradict it. An uninformative
member does not agree where the others support the label. The weight of a member is ``s (1 - r)^4``: s is the share of
labels that the member predicts among those that the pool of the other members predicts, and r the share among the
other labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ifcomp.evidence.seeds import seeded_sample

#: Exponent of ``1 - r``.
_POWER = 4

#: Number of iterations; each moves the weights half of the way.
_STEPS = 30

#: Weights come from at most this number of examples.
_SAMPLE = 20_000

#: Largest number of probabilities from which weights are computed.
_SAMPLE_ELEMENTS = 2**27

#: A pool whose largest weight is smaller has no member to rely on.
_VANISHING = 1e-6


@dataclass(frozen=True)
class PoolWeights:
    """Weights of the members.

    Attributes:
        weight: Weight of every member, the largest is 1, [M].
        support: Smoothed share s of every member, [M].
        echo: Smoothed share r of every member, [M].
        is_degenerate: Whether all weights vanished, so that equal weights are used.
    """

    weight: np.ndarray
    support: np.ndarray
    echo: np.ndarray
    is_degenerate: bool


def pool_weights(members: Sequence[np.ndarray], labels: np.ndarray, *, seed: int = 0) -> PoolWeights:
    """Iterate the weights from equal weights.

    Args:
        members: Distributions [n, K] of every member.
        labels: Given labels [n].
        seed: Seed of the sample of examples that the weights come from.
    """
    limit = min(_SAMPLE, _SAMPLE_ELEMENTS // (len(members) * members[0].shape[1]))
    rows = seeded_sample(len(labels), max(limit, 1000), seed).numpy()
    sampled = [np.asarray(member[rows], dtype=np.float32) for member in members]
    given = labels[rows]
    agrees = np.stack([_predicts(member, given) for member in sampled])
    weight = np.ones(len(members))
    for _ in range(_STEPS):
        support, echo = _rates(sampled, agrees, given, weight)
        new = support * (1 - echo) ** _POWER
        if new.max() < _VANISHING:
            return PoolWeights(np.ones(len(members)), support, echo, True)
        weight = (weight + new / new.max()) / 2
        weight /= weight.max()
    support, echo = _rates(sampled, agrees, given, weight)
    return PoolWeights(weight, support, echo, False)


def _rates(
    members: Sequence[np.ndarray], agrees: np.ndarray, labels: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Shares s and r of every member. Without examples to judge by, s is 1 and r is 0."""
    total = sum(value * member for value, member in zip(weight, members, strict=True))
    support, echo = np.empty(len(members)), np.empty(len(members))
    for index, member in enumerate(members):
        supported = _predicts(total - weight[index] * member, labels)
        support[index] = (agrees[index][supported].sum() + 1) / (supported.sum() + 1)
        echo[index] = agrees[index][~supported].sum() / ((~supported).sum() + 1)
    return support, echo


def _predicts(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Whether the given label is the most probable one, [n]. Ties count."""
    given = np.take_along_axis(probabilities, labels[:, None], 1)[:, 0]
    result: np.ndarray = given >= probabilities.max(1)
    return result


def mix(members: Sequence[np.ndarray], weight: np.ndarray) -> np.ndarray:
    """The weighted mean of the distributions of all members, [n, K] in float64."""
    result = np.zeros(members[0].shape)
    for value, member in zip(weight / weight.sum(), members, strict=True):
        result += value * member
    return result
