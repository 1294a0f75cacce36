"""What hindsight training found, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp.oracle.pairs import Pair

_TYPES = {"iterations": torch.int64, "converged": torch.bool}


@dataclass(frozen=True, eq=False)
class Hindsight:
    """Hindsight models of examples with every label: what the model could have said, had it seen the label.

    Column y belongs to the model trained with label y, so rows of ``probability`` do not sum to 1. Labels that were not
    asked for are NaN. Larger complexities are more surprising; codelengths are in nats.

    Attributes:
        log_probability: ``log p*_y(x)`` of the hindsight model of label y, [B, K].
        log_base: ``log p_y(x)`` of the model as it was given, [B, K].
        iterations: Optimiser steps, [B, K].
        converged: Whether ``criterion`` came below the tolerance, [B, K].
        criterion: What was left to gain at the end in nats (see `hindsight`), [B, K].
        gradient: Norm of the objective's gradient at the end over that at the start, [B, K]. It goes to 0 only for
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
    """One row an example, NaN where a label has no pair.

    Args:
        rows: For each example its pairs by label.
        log_base: [B, K].
    """
    nothing = Pair(float("nan"), float("nan"), 0, False, float("nan"), float("nan"))

    def column(name: str) -> Tensor:
        labels = range(log_base.shape[1])
        values = [[getattr(row.get(label, nothing), name) for label in labels] for row in rows]
        return torch.tensor(values, device=log_base.device, dtype=_TYPES.get(name, torch.float64))

    names = ("log_probability", "iterations", "converged", "criterion", "gradient")
    return Hindsight(log_base=log_base, **{name: column(name) for name in names})
