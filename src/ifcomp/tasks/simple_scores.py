"""Simple scores of logits: the usual methods, for comparison.

Every function takes logits f, [N, K], as anything that ``numpy.asarray`` accepts, tensors on the CPU included. Scores
are float64 arrays [N]; larger = more suspicious. With ``p = softmax(f)`` and labels y:

| function | formula | unit |
|---|---|---|
| `loss` | ``-log p_y`` | nats, from 0 |
| `margin` | ``max_{k != y} p_k - p_y`` | probability, -1 to 1 |
| `max_softmax` | ``1 - max_k p_k`` | probability, 0 to 1 - 1/K |
| `energy` | ``-log sum_k exp(f_k)`` | nats |

`fit_temperature` fits the parameter of temperature scaling, ``softmax(f / T)``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import log_softmax, logsumexp, softmax

from ifcomp.errors import DataError
from ifcomp.tasks.metrics import checked_labels

Floats = NDArray[np.float64]

#: Smallest and largest temperature that `fit_temperature` returns.
TEMPERATURES = (0.02, 50.0)


def loss(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """Codelength of the label, ``-log p_y`` in nats, [N]. Larger = more suspicious."""
    values, columns = _checked(logits, labels)
    log_probability: Floats = log_softmax(values, 1)
    return -np.take_along_axis(log_probability, columns, 1)[:, 0]


def margin(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """Largest probability of another label minus that of the label, ``max_{k != y} p_k - p_y``, [N].

    Positive where the model predicts another label. Larger = more suspicious.
    """
    values, columns = _checked(logits, labels)
    probability: Floats = softmax(values, 1)
    label_probability = np.take_along_axis(probability, columns, 1)[:, 0]
    np.put_along_axis(probability, columns, -1.0, 1)
    return np.asarray(probability.max(1) - label_probability)


def max_softmax(logits: ArrayLike) -> Floats:
    """Probability that the prediction leaves to other labels, ``1 - max_k p_k``, [N]. Larger = more suspicious.

    It is the sum over the other labels, so that predictions with ``p > 1 - 1e-16`` still differ.
    """
    probability: Floats = softmax(checked_logits(logits), 1)
    np.put_along_axis(probability, probability.argmax(1)[:, np.newaxis], 0.0, 1)
    return np.asarray(probability.sum(1))


def energy(logits: ArrayLike) -> Floats:
    """Energy ``-log sum_k exp(f_k)`` in nats, [N]. Larger = more suspicious.

    Unlike the other scores it changes if a constant is added to all logits.
    """
    log_sum: Floats = logsumexp(checked_logits(logits), axis=1)
    return -log_sum


def fit_temperature(logits: ArrayLike, labels: ArrayLike) -> float:
    """Temperature T for which ``softmax(f / T)`` has the smallest mean negative log-likelihood on held-out data.

    Above 1 the model is overconfident. The NLL is convex in ``beta = 1/T``; its derivative, the mean of
    ``E_p[f] - f_y``, is zero at the minimum. A minimum outside of `TEMPERATURES` gives the nearer bound.

    Args:
        logits: f of examples that the model was not trained on, [N, K].
        labels: y, [N].
    """
    values, columns = _checked(logits, labels)
    differences = values - np.take_along_axis(values, columns, 1)

    def slope(beta: float) -> float:
        return float((softmax(beta * differences, 1) * differences).sum(1).mean())

    coldest, hottest = TEMPERATURES
    if slope(1 / hottest) >= 0:
        return hottest
    if slope(1 / coldest) <= 0:
        return coldest
    return float(1 / brentq(slope, 1 / hottest, 1 / coldest))


def checked_logits(logits: ArrayLike) -> Floats:
    """Return the logits as float64 [N, K].

    Raises:
        DataError: If they are not finite numbers of shape [N, K] with N > 0 and K > 1.
    """
    values = np.asarray(logits, dtype=np.float64)
    if values.ndim != 2 or not len(values) or values.shape[1] < 2:
        raise DataError(f"logits must have shape [N, K] with N > 0 and K > 1, but have {list(values.shape)}.")
    if not np.isfinite(values).all():
        raise DataError("logits must be finite, but some are NaN or infinite.")
    return values


def _checked(logits: ArrayLike, labels: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    """Return the logits [N, K], and the labels as column indices [N, 1]."""
    values = checked_logits(logits)
    return values, checked_labels(labels, *values.shape)[:, np.newaxis]
