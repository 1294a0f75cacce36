"""Training of one hindsight model: L-BFGS on a working set of training examples, verified on all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, minimize
from torch import Tensor

from ifcomp.data.batches import Batch
from ifcomp.oracle.network import Network, TrainingInputs
from ifcomp.oracle.pairs import Pair
from ifcomp.oracle.precondition import Preconditioner
from ifcomp.oracle.settings import Settings
from ifcomp.precision import as_double, as_type_of

Array = NDArray[np.float64]

#: Number of L-BFGS steps over which convergence is measured.
WINDOW = 5

#: Share of the total softmax uncertainty outside the first working set.
_OMITTED_UNCERTAINTY = 0.05

#: History size of L-BFGS.
_LBFGS_MEMORY = 20


@dataclass(frozen=True, eq=False)
class Problem:
    """The part of the objective that all pairs of an example and a label share.

    Attributes:
        network: The model.
        training: Training inputs.
        log_base: Log-probabilities of the training inputs at theta_0, [n, K].
        root: Preconditioner: ``theta = theta_0 + root(z)``, and z is optimised.
        settings: Weights of the objective and convergence settings.
    """

    network: Network
    training: TrainingInputs
    log_base: Tensor
    root: Preconditioner
    settings: Settings


@dataclass(frozen=True)
class _Iterate:
    """One iterate of L-BFGS: objective and ``log p_y`` in nats, and gradient norm of the objective."""

    value: float
    log_probability: float
    gradient_norm: float


@dataclass(eq=False)
class _Descent:
    """L-BFGS on one working set; ``trace`` has the start and the iterate after each step."""

    problem: Problem
    example: Batch
    label: int
    working_set: list[tuple[Batch, Tensor]]
    trace: list[_Iterate] = field(default_factory=list)

    def run(self, start: Array, steps: int) -> Array:
        """Run L-BFGS until the recent change is small, the line search fails, or the steps are used up; return z."""
        options = {"maxiter": steps, "maxcor": _LBFGS_MEMORY, "gtol": 0.0, "ftol": 0.0}
        result = minimize(self._objective, start, jac=True, method="L-BFGS-B", callback=self._step, options=options)
        z: Array = result.x
        return z

    def recent_change(self) -> float:
        """Return the larger change of objective and ``log p_y`` over the last `WINDOW` steps, in nats."""
        old, new = self.trace[-1 - WINDOW :][0], self.trace[-1]
        return max(abs(old.value - new.value), abs(old.log_probability - new.log_probability))

    def _step(self, intermediate_result: OptimizeResult) -> None:
        self.trace.append(self._last)
        if len(self.trace) > WINDOW and self.recent_change() <= self.problem.settings.tolerance:
            raise StopIteration

    def _objective(self, z: Array) -> tuple[float, Array]:
        problem, settings = self.problem, self.problem.settings
        base = problem.network.base()
        move = problem.root(as_type_of(torch.from_numpy(z), base))
        theta = (base + move).requires_grad_()
        log_probability = problem.network.log_probabilities(theta, self.example)[0, self.label]
        value, gradient = _backward(-settings.alpha * log_probability, theta)
        gradient += settings.lam * move
        value += settings.lam / 2 * float(as_double(move).square().sum())
        for microbatch, log_base in self.working_set:
            divergence = kl_divergences(log_base, problem.network.log_probabilities(theta, microbatch)).sum()
            term, term_gradient = _backward(divergence, theta)
            value, gradient = value + term, gradient + term_gradient
        self._last = _Iterate(value, float(log_probability.detach()), float(gradient.norm()))
        self.trace = self.trace or [self._last]
        return value, problem.root(gradient).cpu().double().numpy()


def solve(problem: Problem, example: Batch, label: int) -> Pair:
    """Train the hindsight model of one example with one label (eq. bpbo, see `hindsight`).

    KL divergences are non-negative, so the minimum over a working set of training examples is a lower bound of the
    minimum over all, and the divergences of the omitted examples at the minimiser bound the gap. The first working set
    has the most uncertain examples. Each round optimises on the working set, evaluates all divergences and adds the
    examples with the largest ones, until the omitted examples add at most the tolerance.
    """
    settings, base = problem.settings, problem.network.base()
    working = _largest(1 - problem.log_base.exp().square().sum(1), _OMITTED_UNCERTAINTY, relative=True)
    z = np.zeros(len(base))
    trace: list[_Iterate] = []
    criterion, steps = float("inf"), 0
    while criterion > settings.tolerance and steps < settings.max_iterations:
        microbatches = problem.training.microbatches(base.device, working)
        descent = _Descent(problem, example, label, with_log_base(microbatches, problem.log_base[working]))
        z = descent.run(z, settings.max_iterations - steps)
        trace += descent.trace
        steps += max(1, len(descent.trace) - 1)
        omitted = _divergences(problem, base + problem.root(as_type_of(torch.from_numpy(z), base))).masked_fill(
            working, 0.0
        )
        criterion = max(descent.recent_change(), float(omitted.sum()))
        working = working | _largest(omitted, settings.tolerance / 2)
    start, end = trace[0], trace[-1]
    return Pair(
        log_probability=end.log_probability,
        log_base=start.log_probability,
        iterations=steps,
        converged=criterion <= settings.tolerance,
        criterion=criterion,
        gradient=end.gradient_norm / start.gradient_norm if start.gradient_norm else 0.0,
    )


def kl_divergences(log_base: Tensor, log_probability: Tensor) -> Tensor:
    """Return ``KL(base || new)`` in nats, [B], from log-probabilities [B, K]."""
    return (log_base.exp() * (log_base - log_probability)).sum(1)


def with_log_base(microbatches: Iterable[Batch], rows: Tensor) -> list[tuple[Batch, Tensor]]:
    """Pair each batch with its rows of ``rows`` [n, K]."""
    microbatches = list(microbatches)
    return list(zip(microbatches, rows.split([microbatch.size for microbatch in microbatches]), strict=True))


def _divergences(problem: Problem, theta: Tensor) -> Tensor:
    """Return the KL divergence of every training example, [n]."""
    with torch.no_grad():
        return torch.cat(
            [
                kl_divergences(log_base, problem.network.log_probabilities(theta, microbatch))
                for microbatch, log_base in with_log_base(problem.training.microbatches(theta.device), problem.log_base)
            ]
        )


def _backward(value: Tensor, theta: Tensor) -> tuple[float, Tensor]:
    return float(value.detach()), torch.autograd.grad(value, theta)[0]


def _largest(values: Tensor, limit: float, relative: bool = False) -> Tensor:
    """Return the mask [n] of the largest values, as few as leave a sum of at most ``limit`` outside.

    Args:
        values: Non-negative values, [n].
        limit: Largest sum of the other values.
        relative: Whether ``limit`` is a share of the total.
    """
    order = values.argsort(descending=True, stable=True)
    omitted = values.sum() - values[order].cumsum(0)
    count = int((omitted > limit * (float(values.sum()) if relative else 1.0)).sum()) + 1
    mask = torch.zeros_like(values, dtype=torch.bool)
    mask[order[:count]] = True
    return mask
