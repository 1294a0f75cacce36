"""Out-of-distribution (OOD) detection on scores: joined scores, thresholds and metrics.

Larger scores = more surprising, more out-of-distribution.
"""

from __future__ import annotations

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


def rank_surprisal(values: ArrayLike, held_out: ArrayLike) -> Floats:
    """Surprisal of the ranks of values among held-out values, ``-log p`` in nats, [B]; larger = more surprising.

    ``p = (#{h > s} + #{h = s} / 2 + 1/2) / (N + 1)`` is the smoothed share of the N held-out values h that are larger
    than the value s. It lies strictly between 0 and 1, so the surprisal is finite: at most ``log(2N + 2)``. Any
    increasing function of the values gives the same result.

    Args:
        values: Scores [B]; larger = more surprising.
        held_out: Scores [N] of held-out in-distribution inputs.
    """
    scores, reference = checked_scores("values", values), np.sort(checked_scores("held_out", held_out))
    below, up_to = (np.searchsorted(reference, scores, side) for side in ("left", "right"))
    larger = len(reference) - (below + up_to) / 2
    return np.asarray(-np.log((larger + 0.5) / (len(reference) + 1)))


def join_scores(values: Mapping[str, ArrayLike], held_out: Mapping[str, ArrayLike], members: Sequence[str]) -> Floats:
    """Join scores of different units without a parameter: ``log mean_m(1 / p_m)`` over the members m, [B], in nats.

    ``-log p_m`` is the `rank_surprisal` of a member. The score is minus the logarithm of the harmonic mean of the
    p-values, and at most ``log(2N + 2)``. The most surprising member dominates. A member that mistakes OOD inputs for
    typical ones adds almost nothing, whereas its log-odds ``log((1 - p) / p)`` would cancel the others. A single member
    is returned as it is, in its own unit.

    Args:
        values: Scores [B] by member.
        held_out: Scores [N] of held-out in-distribution inputs by member.
        members: Names of the scores to join.
    """
    if len(members) == 1:
        return checked_scores(members[0], values[members[0]])
    surprisals = [rank_surprisal(values[name], held_out[name]) for name in members]
    return np.asarray(np.logaddexp.reduce(surprisals, axis=0) - np.log(len(members)))


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
