"""Choice of temperature and alpha on held-out data, with cross-validated figures.

The calibrated distribution is ``(p + c/K) / (1 + c)`` with ``p = softmax(f / T)`` and ``c = alpha/n E[IF]``: the pNML
distribution in the form that keeps the argmax. Codelengths are in nats; smaller NLL and ECE are better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import log_softmax

from ifcomp.errors import DataError
from ifcomp.evidence.seeds import seeded_order
from ifcomp.tasks.calibration import calibration_summary, reliability_curve
from ifcomp.tasks.calibration_result import CALIBRATED, COLUMNS, SOFTMAX, TEMPERATURE, Calibration
from ifcomp.tasks.prediction_sets import fit_set_rule
from ifcomp.tasks.simple_scores import fit_temperature

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

#: Candidates for the mean of ``alpha/n E[IF]`` over the training data: 0, and four values per decade.
ADDED_PROBABILITIES: tuple[float, ...] = (0.0, *(float(f"{value:.3g}") for value in np.logspace(-5, 2, 29)))

#: Number of folds of the cross-validation.
FOLDS = 5

#: Smallest number of held-out examples, and the number below which a warning is given.
MIN_EXAMPLES, FEW_EXAMPLES = 40, 200

#: Smaller probabilities are raised to this value before the logarithm.
_SMALLEST = 1e-300


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out examples of a calibration.

    Attributes:
        logits: f, [N, K].
        labels: y, [N].
        expected: E[IF] at the temperature of the calibration, [N].
    """

    logits: Floats
    labels: Integers
    expected: Floats

    def select(self, index: Integers) -> HeldOut:
        """Return the examples at ``index``."""
        return HeldOut(self.logits[index], self.labels[index], self.expected[index])


