"""The pool: a weighted mixture of the predictors of all layers and the model's softmax.

A member that has memorised the labels agrees with given labels that the other members contradict. An uninformative
member disagrees with labels that the others support. The weight of a member is ``s (1 - r)^4`` times a prior:

- The support s is the share of labels that the member predicts, among those that the pool of the others supports.
- The echo r is the same share among the labels that the pool of the others contradicts.
- The prior limits the total weight of trained features, so that many similar layers do not outvote the input.

In both shares a label counts by the margin of the others, ``|p(given) - p(most probable other label)|``, so that
uncertain predictions count little. Members are compared after division by the class frequencies of the labels that they
were fitted on, so that predictions of frequent classes without further evidence count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ifcomp.evidence.members import Member
from ifcomp.evidence.seeds import seeded_sample

#: Exponent of ``1 - r``.
_POWER = 4

#: Largest number of iterations, and change of the weights below which they stop. Each goes half of the way.
_STEPS, _SMALLEST_CHANGE = 300, 1e-6

#: Largest number of examples from which weights are computed.
_SAMPLE = 20_000

#: Largest number of probabilities from which weights are computed; 1,000 examples are always used.
_SAMPLE_ELEMENTS = 2**26

#: Number of rows of one block of distributions.
_BLOCK_ROWS = 128

#: Prior margin in favour of an echo of 0, as a multiple of the number of examples. On clean data the others contradict
#: few labels, and an accurate member is right to agree with them.
_PRIOR_CONTRADICTION = 0.03

#: Largest total prior of members with trained features, relative to that of the others. A network has many similar
#: layers, but only one input.
_TRAINED_SHARE = 3.0

#: Starting weight of members with trained features; the others start at 1.
_TRAINED_START = 1e-3


@dataclass(frozen=True)
class PoolWeights:
    """Weights of the members, and the shares from which they follow.

    Attributes:
        weight: Weight of every member, [M]; the largest is 1.
        support: Smoothed share s of every member, [M].
        echo: Smoothed share r of every member, [M].
    """

    weight: np.ndarray
    support: np.ndarray
    echo: np.ndarray


def pool_weights(
    members: Sequence[Member], labels: np.ndarray, reference_labels: np.ndarray | None = None, *, seed: int = 0
) -> PoolWeights:
    """Compute the weights by iteration from `starting_weights`.

    Args:
        members: Members in the order of the layers.
        labels: Given labels [n].
        reference_labels: Labels that the members were fitted on. None if these are the given labels.
        seed: Seed of the sample of examples that the weights come from.
    """
    limit = min(_SAMPLE, _SAMPLE_ELEMENTS // (len(members) * members[0].probabilities.shape[1]))
    rows = seeded_sample(len(labels), max(limit, 1000), seed).numpy()
    given = labels[rows]
    fitted = given if reference_labels is None else reference_labels
    frequencies = np.bincount(fitted, minlength=members[0].probabilities.shape[1]) / len(fitted)
    lifts = [_lift(member.probabilities[rows], frequencies) for member in members]
    agrees = np.stack([_margins(lift.astype(np.float64), given) > 0 for lift in lifts])
    prior = member_priors(members)
    weight = starting_weights(members)
    for _ in range(_STEPS):
        support, echo = _rates(lifts, agrees, given, weight)
        new = prior * support * (1 - echo) ** _POWER
        previous, weight = weight, (weight + new / new.max()) / 2
        weight /= weight.max()
        if np.abs(weight - previous).max() < _SMALLEST_CHANGE:
            break
    support, echo = _rates(lifts, agrees, given, weight)
    return PoolWeights(weight, support, echo)


def starting_weights(members: Sequence[Member]) -> np.ndarray:
    """Return the weights from which the iteration starts, [M].

    Layers that have memorised the labels agree with each other and may be the majority. Untrained features cannot have
    memorised a label, so they have nearly all of the starting weight. Without untrained features, the weights decrease
    with depth, because late layers memorise first.
    """
    is_trained = np.array([member.is_trained for member in members])
    if is_trained.all():
        return np.linspace(1, 1 / len(members), len(members))
    return np.where(is_trained, _TRAINED_START, 1.0)


def member_priors(members: Sequence[Member]) -> np.ndarray:
    """Return the priors [M]: 1 for members with untrained features, at most 1 for the others.

    The priors of trained members sum to at most `_TRAINED_SHARE` times those of untrained ones.
    """
    is_trained = np.array([member.is_trained for member in members])
    untrained = (~is_trained).sum()
    if not untrained:
        return np.ones(len(members))
    return np.where(is_trained, min(1.0, _TRAINED_SHARE * untrained / is_trained.sum()), 1.0)


def _rates(
    lifts: Sequence[np.ndarray], agrees: np.ndarray, labels: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return support s and echo r, [M]. If the others support no label, s is 1; if they contradict none, r is 0."""
    supported, contradicted = np.empty((2, len(lifts), len(labels)))
    for start in range(0, len(labels), _BLOCK_ROWS):
        part = slice(start, start + _BLOCK_ROWS)
        blocks = [lift[part].astype(np.float64) for lift in lifts]
        total = np.einsum("m,mnk->nk", weight, blocks)
        for index, block in enumerate(blocks):
            margin = _margins(np.maximum(total - weight[index] * block, 0), labels[part])
            supported[index, part], contradicted[index, part] = np.maximum(margin, 0), np.maximum(-margin, 0)
    support = ((supported * agrees).sum(1) + 1) / (supported.sum(1) + 1)
    return support, (contradicted * agrees).sum(1) / (contradicted.sum(1) + _PRIOR_CONTRADICTION * len(labels))


def _lift(probabilities: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Return distributions [n, K] divided by the class frequencies [K], in float32.

    A member without information predicts the class frequencies. Their lift is uniform: it contradicts no rare class.
    """
    divisor = np.where(frequencies > 0, frequencies, np.inf)
    return (np.asarray(probabilities, dtype=np.float32) / divisor).astype(np.float32)


def _margins(lifts: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the share of the given label minus the largest share of another label, [n]. Overwrites lifts [n, K]."""
    total, given = lifts.sum(1), np.take_along_axis(lifts, labels[:, None], 1)[:, 0]
    np.put_along_axis(lifts, labels[:, None], -np.inf, 1)
    result: np.ndarray = np.divide(given - lifts.max(1), total, out=np.zeros(len(total)), where=total > 0)
    return result


def mix(members: Sequence[np.ndarray], weight: np.ndarray) -> np.ndarray:
    """The weighted mean of the distributions of all members, [n, K] in float64. Rows sum to 1 up to its rounding."""
    result = np.zeros(members[0].shape)
    for value, member in zip(weight, members, strict=True):
        result += value * member
    result /= result.sum(1, keepdims=True)
    return result
