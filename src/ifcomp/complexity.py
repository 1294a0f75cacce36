"""From influence to codelengths and calibrated distributions: pure functions, tensors in, tensors out.

Symbols as in the paper: ``p`` the model's distribution at inverse temperature beta [B, K], ``IF`` the Boltzmann
influence of every label [B, K], ``n`` the number of training examples, ``alpha`` the weight of the example beside a
training example.

Larger is always more surprising; all codelengths are in nats.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

#: In `label_complexity` alpha is such that ``alpha/n E[IF]`` has this mean over the training data. A larger one
#: gains more where wrong labels are memorised, and costs a little on symmetric noise that is not
#: (experiments/audit_defaults/results).
TYPICAL_DOUBT = 0.5

#: In `bounded_complexity` alpha is such that ``alpha/n E[IF]`` has this mean over the training data, in nats
#: (experiments/ood_defaults/results).
TYPICAL_COMPLEXITY = 0.003

#: Halvings of the interval in which a hindsight log-odds lies: as many as float64 has bits, and some.
_HALVINGS = 64


def expected_influence(probability: Tensor, influence: Tensor) -> Tensor:
    """``E_{y~p}[IF(x, y)]``, [B]."""
    return (probability * influence).sum(1)


def pnml_distribution(
    probability: Tensor, influence: Tensor, count: int, alpha: float, keep_argmax: bool = False
) -> Tensor:
    """The pNML distribution (eq. pnml_dist), [B, K]: ``p_y (1 + alpha/n IF_y)``, normalised over y.

    Args:
        probability: p.
        influence: IF.
        count: n.
        alpha: 0 gives p itself.
        keep_argmax: Instead ``(p + c/K) / (1 + c)`` with ``c = alpha/n E[IF]``: as much doubt, spread evenly, so that
            the predicted class never changes.
    """
    if keep_argmax:
        doubt = (alpha / count * expected_influence(probability, influence)).unsqueeze(1)
        share = doubt / (1 + doubt)  # stays finite for any alpha
        return probability * (1 - share) + share / probability.shape[1]
    hindsight = hindsight_probabilities(probability, influence, count, alpha)
    return hindsight / hindsight.sum(1, keepdim=True)


def hindsight_probabilities(probability: Tensor, influence: Tensor, count: int, alpha: float) -> Tensor:
    """``p_y (1 + alpha/n IF_y)``: the label's probability if the model could have seen it; not normalised, [B, K]."""
    return probability * (1 + alpha / count * influence)


def parametric_complexity(expected: Tensor, count: int, alpha: float = 1.0, linearized: bool = False) -> Tensor:
    """``log(1 + alpha/n E[IF])`` in nats, [B]; the paper's ``alpha/n E[IF]`` when linearised (eq. ifcomp_par).

    Args:
        expected: E[IF], [B].
        count: n.
        alpha: Weight of the example.
        linearized: Use ``log(1 + u) ~ u``; the order of examples is the same.
    """
    ratio = alpha / count * expected
    return ratio if linearized else torch.log1p(ratio)


def capped_complexity(probability: Tensor, influence: Tensor, count: int, alpha: float) -> Tensor:
    """``log sum_y min(p_y (1 + alpha/n IF_y), 1)`` in nats, [B]: no hindsight probability counts more than 1.

    From 0 to log K: how many labels could be learnt. Alpha matters for the order of examples, unlike in
    `parametric_complexity`, which is never smaller and the same for alpha towards 0.

    Args:
        probability: p, [B, K].
        influence: IF, [B, K].
        count: n.
        alpha: Weight of the example.
    """
    return torch.minimum(alpha * (probability * influence) / count, 1 - probability).sum(1).log1p()