def split_halves(count: int, seed: int) -> tuple[Integers, Integers]:
    """Positions of the tuning half and of the conformal half, both increasing.

    The split is random and ignores the labels: conformal examples then stay exchangeable with new ones. It does not
    coincide with a permutation that the user draws with the same seed.

    Args:
        count: Number of held-out examples.
        seed: Seed of the split.
    """
    order = seeded_order(count, count, seed).numpy()
    return np.sort(order[: count // 2]), np.sort(order[count // 2 :])


def calibrated_distribution(logits: Floats, expected: Floats, temperature: float, weight: float) -> Floats:
    """``(p + c/K) / (1 + c)`` with ``p = softmax(f / T)`` and ``c = weight * E[IF]``, [N, K].

    Args:
        logits: f, [N, K].
        expected: E[IF], [N].
        temperature: T.
        weight: ``alpha/n``.
    """
    added = (weight * expected)[:, np.newaxis]
    share = added / (1 + added)
    probability: Floats = np.exp(log_softmax(logits / temperature, 1))
    return np.asarray((1 - share) * probability + share / logits.shape[1])


def choose_weight(held_out: HeldOut, temperature: float, weights: Sequence[float]) -> float:
    """Return the ``alpha/n`` with the smallest NLL; the first of equal ones.

    Args:
        held_out: Held-out examples.
        temperature: T.
        weights: Candidates.
    """
    rows = np.arange(len(held_out.labels))
    log_probability = log_softmax(held_out.logits / temperature, 1)[rows, held_out.labels]
    with np.errstate(divide="ignore"):
        added = np.asarray(weights)[:, np.newaxis] * held_out.expected
        uniform = np.log(added) - np.log(held_out.logits.shape[1])
    nll = (np.log1p(added) - np.logaddexp(log_probability, uniform)).mean(1)
    return float(weights[int(nll.argmin())])


def fit_calibration(
    tuning: HeldOut,
    conformal: HeldOut,
    temperature: float,
    count: int,
    mean_training_influence: float,
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
) -> Calibration:
    """Choose alpha, compare with the softmax by cross-validation, and score the conformal examples.

    `choose_form` selects the form by cross-validated NLL: softmax, temperature, or temperature and alpha. Every fold
    has its own temperature and alpha; E[IF] is that at ``temperature`` in all of them. If the model predicts every
    tuning example correctly, overconfidence cannot be measured and the softmax is kept.

    Args:
        tuning: Examples that choose temperature, alpha and the regularisation of sets.
        conformal: Examples that are used for conformal scores only.
        temperature: T with the smallest NLL of ``softmax(f / T)`` on the tuning examples.
        count: n, the number of training examples.
        mean_training_influence: Mean of E[IF] over the training data.
        settings: Settings to store in the result.
        seed: Seed of the folds.
    """
    if not np.isfinite(tuning.expected).all() or not np.isfinite(conformal.expected).all():
        raise DataError(
            "The expected influence E[IF] of some held-out examples is NaN or infinite. Use more damping, or "
            "model.double()."
        )
    weights = [added / mean_training_influence for added in ADDED_PROBABILITIES]
    weight = choose_weight(tuning, temperature, weights)
    chosen = {SOFTMAX: (1.0, 0.0), TEMPERATURE: (temperature, 0.0), CALIBRATED: (temperature, weight)}
    out_of_fold = cross_validate(tuning, weights, seed)
    summaries = {form: calibration_summary(values, tuning.labels) for form, values in out_of_fold.items()}
    best = SOFTMAX if summaries[SOFTMAX]["accuracy"] == 1 else choose_form(out_of_fold, tuning.labels)
    used_temperature, used_weight = chosen[best]
    rows = [
        (form, chosen[form][0], chosen[form][1] * count, *(summary[name] for name in COLUMNS[3:-1]), form == best)
        for form, summary in summaries.items()
    ]
    tuned, other = (
        calibrated_distribution(part.logits, part.expected, used_temperature, used_weight)
        for part in (tuning, conformal)
    )
    return Calibration(
        alpha=used_weight * count,
        temperature=used_temperature,
        frame=pd.DataFrame(rows, columns=list(COLUMNS)),
        curves={form: reliability_curve(values, tuning.labels) for form, values in out_of_fold.items()},
        set_rule=fit_set_rule(tuned, tuning.labels, other, conformal.labels),
        settings=settings,
    )


def choose_form(distributions: Mapping[str, Floats], labels: Integers) -> str:
    """Return the simplest form whose NLL no later form improves by more than the standard error of the difference.

    Args:
        distributions: Cross-validated distributions by form, [N, K] each, from the simplest to the most general.
        labels: y, [N].
    """
    rows, forms = np.arange(len(labels)), list(distributions)
    losses = {form: -np.log(np.maximum(distributions[form][rows, labels], _SMALLEST)) for form in forms}
    best = forms[0]
    for form in forms[1:]:
        difference = losses[best] - losses[form]
        if difference.mean() > difference.std(ddof=1) / np.sqrt(len(labels)):
            best = form
    return best


def cross_validate(held_out: HeldOut, weights: Sequence[float], seed: int) -> dict[str, Floats]:
    """Distributions of the three forms, [N, K]; each example is predicted with the choice of the other folds.

    Args:
        held_out: Held-out examples.
        weights: Candidates for ``alpha/n``.
        seed: Seed of the folds.
    """
    total = len(held_out.labels)
    fold_of = np.random.default_rng([seed % 2**64, 1]).permutation(total) % FOLDS
    results = {form: np.empty_like(held_out.logits) for form in (SOFTMAX, TEMPERATURE, CALIBRATED)}
    for fold in range(FOLDS):
        inside, others = np.flatnonzero(fold_of == fold), held_out.select(np.flatnonzero(fold_of != fold))
        part = held_out.select(inside)
        temperature = fit_temperature(others.logits, others.labels)
        weight = choose_weight(others, temperature, weights)
        forms = {SOFTMAX: (1.0, 0.0), TEMPERATURE: (temperature, 0.0), CALIBRATED: (temperature, weight)}
        for form, (chosen_temperature, chosen_weight) in forms.items():
            results[form][inside] = calibrated_distribution(
                part.logits, part.expected, chosen_temperature, chosen_weight
            )
    return results
