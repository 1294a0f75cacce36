"""Training of one hindsight model to convergence: L-BFGS on the training examples that matter, checked on all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, minimize
from torch import Tensor

from ifcomp.data.batches import Batch
from ifcomp.oracle.network import Network, Points
from ifcomp.oracle.pairs import Pair
from ifcomp.oracle.precondition import Preconditioner
from ifcomp.oracle.settings import Settings

Array = NDArray[np.float64]

#: Convergence is judged over so many steps.
WINDOW = 5

#: Share of the softmax uncertainty that the first working set may leave out.
_LEFT_OUT = 0.05

#: Pairs of steps and gradients that L-BFGS remembers.
_MEMORY = 20


@dataclass(frozen=True, eq=False)
class Problem:
    """What all pairs of an example and a label share.

    Attributes:
        network: The model.
        points: Training inputs.
        log_base: Their log probabilities at theta_0, [n, K].
        root: Weights move by ``root(z)``, and training is over z.
        settings: Of the objective and of the convergence.
    """

    network: Network
    points: Points
    log_base: Tensor
    root: Preconditioner
    settings: Settings


@dataclass(frozen=True)
class _Point:
    """Where a descent has come: the objective, ``log p_y`` (both nats) and the norm of the objective's gradient."""

    value: float
    log_probability: float
    slope: float


@dataclass(eq=False)
class _Descent:
    """L-BFGS on one working set; ``trace`` has the start and the point after each step."""

    problem: Problem
    example: Batch
    label: int
    working: list[tuple[Batch, Tensor]]
    trace: list[_Point] = field(default_factory=list)

    def run(self, start: Array, steps: int) -> Array:
        """Descend until the last `WINDOW` steps brought nothing, no lower point is found, or the steps are used up."""
        options = {"maxiter": steps, "maxcor": _MEMORY, "gtol": 0.0, "ftol": 0.0}
        result = minimize(self._objective, start, jac=True, method="L-BFGS-B", callback=self._step, options=options)
        found: Array = result.x
        return found

    def progress(self) -> float:
        """By how many nats objective or ``log p_y`` changed over the last `WINDOW` steps, or all if there are fewer."""
        old, new = self.trace[-1 - WINDOW :][0], self.trace[-1]
        return max(abs(old.value - new.value), abs(old.log_probability - new.log_probability))

    def _step(self, intermediate_result: OptimizeResult) -> None:
        self.trace.append(self._last)
        if len(self.trace) > WINDOW and self.progress() <= self.problem.settings.tolerance:
            raise StopIteration

    def _objective(self, z: Array) -> tuple[float, Array]:
        problem, settings = self.problem, self.problem.settings
        base = problem.network.base()
        move = problem.root(torch.from_numpy(z).to(base))
        theta = (base + move).requires_grad_()
        log_probability = problem.network.log_probabilities(theta, self.example)[0, self.label]
        value, gradient = _backward(-settings.alpha * log_probability, theta)
        gradient += settings.lam * move
        value += settings.lam / 2 * float(move.double().square().sum())
        for piece, log_base in self.working:
            divergence = kl_divergences(log_base, problem.network.log_probabilities(theta, piece)).sum()
            more, slope = _backward(divergence, theta)
            value, gradient = value + more, gradient + slope
        self._last = _Point(value, float(log_probability.detach()), float(gradient.norm()))
        self.trace = self.trace or [self._last]
        return value, problem.root(gradient).double().cpu().numpy()


def solve(problem: Problem, example: Batch, label: int) -> Pair:
    """Train the hindsight model of one example with one label (eq. bpbo, see `hindsight`).

    The KL divergences of all examples left out of a working set are at least 0, so the minimum over the set is not
    above the minimum over all, and what they add at the minimiser bounds what is lost. So: train on the most uncertain
    examples, look at all, take in those with the largest divergences, and train on, until no more than the tolerance is
    left out.
    """
    settings, base = problem.settings, problem.network.base()
    chosen = _largest(1 - problem.log_base.exp().square().sum(1), _LEFT_OUT, relative=True)
    z = np.zeros(len(base))
    trace: list[_Point] = []
    criterion, steps = float("inf"), 0
    while criterion > settings.tolerance and steps < settings.max_iterations:
        pieces = problem.points.pieces(base.device, chosen)
        descent = _Descent(problem, example, label, with_rows(pieces, problem.log_base[chosen]))
        z = descent.run(z, settings.max_iterations - steps)
        trace += descent.trace
        steps += max(1, len(descent.trace) - 1)
        left = _divergences(problem, base + problem.root(torch.from_numpy(z).to(base))).masked_fill(chosen, 0.0)
        criterion = max(descent.progress(), float(left.sum()))
        chosen = chosen | _largest(left, settings.tolerance / 2)
    start, end = trace[0], trace[-1]
    return Pair(
        log_probability=end.log_probability,
        log_base=start.log_probability,
        iterations=steps,
        converged=criterion <= settings.tolerance,
        criterion=criterion,
        gradient=end.slope / start.slope if start.slope else 0.0,
    )


def kl_divergences(log_base: Tensor, log_probability: Tensor) -> Tensor:
    """``KL(base || new)`` of distributions given by their logarithms [B, K], in nats, [B]."""
    return (log_base.exp() * (log_base - log_probability)).sum(1)


def with_rows(pieces: Iterable[Batch], rows: Tensor) -> list[tuple[Batch, Tensor]]:
    """Batches with the rows [n, K] that belong to their examples."""
    pieces = list(pieces)
    return list(zip(pieces, rows.split([piece.size for piece in pieces]), strict=True))


def _divergences(problem: Problem, theta: Tensor) -> Tensor:
    """KL divergence of every training example, [n]."""
    with torch.no_grad():
        return torch.cat(
            [
                kl_divergences(log_base, problem.network.log_probabilities(theta, piece))
                for piece, log_base in with_rows(problem.points.pieces(theta.device), problem.log_base)
            ]
        )


def _backward(value: Tensor, theta: Tensor) -> tuple[float, Tensor]:
    return float(value.detach()), torch.autograd.grad(value, theta)[0]


def _largest(values: Tensor, rest: float, relative: bool = False) -> Tensor:
    """Mask [n] of the largest values, as few as leave out a sum of at most ``rest`` (or that share of the sum)."""
    order = values.argsort(descending=True, stable=True)
    left = values.sum() - values[order].cumsum(0)
    count = int((left > rest * (float(values.sum()) if relative else 1.0)).sum()) + 1
    mask = torch.zeros_like(values, dtype=torch.bool)
    mask[order[:count]] = True
    return mask