def hindsight_log_odds(log_odds: Tensor, influence: Tensor, weight: float) -> Tensor:
    """Log-odds of a label against all others if the model could have seen it, in the shape of ``log_odds``.

    `hindsight_probabilities` is the first step towards this, and grows beyond 1. On the linearised network the
    proximal objective (eq. bpbo) has its optimum where ``h = h0 + alpha/n IF / (1 - p)^2 sigmoid(-h)``: the further the
    label is learnt, the weaker it still pulls. Exact for two labels; for more, the others keep their proportions. The
    probability ``sigmoid(h)`` is at least p, at most ``p exp(alpha/n IF)``, below 1, and to first order in alpha that
    of `hindsight_probabilities`.

    Args:
        log_odds: ``h0 = log p - log(1 - p)`` of the model; accurate where p is very small too.
        influence: IF of the label.
        weight: ``alpha/n``.
    """
    rest = torch.sigmoid(-log_odds).square().clamp_min(torch.finfo(log_odds.dtype).tiny)
    pull = weight * influence.clamp_min(0) / rest
    low, high = log_odds, torch.minimum(log_odds + pull, log_odds.clamp_min(0) + pull.log1p())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beyond = middle - log_odds > pull * torch.sigmoid(-middle)
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return low


def bounded_complexity(log_probability: Tensor, influence: Tensor, typical: float) -> Tensor:
    """Parametric complexity with hindsight probabilities below 1, ``log sum_y sigmoid(h_y)`` in nats, [B].

    From 0, where no label can be learnt beside those of the training data, to log K, where any can. Unlike E[IF] it
    does not vanish where the model is sure of itself far from its data. Alpha follows from `TYPICAL_COMPLEXITY`.
    Larger = more surprising.

    Args:
        log_probability: Of every label at inverse temperature beta, [B, K].
        influence: IF, [B, K].
        typical: Mean of E[IF] over the training data.
    """
    top = log_probability.argmax(1, keepdim=True)
    others = log_probability.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)  # of all but the top label
    log_odds = log_probability - torch.log1p(-log_probability.exp()).scatter(1, top, others)
    after = hindsight_log_odds(log_odds, influence, TYPICAL_COMPLEXITY / typical)
    missing = torch.sigmoid(-after.gather(1, top)).squeeze(1)  # of the top label to 1
    return torch.log1p((torch.sigmoid(after).scatter(1, top, 0).sum(1) - missing).clamp_min(0))


def codelength(log_probability: Tensor, labels: Tensor) -> Tensor:
    """``-log p_y`` of the given labels in nats, [B]."""
    return -log_probability.gather(1, labels.unsqueeze(1)).squeeze(1)


def regret(influence: Tensor, count: int, alpha: float = 1.0, linearized: bool = False) -> Tensor:
    """Base minus hindsight codelength, ``log(1 + alpha/n IF)`` in nats, in the shape of ``influence``."""
    ratio = alpha / count * influence
    return ratio if linearized else torch.log1p(ratio)


def stochastic_complexity(error: Tensor, complexity: Tensor, hindsight_regret: Tensor | None = None) -> Tensor:
    """Error plus parametric complexity in nats (eq. ifcomp_full), [B].

    Args:
        error: ``-log p_y`` of the label.
        complexity: Parametric complexity.
        hindsight_regret: Regret of the label, for an example that the model has not been trained on: its error is the
            hindsight codelength ``-log p_y - regret``. None for a training example, whose label the model has seen.
    """
    return error + complexity if hindsight_regret is None else error - hindsight_regret + complexity


def label_complexity(error: Tensor, other_error: Tensor, contrast: Tensor, typical: float) -> Tensor:
    """Stochastic complexity of a label where one other label is the only alternative, in nats, [B].

    With ``a`` the other label's share of the probability of both, the model of these two labels has
    ``E[IF] = a (1 - a) v^T M v``, where ``v = e_y - e_other``. This is ``-log`` of its pNML probability of the label,
    in the variant that keeps the argmax: ``(1 - a + c/2) / (1 + c)`` with ``c = alpha/n E[IF]``. Alpha follows from
    `TYPICAL_DOUBT`. Log 2 where both labels are alike; larger = more suspicious.

    Args:
        error: ``-log p_y`` of the label, [B].
        other_error: The same of the other label, [B].
        contrast: ``v^T M v``, [B].
        typical: Mean of E[IF] over the training data.
    """
    gap = error - other_error
    share = torch.sigmoid(gap)
    doubt = TYPICAL_DOUBT / typical * share * torch.sigmoid(-gap) * contrast
    better = -torch.log1p(-(share + doubt / 2) / (1 + doubt))
    worse = torch.log1p(doubt) - torch.logaddexp(logsigmoid(-gap), (doubt / 2).log())
    return torch.where(gap < 0, better, worse)  # each where it is accurate
