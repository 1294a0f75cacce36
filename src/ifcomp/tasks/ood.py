"""Out-of-distribution (OOD) detection on scores: joined scores, thresholds and metrics.

Larger scores = more surprising, more out-of-distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ifcomp.curvature.factors import Relative
from ifcomp.errors import SettingError
from ifcomp.tasks.metrics import checked_scores

Floats = NDArray[np.float64]

#: Damping of bounded complexity for OOD detection. OOD inputs stand out along low-curvature directions, which larger
#: damping suppresses: for a MNIST LeNet at beta = 0.66, the AUROC against KMNIST and notMNIST is 98.9 and 99.0 % with
#: almost no damping, and 98.5 and 97.8 % with ``Relative(0.1)``. At beta = 0.1 the difference is far larger.
OOD_DAMPING = Relative(1e-4)

#: Scores that a detector can join, by name, with their descriptions. Larger = more surprising.
MEMBERS = {
    "complexity": "bounded complexity in nats, from 0 to log K",
    "energy": "energy -log sum_k exp(f_k) of the logits f in nats",
    "neighbours": "Euclidean distance to the k-th nearest normalised penultimate features of the reference set, 0 to 2",
}

#: Share of the held-out scores in the exponential tail. Shares of 0.05 and 0.2 changed the mean AUROC of MNIST's LeNet
#: by about 0.1 points when all members had equal weights.
_TAIL_SHARE = 0.1

#: Smallest weight of a member.
_SMALLEST_WEIGHT = 1e-6

#: Members of the default score (experiments/ood_defaults/results/joins.md).
DEFAULT_MEMBERS = ("complexity", "energy", "neighbours")


@dataclass(frozen=True)
class OODMetrics:
    """Separation of in-distribution (ID) and OOD inputs by a score; all values are in [0, 1].

    Attributes:
        auroc: Probability that an OOD input has a larger score than an ID input; 0.5 is chance, larger is better.
        aupr_in: Average precision of detecting ID inputs by small scores; larger is better.
        aupr_out: Average precision of detecting OOD inputs by large scores; larger is better.
        fpr95: Share of OOD inputs accepted at the threshold that accepts 95 % of ID inputs; smaller is better.
    """

    auroc: float
    aupr_in: float
    aupr_out: float
    fpr95: float


def ood_threshold(scores: ArrayLike, tpr: float = 0.95) -> float:
    """Return the smallest score that accepts at least the share ``tpr`` of the inputs.

    An input is accepted if its score is at most the threshold.

    Args:
        scores: Scores of held-out in-distribution inputs, [N]; larger = more surprising.
        tpr: True positive rate: share of in-distribution inputs to accept, in (0, 1].
    """
    values = np.sort(checked_scores("scores", scores))
    if not 0 < tpr <= 1:
        raise SettingError(f"tpr must be in (0, 1], but is {tpr!r}.")
    return float(values[np.arange(1, len(values) + 1) / len(values) >= tpr][0])


def tail_surprisal(values: ArrayLike, held_out: ArrayLike | None) -> Floats:
    """Surprisal of values in the distribution of held-out values, ``-log p`` in nats, [B]; larger = more surprising.

    Up to the 90 % quantile u of the N held-out values h, p is the smoothed share of larger ones,
    ``p(s) = (#{h > s} + #{h = s} / 2 + 1/2) / (N + 1)``. Above it the tail is exponential,
    ``p(s) = (#{h > u} + 1/2) / (N + 1) exp(-(s - u) / m)``, where m is the mean excess of the held-out values above u.
    So values far beyond all held-out ones differ by their distance. Without held-out values above u, p is the smoothed
    share everywhere.

    Args:
        values: Scores [B]; larger = more surprising.
        held_out: Scores [N] of held-out in-distribution inputs. None if the values are those of the held-out inputs:
            each is then compared with the other N - 1, as a new input is compared with inputs other than itself.
    """
    scores = checked_scores("values", values)
    reference = np.sort(scores if held_out is None else checked_scores("held_out", held_out))
    own = int(held_out is None)
    size = len(reference) - own
    larger = len(reference) - _ranks(scores, reference) - own / 2
    surprisal = np.asarray(-np.log((larger + 0.5) / (size + 1)))
    starts = _tail_starts(scores, reference, own)
    for start in np.unique(starts):
        above = reference[reference > start] - start
        if len(above) <= own:
            continue
        rows = (starts == start) & (scores > start)
        excess = scores[rows] - start
        mean = (above.sum() - (excess if own else 0)) / (len(above) - own)
        with np.errstate(over="ignore", divide="ignore"):  # the mean excess may be denormal
            surprisal[rows] = excess / mean - math.log((len(above) - own + 0.5) / (size + 1))
    return surprisal


def _tail_starts(scores: Floats, reference: Floats, own: int) -> Floats:
    """Return the 90 % quantile of the sorted reference for every score, without the score itself if it is its own."""
    place = math.floor((1 - _TAIL_SHARE) * max(len(reference) - own - 1, 0))
    quantile, following = reference[place], reference[min(place + own, len(reference) - 1)]
    return np.asarray(np.where(scores <= quantile, following, quantile))


def member_weights(
    held_out: Mapping[str, ArrayLike], max_softmax: ArrayLike, members: Sequence[str]
) -> dict[str, float]:
    """Return the weights of members in a joined score, from 1e-6 to 1.

    The weight of complexity is ``1 - rho^2``, where rho is its rank correlation (Spearman) with max softmax among the
    held-out inputs; the other members have weight 1. If rho is near 1, complexity measures the ambiguity between the
    classes, as max softmax does, and not distance to the training data: energy then detects OOD inputs better.

    Args:
        held_out: Scores [N] of held-out in-distribution inputs by member.
        max_softmax: ``1 - max_y p_y`` of the same inputs, [N].
        members: Names of the scores to join.
    """
    weights = dict.fromkeys(members, 1.0)
    if "complexity" in weights:
        ranks = [_ranks(scores, np.sort(scores)) for scores in map(np.asarray, (held_out["complexity"], max_softmax))]
        deviations = [values - values.mean() for values in ranks]
        total = math.prod(float(np.square(values).sum()) for values in deviations)
        squared = float((deviations[0] * deviations[1]).sum() ** 2) / total if total else 0.0
        weights["complexity"] = max(_SMALLEST_WEIGHT, 1 - squared)
    return weights


def join_scores(
    values: Mapping[str, ArrayLike], held_out: Mapping[str, ArrayLike] | None, weights: Mapping[str, float]
) -> Floats:
    """Join scores of different units: ``log (sum_m w_m / p_m) / (sum_m w_m)`` over the members m, [B], in nats.

    ``-log p_m`` is the `tail_surprisal` of a member. The score is minus the logarithm of the weighted harmonic mean of
    the p-values. The most surprising member dominates. A member that mistakes OOD inputs for typical ones adds almost
    nothing, whereas its log-odds ``log((1 - p) / p)`` would cancel the others. A single member is returned as it is, in
    its own unit.

    Args:
        values: Scores [B] by member.
        held_out: Scores [N] of held-out in-distribution inputs by member. None if the values are those.
        weights: Weights of the members to join, from `member_weights`.
    """
    if len(weights) == 1:
        (name,) = weights
        return checked_scores(name, values[name])
    total = sum(weights.values())
    parts = []
    for name, weight in weights.items():
        surprisal = tail_surprisal(values[name], None if held_out is None else held_out[name])
        parts.append(surprisal + math.log(weight / total))
    return np.asarray(np.logaddexp.reduce(parts, axis=0))


def _ranks(values: Floats, ordered: Floats) -> Floats:
    """Return the number of ordered values [N] below each value, plus half of the equal ones, [B]."""
    below, up_to = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return np.asarray((below + up_to) / 2)


def check_members(score: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the members of a score in the order of `MEMBERS`; None is the default.

    Raises:
        SettingError: If there is none, or a name is unknown or given twice.
    """
    names = DEFAULT_MEMBERS if score is None else (score,) if isinstance(score, str) else tuple(score)
    if not names or len(set(names)) != len(names) or not set(names) <= MEMBERS.keys():
        raise SettingError(
            f"score must be one or several of {', '.join(map(repr, MEMBERS))}, each at most once, but is {score!r}."
        )
    return tuple(name for name in MEMBERS if name in names)


def ood_metrics(in_scores: ArrayLike, out_scores: ArrayLike) -> OODMetrics:
    """Measure how well scores separate in-distribution from OOD inputs.

    Args:
        in_scores: Scores of in-distribution inputs, [N]; larger = more surprising.
        out_scores: Scores of OOD inputs, [M].
    """
    from sklearn.metrics import average_precision_score, roc_auc_score  # slow import

    inside, outside = checked_scores("in_scores", in_scores), checked_scores("out_scores", out_scores)
    _, values = np.unique(np.concatenate([inside, outside]), return_inverse=True)  # ranks; scores may be infinite
    is_out = np.arange(len(values)) >= len(inside)
    return OODMetrics(
        auroc=float(roc_auc_score(is_out, values)),
        aupr_in=float(average_precision_score(~is_out, -values)),
        aupr_out=float(average_precision_score(is_out, values)),
        fpr95=float((outside <= ood_threshold(inside, 0.95)).mean()),
    )
