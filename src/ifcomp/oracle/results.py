"""Results of hindsight training as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp.oracle.pairs import Pair

_TYPES = {"iterations": torch.int64, "converged": torch.bool}


@dataclass(frozen=True, eq=False)
class Hindsight:
    """Predictions of the hindsight models of B examples and K labels.

    Column y belongs to the model trained with label y, so rows of ``probability`` do not sum to 1. Labels that were not
    requested are NaN. Larger complexities are more surprising; codelengths are in nats.

    Attributes:
        log_probability: ``log p*_y(x)`` of the hindsight model of label y, [B, K].
        log_base: ``log p_y(x)`` of the given model, [B, K].
        iterations: Number of optimiser steps, [B, K].
        converged: Whether ``criterion`` is at most the tolerance, [B, K].
        criterion: Convergence criterion in nats (see `hindsight`), [B, K].
        gradient: Gradient norm of the objective at the end, relative to the start, [B, K]. It tends to 0 only for
            smooth models: minima of a network with ReLU or max-pooling lie on kinks.
    """

    log_probability: Tensor
    log_base: Tensor
    iterations: Tensor
    converged: Tensor
    criterion: Tensor
    gradient: Tensor

    @property
    def probability(self) -> Tensor:
        """``p*_y(x)``, [B, K]."""
        return self.log_probability.exp()

    @property
    def base(self) -> Tensor:
        """``p_y(x)``, [B, K]."""
        return self.log_base.exp()

    @property
    def regret(self) -> Tensor:
        """Base minus hindsight codelength ``log p*_y - log p_y`` in nats (eq. regret), [B, K]."""
        return self.log_probability - self.log_base

    @property
    def pnml(self) -> Tensor:
        """The pNML distribution ``p*_y / sum_y' p*_y'`` (eq. bnml), [B, K]."""
        return self.log_probability.softmax(1)

    @property
    def parametric_complexity(self) -> Tensor:
        """``log sum_y p*_y`` in nats (eq. bnml_comp), [B]; larger = more surprising, at most log K."""
        return self.log_probability.logsumexp(1)


def assemble(rows: list[dict[int, Pair]], log_base: Tensor) -> Hindsight:
    """Collect pairs into tensors; labels without a pair are NaN.

    Args:
        rows: For each example its pairs by label.
        log_base: Log-probabilities of the given model, [B, K].
    """
    missing = Pair(float("nan"), float("nan"), 0, False, float("nan"), float("nan"))

    def column(name: str) -> Tensor:
        labels = range(log_base.shape[1])
        values = [[getattr(row.get(label, missing), name) for label in labels] for row in rows]
        return torch.tensor(values, device=log_base.device, dtype=_TYPES.get(name, torch.float64))

    names = ("log_probability", "iterations", "converged", "criterion", "gradient")
    return Hindsight(log_base=log_base, **{name: column(name) for name in names})
