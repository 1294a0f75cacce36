"""Codelengths and calibrated distributions from Boltzmann influence.

All functions are pure: tensors in, tensors out. Equation names are labels of the paper. Codelengths and complexities
are in nats; larger = more surprising. B is the batch size and K the number of classes.

| symbol | argument | meaning |
|---|---|---|
| ``p`` | ``probability`` [B, K] | model distribution ``softmax(beta f(x))`` |
| ``IF`` | ``influence`` [B, K] | Boltzmann influence of every label (eq. bif), non-negative |
| ``n`` | ``num_train`` | number of training examples |
| ``alpha`` | ``alpha`` | weight of the example relative to one training example |
| ``c`` | | ``alpha/n E[IF]``: excess of the sum of hindsight probabilities over 1 |
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

#: Mean of ``alpha/n E[IF]`` over the training data that sets alpha in `label_complexity`. A larger value helps if wrong
#: labels are memorised, and costs a little if symmetric noise is not memorised (experiments/audit_defaults/results).
LABEL_ADDED_PROBABILITY = 0.5

#: Mean of ``alpha/n E[IF]`` over the training data that sets alpha in `bounded_complexity`
#: (experiments/ood_defaults/results).
BOUNDED_ADDED_PROBABILITY = 0.003

#: Share of the label samples of E[IF] that is uniform. It bounds the terms of labels whose approximation is far too
#: small.
EXPECTATION_UNIFORM_SHARE = 0.1

#: The same for bounded complexity. On OOD inputs the approximate hindsight probability of many labels is close to 1,
#: and its rare errors are large (docs/settings.md, many classes).
BOUNDED_UNIFORM_SHARE = 0.5

#: Steps of the bisection in `hindsight_log_odds`; float64 has 53 significant bits.
_BISECTION_STEPS = 64


def expected_influence(probability: Tensor, influence: Tensor) -> Tensor:
    """Expected influence over the labels of the model, ``E_{y~p}[IF(x, y)]`` (eq. ifcomp_par), [B]."""
    return (probability * influence).sum(1)


def hindsight_probabilities(probability: Tensor, influence: Tensor, num_train: int, alpha: float) -> Tensor:
    """Probability of each label after training on it, to first order: ``p_y (1 + alpha/n IF_y)``, [B, K].

    The rows are not normalised: their sum is ``1 + alpha/n E[IF]``. Single values can exceed 1.

    Args:
        probability: p, [B, K].
        influence: IF, [B, K].
        num_train: n.
        alpha: Weight of the example.
    """
    return probability * (1 + alpha / num_train * influence)


def pnml_distribution(
    probability: Tensor, influence: Tensor, num_train: int, alpha: float, keep_argmax: bool = False
) -> Tensor:
    """Predictive normalised maximum likelihood distribution (eq. pnml_dist), [B, K].

    This is ``p_y (1 + alpha/n IF_y) / (1 + alpha/n E[IF])``.

    Args:
        probability: p, [B, K].
        influence: IF, [B, K].
        num_train: n.
        alpha: Weight of the example; 0 returns p.
        keep_argmax: Return `argmax_keeping_distribution` instead.
    """
    if keep_argmax:
        expected = expected_influence(probability, influence)
        return argmax_keeping_distribution(probability, expected, num_train, alpha)
    hindsight = hindsight_probabilities(probability, influence, num_train, alpha)
    return hindsight / hindsight.sum(1, keepdim=True)


def argmax_keeping_distribution(probability: Tensor, expected: Tensor, num_train: int, alpha: float) -> Tensor:
    """The pNML distribution with the added probability spread evenly, ``(p + c/K) / (1 + c)``, [B, K].

    The predicted class never changes. With ``c = alpha/n E[IF]`` it needs the expected influence only.

    Args:
        probability: p, [B, K].
        expected: E[IF], [B].
        num_train: n.
        alpha: Weight of the example; 0 returns p.
    """
    added = (alpha / num_train * expected).unsqueeze(1)
    uniform_share = added / (1 + added)  # finite for any alpha
    return probability * (1 - uniform_share) + uniform_share / probability.shape[1]


def codelength(log_probability: Tensor, labels: Tensor) -> Tensor:
    """Codelength of the given labels, ``-log p_y`` in nats (eq. alt_ham), [B]."""
    return -log_probability.gather(1, labels.unsqueeze(1)).squeeze(1)


def regret(influence: Tensor, num_train: int, alpha: float = 1.0, linearized: bool = False) -> Tensor:
    """Base codelength minus hindsight codelength (eq. regret), ``log(1 + alpha/n IF)`` in nats.

    Args:
        influence: IF of the labels, any shape.
        num_train: n.
        alpha: Weight of the example.
        linearized: Approximate ``log(1 + u)`` by u.

    Returns:
        Regret in the shape of ``influence``; larger = more surprising.
    """
    ratio = alpha / num_train * influence
    return ratio if linearized else torch.log1p(ratio)


def parametric_complexity(expected: Tensor, num_train: int, alpha: float = 1.0, linearized: bool = False) -> Tensor:
    """Parametric complexity, ``log(1 + alpha/n E[IF])`` in nats, [B]; larger = more surprising.

    Args:
        expected: E[IF], [B].
        num_train: n.
        alpha: Weight of the example.
        linearized: Return ``alpha/n E[IF]``, the second term of eq. ifcomp_full. The order of examples is the same.
    """
    ratio = alpha / num_train * expected
    return ratio if linearized else torch.log1p(ratio)


def stochastic_complexity(error: Tensor, complexity: Tensor, hindsight_regret: Tensor | None = None) -> Tensor:
    """Error plus parametric complexity in nats (eq. ifcomp_full), [B]; larger = more suspicious label.

    Args:
        error: Codelength ``-log p_y`` of the label, [B].
        complexity: Parametric complexity, [B].
        hindsight_regret: Regret of the label, [B], for an example the model was not trained on. Its error is the
            hindsight codelength ``-log p_y - regret``. None for training examples: their model is hindsight-optimal.
    """
    return error + complexity if hindsight_regret is None else error - hindsight_regret + complexity


def capped_complexity(probability: Tensor, influence: Tensor, num_train: int, alpha: float) -> Tensor:
    """Parametric complexity with hindsight probabilities capped at 1, in nats, [B]; larger = more surprising.

    This is ``log sum_y min(p_y (1 + alpha/n IF_y), 1)``, between 0 and log K. It is at most `parametric_complexity`,
    and agrees with it as alpha goes to 0. The order of examples depends on alpha.

    Args:
        probability: p, [B, K].
        influence: IF, [B, K].
        num_train: n.
        alpha: Weight of the example.
    """
    return torch.minimum(alpha * (probability * influence) / num_train, 1 - probability).sum(1).log1p()


def bounded_complexity(
    log_probability: Tensor,
    influence: Tensor,
    mean_training_influence: float,
    added_probability: float = BOUNDED_ADDED_PROBABILITY,
) -> Tensor:
    """Parametric complexity with hindsight probabilities below 1, in nats, [B]; larger = more surprising.

    This is ``log sum_y sigmoid(h_y)`` with the log-odds h of `hindsight_log_odds`. It is 0 if training on a label
    changes no probability, and log K if the model can learn any label. E[IF] vanishes as the model becomes certain;
    bounded complexity stays large for a certain prediction if the influence of the other labels is large.

    Args:
        log_probability: log p, [B, K].
        influence: IF, [B, K].
        mean_training_influence: Mean of E[IF] over the training data.
        added_probability: Mean of ``alpha/n E[IF]`` over the training data; sets alpha.
    """
    top, log_odds = log_probability.argmax(1, keepdim=True), label_log_odds(log_probability)
    hindsight = hindsight_log_odds(log_odds, influence, added_probability / mean_training_influence)
    # sum_y sigmoid(h_y) - 1, without cancellation: the top label is close to 1.
    others = torch.sigmoid(hindsight).scatter(1, top, 0).sum(1)
    missing_of_top = torch.sigmoid(-hindsight.gather(1, top)).squeeze(1)
    return torch.log1p((others - missing_of_top).clamp_min(0))


def approximate_hindsight(
    log_probability: Tensor,
    control: Tensor,
    mean_training_influence: float,
    added_probability: float = BOUNDED_ADDED_PROBABILITY,
) -> Tensor:
    """Hindsight probability ``c_y = sigmoid(h_y)`` of every label from an approximate influence, [B, K].

    Args:
        log_probability: log p, [B, K].
        control: Approximate influence of every label, [B, K].
        mean_training_influence: Mean of E[IF] over the training data.
        added_probability: Mean of ``alpha/n E[IF]`` over the training data; sets alpha.
    """
    weight = added_probability / mean_training_influence
    return torch.sigmoid(hindsight_log_odds(label_log_odds(log_probability), control, weight))


def label_chances(sizes: Tensor, top: Tensor, uniform_share: float) -> Tensor:
    """Probabilities ``q_y = (1 - u) w_y / sum_z w_z + u / (K - 1)`` of drawing each label, [B, K]; 0 for the top label.

    Args:
        sizes: Expected sizes w of the terms of a sum over labels, [B, K].
        top: The most probable label, [B].
        uniform_share: u, above 0 and at most 1.
    """
    others = torch.ones_like(sizes).scatter(1, top.unsqueeze(1), 0)
    weights = sizes.clamp_min(torch.finfo(sizes.dtype).tiny) * others
    shares = (1 - uniform_share) * weights / weights.sum(1, keepdim=True)
    return shares + uniform_share / (sizes.shape[1] - 1) * others


def sampled_expected_influence(
    probability: Tensor, labels: Tensor, influence: Tensor, control: Tensor, chances: Tensor
) -> Tensor:
    """Estimate `expected_influence` from a sample of labels, [B].

    The most probable label t is exact. Of the other labels, m are drawn with replacement with probabilities q, and an
    approximate influence c is the control variate:

        ``E[IF] = p_t IF_t + sum_{y != t} p_y c_y + mean_s(p_s (IF_s - c_s) / q_s)``.

    The estimate is unbiased for any c and q that do not depend on the sample. Negative values are raised to 0.

    Args:
        probability: p, [B, K].
        labels: The most probable label, then m drawn labels, [B, 1 + m].
        influence: IF of these labels, [B, 1 + m].
        control: Approximate influence c of every label, [B, K].
        chances: Probabilities q of drawing each label, [B, K].
    """
    products = (probability * control).scatter(1, labels[:, :1], 0)
    exact = probability.gather(1, labels) * influence
    drawn = labels[:, 1:]
    terms = (exact[:, 1:] - products.gather(1, drawn)) / chances.gather(1, drawn)
    return (exact[:, 0] + products.sum(1) + terms.mean(1)).clamp_min(0)


def sampled_excess(
    log_probability: Tensor,
    labels: Tensor,
    influence: Tensor,
    approximate: Tensor,
    chances: Tensor,
    mean_training_influence: float,
    added_probability: float = BOUNDED_ADDED_PROBABILITY,
) -> tuple[Tensor, Tensor]:
    """Estimate ``S - 1`` from a sample of labels, with ``S = sum_y sigmoid(h_y)`` of `bounded_complexity`, [B].

    The most probable label t is exact. Of the other labels, m are drawn with replacement with probabilities q, and
    approximate hindsight probabilities c are the control variate:

        ``S = sigmoid(h_t) + sum_{y != t} c_y + mean_s((sigmoid(h_s) - c_s) / q_s)``.

    The estimate is unbiased for any c and q that do not depend on the sample. Its standard error is the standard
    deviation of the m terms over ``sqrt(m)``; its square is unbiased. ``log S`` has a bias of about
    ``-Var(S) / (2 S^2)``.

    Args:
        log_probability: log p, [B, K].
        labels: The most probable label, then m drawn labels, at least two, [B, 1 + m].
        influence: IF of these labels, [B, 1 + m].
        approximate: c of `approximate_hindsight`, [B, K].
        chances: Probabilities q of drawing each label, [B, K].
        mean_training_influence: Mean of E[IF] over the training data.
        added_probability: Mean of ``alpha/n E[IF]`` over the training data; sets alpha.

    Returns:
        ``S - 1``, which can be negative, and its standard error.
    """
    weight, log_odds = added_probability / mean_training_influence, label_log_odds(log_probability)
    hindsight = hindsight_log_odds(log_odds.gather(1, labels), influence, weight)
    top, drawn = labels[:, :1], labels[:, 1:]
    terms = (torch.sigmoid(hindsight[:, 1:]) - approximate.gather(1, drawn)) / chances.gather(1, drawn)
    total = approximate.scatter(1, top, 0).sum(1) + terms.mean(1)
    return total - torch.sigmoid(-hindsight[:, 0]), terms.std(1) / drawn.shape[1] ** 0.5


def label_log_odds(log_probability: Tensor) -> Tensor:
    """Log-odds of every label against all others, ``log p - log(1 - p)``, [B, K]; accurate for p near 1.

    Args:
        log_probability: log p, [B, K].
    """
    top = log_probability.argmax(1, keepdim=True)
    log_rest_of_top = log_probability.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    return log_probability - torch.log1p(-log_probability.exp()).scatter(1, top, log_rest_of_top)


def hindsight_log_odds(log_odds: Tensor, influence: Tensor, weight: float) -> Tensor:
    """Log-odds of a label against all others after training on it.

    On the linearised network, the optimum h of the proximal objective (eq. bpbo) solves

        ``h = h0 + alpha/n IF / (1 - p)^2 sigmoid(-h)``.

    This is exact for two labels. For more labels it assumes that the others keep their proportions. The hindsight
    probability ``sigmoid(h)`` lies between p and ``min(p exp(alpha/n IF), 1)``, and equals `hindsight_probabilities`
    to first order in alpha.

    Args:
        log_odds: ``h0 = log p - log(1 - p)``, any shape.
        influence: IF, in the shape of ``log_odds``. Negative values, which are rounding errors, count as 0.
        weight: ``alpha/n``.

    Returns:
        h, in the shape of ``log_odds``.
    """
    rest = torch.sigmoid(-log_odds).square().clamp_min(torch.finfo(log_odds.dtype).tiny)
    pull = weight * influence.clamp_min(0) / rest
    low, high = log_odds, torch.minimum(log_odds + pull, log_odds.clamp_min(0) + pull.log1p())
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        above = middle - log_odds > pull * torch.sigmoid(-middle)
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return low


def label_complexity(
    error: Tensor,
    other_error: Tensor,
    contrast: Tensor,
    mean_training_influence: float,
    added_probability: float = LABEL_ADDED_PROBABILITY,
) -> Tensor:
    """Stochastic complexity of a label y if one other label z is the only alternative, in nats, [B].

    Restricted to the two labels, z has probability ``a = p_z / (p_y + p_z)``, and ``E[IF] = a (1 - a) v^T M v`` with
    ``v = e_y - e_z`` and the logit kernel M. The result is the pNML codelength of y in the form that keeps the argmax,
    ``-log((1 - a + c/2) / (1 + c))`` with ``c = alpha/n E[IF]``. It is log 2 if both labels are equally probable;
    larger = more suspicious label.

    Args:
        error: ``-log p_y``, [B].
        other_error: ``-log p_z``, [B].
        contrast: ``v^T M v``, [B].
        mean_training_influence: Mean of E[IF] over the training data.
        added_probability: Mean of ``alpha/n E[IF]`` over the training data; sets alpha.
    """
    gap = error - other_error
    other_share = torch.sigmoid(gap)
    added = added_probability / mean_training_influence * other_share * torch.sigmoid(-gap) * contrast
    if_likely = -torch.log1p(-(other_share + added / 2) / (1 + added))
    if_unlikely = torch.log1p(added) - torch.logaddexp(logsigmoid(-gap), (added / 2).log())
    return torch.where(gap < 0, if_likely, if_unlikely)  # the same formula, each form accurate in its range
