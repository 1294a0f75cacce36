"""`hindsight`: train the hindsight model of every example and label."""

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
from ifcomp.precision import as_double


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

    The paper has the arguments of KL in the other order; both have the same second-order expansion at theta_0. To
    second order the result is ``log p* - log p = alpha/n g^T (G_beta + lam/n)^-1 g``, that is ``alpha/n IF_beta`` with
    the paper's damping ``delta = lam / n``, which in the beta-free units of `IFComp` is ``damping = lam / (n beta^2)``.

    **Convergence.** A pair of example and label has converged when ``criterion`` is at most ``tolerance``. The
    criterion is the maximum, in nats, of three numbers: the change of the objective and the change of ``log p*_y`` over
    the last five steps of L-BFGS (fewer if the line search fails), and the contribution to the objective of the
    training examples outside the working set. The gradient norm is reported but is no criterion, because minima of
    networks with ReLU or max-pooling lie on kinks. For the same reason ``log p*_y`` of such networks is accurate to a
    few tolerances only: for a LeNet, where it increased by 10 to 27 nats, smaller tolerances and other preconditioners
    changed it by up to 0.2 nats. Pairs that do not converge are returned with ``converged`` false.

    The result is deterministic, and each pair is trained separately. The cost per pair is about 30 forward and backward
    passes over the working set (a few hundred examples for a confident network) and two or three forward passes over
    all training examples.

    Args:
        model: Classifier that returns logits [B, K]. Its trainable parameters are optimised in a copy. It is used in
            eval mode and is not modified.
        train_data: Batches ``(x, y)``, ``(x,)``, ``x`` or dicts: the n examples of the KL terms. Labels are ignored.
        x: Inputs of B examples.
        beta: Inverse temperature, positive.
        lam: lambda, weight of the squared distance, positive.
        alpha: Weight of the example relative to one training example, positive.
        labels: Labels to train with; None for all. The others are NaN in the result.
        tolerance: Tolerance of convergence in nats.
        max_iterations: Largest number of L-BFGS steps per pair.
        preconditioner: Symmetric linear map of vectors [P] (trainable parameters, flat, in the model's order), ideally
            close to ``(n G_beta + lam)^(-1/2)``. It changes the speed of convergence, not the result. None is
            ``lam^(-1/2)``, which suffices for a LeNet down to ``lam = 10`` at n = 5,000.
        results: JSON Lines file. Finished pairs are stored in it. A stored pair with the same weights, data, settings
            and example is reused; if it has not converged, it is trained again only with a larger ``max_iterations``.
            The file must not be shared by concurrent processes.
        progress: Show a progress bar; None shows it on terminals.

    Raises:
        SettingError: If a number is not positive, or the preconditioner is not symmetric.
        DataError: If data is empty, malformed or not finite, or labels are outside 0 ... K-1.
        StorageError: If the results file cannot be read or written.
    """
    settings = Settings(beta, lam, alpha, tolerance, max_iterations)
    batch = as_batch(x)
    check_inputs(batch)
    training = collect(train_data)
    store = None if results is None else PairFile(results)
    with evaluating(model), torch.inference_mode(False), torch.enable_grad():
        network = Network(model, settings.beta)
        theta = network.base()
        examples = [example.to(theta.device) for example in batch.split(1)]
        log_probabilities = base_log_probabilities(model, examples, beta)
        columns = check_columns(labels, log_probabilities.shape[1])
        log_base = base_log_probabilities(model, training.microbatches(theta.device), beta)
        root = preconditioner or (lambda vector: vector / math.sqrt(lam))
        problem = Problem(network, training, log_base, check_preconditioner(root, theta), settings)
        rows = train_pairs(
            examples,
            columns,
            partial(solve, problem),
            run=digest("hindsight", digest_model(model), training.digest(), beta, lam, alpha, tolerance),
            max_iterations=max_iterations,
            store=store,
            progress=progress,
        )
    return assemble(rows, log_probabilities)


def base_log_probabilities(model: nn.Module, batches: Iterable[Batch], beta: float = 1.0) -> Tensor:
    """Return ``log softmax(beta f(x))`` of the given model, [n, K] in float64, and check its outputs."""
    with torch.no_grad():
        parts = [torch.log_softmax(beta * as_double(run_model(model, batch)), 1) for batch in batches]
    if not parts:
        raise EmptyDataError("There is no example to train with: the inputs are empty.")
    return torch.cat(parts)


def check_columns(labels: Sequence[int] | None, num_classes: int) -> list[int]:
    """Return the labels to train with, or raise LabelError."""
    columns = list(range(num_classes)) if labels is None else [int(label) for label in labels]
    if not columns or len(set(columns)) < len(columns) or not all(0 <= label < num_classes for label in columns):
        raise LabelError(
            f"labels must be different whole numbers in 0 ... {num_classes - 1}, at least one, but are {columns}. "
            "Omit labels to train with all."
        )
    return columns
