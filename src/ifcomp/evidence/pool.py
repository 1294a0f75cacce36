"""The pool: a weighted mixture of the predictors of all layers and the model's softmax.

A member that has memorised the labels agrees with a given label where the other members contradict it. An uninformative
member does not agree where the others support the label. The weight of a member is ``s (1 - r)^4``, times a prior that
keeps many similar layers from outvoting the input. The support s is the share of labels that the member predicts among
those that the pool of the other members supports. The echo r is the share among those that the others contradict. Both
shares weigh a label by the margin of the others, ``|p(given) - p(most probable other label)|``, so that hesitant
mistakes of weak members count little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ifcomp.evidence.members import Member
from ifcomp.evidence.seeds import seeded_sample

#: Exponent of ``1 - r``.
_POWER = 4

#: Largest number of iterations; each moves the weights half of the way. They stop at a smaller change of all weights.
_STEPS, _SMALLEST_CHANGE = 40, 1e-6

#: Weights come from at most this number of examples.
_SAMPLE = 20_000

#: Largest number of probabilities from which weights are computed.
_SAMPLE_ELEMENTS = 2**26

#: Margins in favour of an echo of 0, as a share of the number of examples. On clean data there are few contradictions,
#: and an accurate member rightly agrees with these labels.
_PRIOR_CONTRADICTION = 0.03

#: Largest total weight of trained features, relative to that of untrained ones. A network has many similar layers, but
#: only one input.
_TRAINED_SHARE = 3.0

#: Weight of trained features at the start.
_TRAINED_START = 1e-3


@dataclass(frozen=True)
class PoolWeights:
    """Weights of the members.

    Attributes:
        weight: Weight of every member, the largest is 1, [M].
        support: Smoothed share s of every member, [M].
        echo: Smoothed share r of every member, [M].
    """

    weight: np.ndarray
    support: np.ndarray
    echo: np.ndarray


def pool_weights(members: Sequence[Member], labels: np.ndarray, *, seed: int = 0) -> PoolWeights:
    """Iterate the weights from those of `starting_weights`.

    Args:
        members: Members in the order of the layers.
        labels: Given labels [n].
        seed: Seed of the sample of examples that the weights come from.
    """
    limit = min(_SAMPLE, _SAMPLE_ELEMENTS // (len(members) * members[0].probabilities.shape[1]))
    rows = seeded_sample(len(labels), max(limit, 1000), seed).numpy()
    sampled = [np.asarray(member.probabilities[rows], dtype=np.float32) for member in members]
    given = labels[rows]
    agrees = np.stack([_margins(member, given) >= 0 for member in sampled])
    prior = member_priors(members)
    weight = starting_weights(members)
    for _ in range(_STEPS):
        support, echo = _rates(sampled, agrees, given, weight)
        new = prior * support * (1 - echo) ** _POWER
        previous, weight = weight, (weight + new / new.max()) / 2
        weight /= weight.max()
        if np.abs(weight - previous).max() < _SMALLEST_CHANGE:
            break
    support, echo = _rates(sampled, agrees, given, weight)
    return PoolWeights(weight, support, echo)


def starting_weights(members: Sequence[Member]) -> np.ndarray:
    """Weights from which the iteration starts, [M].

    Layers that have memorised the labels agree with each other and may be the majority. Untrained features cannot have
    memorised a label, so they judge the others first. Without any, the weights decrease with depth, because late layers
    memorise first.
    """
    is_trained = np.array([member.is_trained for member in members])
    if is_trained.all():
        return np.linspace(1, 1 / len(members), len(members))
    return np.where(is_trained, _TRAINED_START, 1.0)


def member_priors(members: Sequence[Member]) -> np.ndarray:
    """Factors of the weights [M]: 1 for untrained features, at most 1 for trained ones.

    All trained members together have at most `_TRAINED_SHARE` times the prior weight of the untrained ones.
    """
    is_trained = np.array([member.is_trained for member in members])
    untrained = (~is_trained).sum()
    if not untrained:
        return np.ones(len(members))
    return np.where(is_trained, min(1.0, _TRAINED_SHARE * untrained / is_trained.sum()), 1.0)


def _rates(
    members: Sequence[np.ndarray], agrees: np.ndarray, labels: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Support s and echo r of every member. Without examples to judge by, s is 1 and r is 0."""
    total = sum(value * member for value, member in zip(weight, members, strict=True))
    support, echo = np.empty(len(members)), np.empty(len(members))
    for index, member in enumerate(members):
        others = max(weight.sum() - weight[index], np.finfo(np.float64).tiny)
        margin = _margins(total - weight[index] * member, labels) / others
        supported, contradicted = np.maximum(margin, 0), np.maximum(-margin, 0)
        support[index] = (supported[agrees[index]].sum() + 1) / (supported.sum() + 1)
        echo[index] = contradicted[agrees[index]].sum() / (contradicted.sum() + _PRIOR_CONTRADICTION * len(labels))
    return support, echo


def _margins(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Probability of the given label minus the largest other probability, [n]."""
    others = probabilities.copy()
    np.put_along_axis(others, labels[:, None], -np.inf, 1)
    given = np.take_along_axis(probabilities, labels[:, None], 1)[:, 0]
    result: np.ndarray = (given - others.max(1)).astype(np.float64)
    return result


def mix(members: Sequence[np.ndarray], weight: np.ndarray) -> np.ndarray:
    """The weighted mean of the distributions of all members, [n, K] in float64."""
    result = np.zeros(members[0].shape)
    for value, member in zip(weight / weight.sum(), members, strict=True):
        result += value * member
    return result
