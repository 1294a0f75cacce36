"""`hindsight`: what a model could have said about an example, had it been trained with each of its labels."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch, as_batch
from ifcomp.data.checks import check_inputs
from ifcomp.errors import EmptyDataError, LabelError
from ifcomp.layers.forward import evaluating, run_model
from ifcomp.oracle.network import Network, collect, digest, digest_model
from ifcomp.oracle.pairs import PairFile, train_pairs
from ifcomp.oracle.precondition import Preconditioner, check_preconditioner
from ifcomp.oracle.results import Hindsight, assemble
from ifcomp.oracle.settings import Settings
from ifcomp.oracle.solve import Problem, solve


def hindsight(
    model: nn.Module,
    train_data: Iterable[Any],
    x: Any,
    *,
    beta: float = 1.0,
    lam: float,
    alpha: float = 1.0,
    labels: Sequence[int] | None = None,
    tolerance: float = 0.05,
    max_iterations: int = 500,
    preconditioner: Preconditioner | None = None,
    results: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Hindsight:
    """Train a hindsight model for every example and label on the Boltzmann proximal Bregman objective (eq. bpbo).

    From the fitted weights theta_0, with ``p = softmax(beta f)``, sums (not means) and natural logarithms, minimise

        ``alpha * -log p_theta(y | x) + sum_i=1..n KL(p_theta0(x_i) || p_theta(x_i)) + lam/2 |theta - theta_0|^2``

    The paper's equation has the arguments of KL the other way round; both have the same second order at theta_0. To
    second order the result is ``log p* - log p = alpha/n g^T (G_beta + lam/n)^-1 g``, that is ``alpha/n IF_beta`` with
    the paper's damping ``delta = lam / n``, which in the beta-free units of `IFComp` is ``damping = lam / (n beta^2)``.

    **Convergence.** A pair has converged when, over the last five steps of L-BFGS (fewer if no lower point is found),
    neither the objective nor ``log p*_y`` changed by more than ``tolerance`` nats, *and* all training examples that the
    steps did not look at add no more than ``tolerance`` nats to the objective, of which ``criterion`` is the maximum.
    The gradient is no criterion, since minima of networks with ReLU or max-pooling lie on kinks; its relative
    norm is reported. For the same reason ``log p*_y`` of such networks is known to a few tolerances only: on a LeNet,
    where it rose by 10 to 27 nats, smaller tolerances and other preconditioners moved it by up to 0.2 nats. Pairs that
    do not converge are returned with ``converged`` false.

    The result depends on nothing random, and each pair is trained alone. Cost: some 30 forward and backward passes over
    the training examples that matter (a few hundred for a confident network), and two or three forward passes over all
    of them, for each pair.

    Args:
        model: Returns logits [B, K]. Trainable parameters move; it is used in eval mode and comes back unchanged.
        train_data: Batches ``(x, y)``, ``(x,)``, ``x`` or dicts: the n examples to stay close on. Labels are not used.
        x: Inputs of B examples.
        beta: Inverse temperature, above 0.
        lam: lambda, weight of the squared distance, above 0.
        alpha: Weight of the example beside a training example.
        labels: Which labels to train with; None for all. The others are NaN in the result.
        tolerance: In nats.
        max_iterations: Most L-BFGS steps a pair.
        preconditioner: A symmetric linear map of vectors [P] (trainable parameters, flat, in the model's order), best
            close to ``(n G_beta + lam)^(-1/2)``: changes how quickly a pair converges, not what it converges to. None
            is ``lam^(-1/2)``, which is enough for a LeNet down to ``lam = 10`` at n = 5,000.
        results: A file of JSON lines. Pairs are stored as they are done, and those found in it that had the same
            weights, data, settings and example are not trained again; nor are they if not converged, unless
            ``max_iterations`` is larger than it was. For one process at a time.
        progress: Show a progress bar; None shows it on terminals.

    Raises:
        SettingError: If a number is not above 0, or the preconditioner is not symmetric.
        DataError: If data is empty, malformed or not finite, or labels are outside 0 ... K-1.
        StorageError: If the results cannot be read or written.
    """
    settings = Settings(beta, lam, alpha, tolerance, max_iterations)
    batch = as_batch(x)
    check_inputs(batch)
    points = collect(train_data)
    store = None if results is None else PairFile(results)
    with evaluating(model), torch.inference_mode(False), torch.enable_grad():
        network = Network(model, settings.beta)
        theta = network.base()
        examples = [example.to(theta.device) for example in batch.split(1)]
        log_probabilities = base_log_probabilities(model, examples, beta)
        columns = check_columns(labels, log_probabilities.shape[1])
        log_base = base_log_probabilities(model, points.pieces(theta.device), beta)
        root = preconditioner or (lambda vector: vector / math.sqrt(lam))
        problem = Problem(network, points, log_base, check_preconditioner(root, theta), settings)
        rows = train_pairs(
            examples,
            columns,
            partial(solve, problem),
            run=digest("hindsight", digest_model(model), points.digest(), beta, lam, alpha, tolerance),
            most=max_iterations,
            store=store,
            progress=progress,
        )
    return assemble(rows, log_probabilities)


def base_log_probabilities(model: nn.Module, batches: Iterable[Batch], beta: float = 1.0) -> Tensor:
    """``log softmax(beta f(x))`` of the model as it is, [n, K] in float64, with a look at what it returns."""
    with torch.no_grad():
        parts = [torch.log_softmax(beta * run_model(model, batch).double(), 1) for batch in batches]
    if not parts:
        raise EmptyDataError("There is no example to train with: the inputs are empty.")
    return torch.cat(parts)


def check_columns(labels: Sequence[int] | None, num_classes: int) -> list[int]:
    """The labels to train with, or LabelError."""
    found = list(range(num_classes)) if labels is None else [int(label) for label in labels]
    if not found or len(set(found)) < len(found) or not all(0 <= label < num_classes for label in found):
        raise LabelError(
            f"labels must be different whole numbers in 0 ... {num_classes - 1}, at least one, but are {found}. "
            "Leave labels out to train with all."
        )
    return found
