"""Hindsight probabilities equal those of retrained models.

Softmax regression f = W a, with a constant input for the bias, is trained to the minimum theta of

    L(theta) = sum_{i <= n} -log p(y_i | x_i, theta) + ridge / 2 |theta|^2,

and retrained with one more term -log p(y | x, theta). The gradient of that term at the first minimum is g_y, and L's
Hessian there is n F + ridge: logits are linear in theta, so the Hessian of each loss is (diag p - p p^T) (x) a a^T,
which does not depend on the label and is the exact Fisher. One Newton step from the first minimum gives

    theta_new = theta - (n F + ridge)^-1 g_y + O(n^-2),
    log p_new(y | x) = log p(y | x) + g_y^T (n F + ridge)^-1 g_y + O(n^-2) = log p + IF / n + O(n^-2),

with IF = g_y^T (F + delta)^-1 g_y and delta = ridge / n. So p_y (1 + IF/n) is the label's probability in the model
that has seen it, with an error that falls like n^-2.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor, nn

from comparison import assert_same
from ifcomp import IFComp
from oracles import (
    OracleBlock,
    block_jacobian,
    dense_fisher,
    dense_influence,
    example_jacobians,
    example_logits,
    label_gradients,
    label_probabilities,
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Regression:
    """Softmax regression in numpy: inputs [n, J], labels [n], and the ridge."""

    inputs: Array
    labels: NDArray[np.int64]
    classes: int
    ridge: float

    def probabilities(self, theta: Array, inputs: Array) -> Array:
        """``softmax(W a)``, [B, K]."""
        logits = inputs @ theta.reshape(self.classes, -1).T
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        return shifted / shifted.sum(1, keepdims=True)

    def gradient(self, theta: Array) -> Array:
        """Gradient of the objective, [K J]."""
        residuals = self.probabilities(theta, self.inputs) - np.eye(self.classes)[self.labels]
        return (residuals.T @ self.inputs).ravel() + self.ridge * theta

    def hessian(self, theta: Array) -> Array:
        """Hessian of the objective, [K J, K J]."""
        p = self.probabilities(theta, self.inputs)
        spread = p[:, :, None] * np.eye(self.classes) - p[:, :, None] * p[:, None, :]
        blocks = np.einsum("bkl,bi,bj->kilj", spread, self.inputs, self.inputs)
        return blocks.reshape(len(theta), len(theta)) + self.ridge * np.eye(len(theta))

    def minimum(self, start: Array | None = None) -> Array:
        """The parameters at which the gradient vanishes, [K J]."""
        theta = np.zeros(self.classes * self.inputs.shape[1]) if start is None else start
        solution = optimize.root(self.gradient, theta, jac=self.hessian, method="hybr", options={"xtol": 1e-14})
        assert np.abs(self.gradient(solution.x)).max() < 1e-12 * len(self.inputs)
        return solution.x

    def with_example(self, example: Array, label: int) -> "Regression":
        """The same data with one more example."""
        inputs, labels = np.vstack([self.inputs, example]), np.append(self.labels, label)
        return Regression(inputs, labels, self.classes, self.ridge)

    def network(self, theta: Array) -> nn.Module:
        """The regression as a model for the oracle and the library."""
        model = nn.Linear(self.inputs.shape[1], self.classes, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(theta.reshape(self.classes, -1)))
        return model

    def retrained(self, theta: Array, example: Array) -> Array:
        """Probability of each label in the model that was also trained on it, [K]."""
        return np.array(
            [
                self.probabilities(self.with_example(example, label).minimum(theta), example[None])[0, label]
                for label in range(self.classes)
            ]
        )


def damped_inverse(matrix: Tensor, damping: float) -> Tensor:
    """Inverse of the matrix with damping on its diagonal."""
    return torch.linalg.inv(matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype))


def hindsight(p: Tensor, influence: Tensor, count: int) -> Array:
    """``p_y (1 + IF / n)``, [B, K]."""
    return (p * (1 + influence / count)).numpy()


def slope(sizes: list[int], errors: list[float]) -> float:
    """Exponent of a power law through the errors."""
    return float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


SIZES = [100, 200, 400, 800, 1600]


def test_hindsight_probability_is_that_of_the_retrained_model() -> None:
    """With the dense Fisher of softmax regression the error falls like ``n^-2``; without influence like ``n^-1``."""
    rng = np.random.default_rng(0)
    inputs = np.column_stack([rng.normal(size=(SIZES[-1], 3)), np.ones(SIZES[-1])])
    truth = rng.normal(size=(3, 4))
    labels = (inputs @ truth.T + rng.gumbel(size=(SIZES[-1], 3))).argmax(1)
    examples = np.column_stack([rng.normal(size=(6, 3)), np.ones(6)])
    errors, without = [], []
    for size in SIZES:
        data = Regression(inputs[:size], labels[:size], 3, ridge=0.5)
        theta = data.minimum()
        model = data.network(theta)
        block = OracleBlock("kronecker", ("weight",))
        train, test = torch.from_numpy(data.inputs), torch.from_numpy(examples)
        p_train = label_probabilities(example_logits(model, train), 1.0)
        jacobian = block_jacobian(example_jacobians(model, train), block)
        fisher = dense_fisher(label_gradients(jacobian, p_train), p_train)
        np.testing.assert_allclose(size * fisher.numpy() + 0.5 * np.eye(12), data.hessian(theta), atol=1e-9)
        p = label_probabilities(example_logits(model, test), 1.0)
        gradients = label_gradients(block_jacobian(example_jacobians(model, test), block), p)
        influence = dense_influence(gradients, damped_inverse(fisher, data.ridge / size))
        retrained = np.stack([data.retrained(theta, example) for example in examples])
        errors.append(float(np.abs(retrained - hindsight(p, influence, size)).mean()))
        without.append(float(np.abs(retrained - p.numpy()).mean()))
    assert -2.4 <= slope(SIZES, errors) <= -1.6
    assert -1.2 <= slope(SIZES, without) <= -0.8, "the error of the trained model is of order 1/n"
    assert errors[-1] < 0.02 * without[-1]


def categories(size: int, ridge: float) -> Regression:
    """Data for which EKFAC is exact: one of three categories as input, and two classes.

    With one-hot inputs the Fisher is block-diagonal over categories. With two classes every ``diag p - p p^T`` has the
    eigenvectors (1, 1) and (1, -1). The categories have different frequencies, so the eigenvectors of the input
    covariance are unique.
    """
    category = np.repeat([0, 1, 2], [size // 2, size * 3 // 10, size // 5])
    labels = np.zeros(size, dtype=np.int64)
    for index, share in enumerate((0.3, 0.6, 0.8)):
        rows = np.flatnonzero(category == index)
        labels[rows[: round(share * len(rows))]] = 1
    return Regression(np.eye(3)[category], labels, 2, ridge)


def test_library_gives_the_retrained_model_where_ekfac_is_exact() -> None:
    """The influence of the library, damped by the ridge over n."""
    examples = np.array([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [1.0, -1.0, 0.5], [0.3, 0.3, 0.3]])
    errors = []
    for size in SIZES:
        data = categories(size, ridge=0.5)
        theta = data.minimum()
        model, damping = data.network(theta), data.ridge / size
        ifc = IFComp(model, fisher="exact", damping=damping).fit([torch.from_numpy(data.inputs)])
        test = torch.from_numpy(examples)
        influence = ifc.influence(test)
        p = label_probabilities(example_logits(model, test), 1.0)
        block = OracleBlock("kronecker", ("weight",))
        gradients = label_gradients(block_jacobian(example_jacobians(model, test), block), p)
        inverse = size * np.linalg.inv(data.hessian(theta))
        assert_same(influence, dense_influence(gradients, torch.from_numpy(inverse)))
        retrained = np.stack([data.retrained(theta, example) for example in examples])
        errors.append(float(np.abs(retrained - hindsight(p, influence, size)).mean()))
    assert -2.4 <= slope(SIZES, errors) <= -1.6


@pytest.mark.parametrize("layer", ["linear", "embedding"])
def test_library_gives_the_counts_of_a_table(layer: str) -> None:
    """Without a ridge retraining is counting: ``k_y / n_v`` becomes ``(k_y + 1) / (n_v + 1)``.

    ``p_y (1 + IF/n)`` is ``k_y / n_v + (1 - k_y / n_v) / n_v``, which is equal up to ``n_v^-2``.
    """
    data = categories(200, ridge=0.0)
    counts = np.stack([data.inputs.T @ (data.labels == label) for label in range(2)], 1)  # [V, K]
    totals = counts.sum(1, keepdims=True)
    table = torch.from_numpy(np.log(counts / totals))
    if layer == "linear":
        model, train, test = nn.Linear(3, 2, bias=False), torch.from_numpy(data.inputs), torch.eye(3).double()
        model = model.double()
        values = table.T
    else:
        model, train, test = nn.Embedding(3, 2).double(), torch.from_numpy(data.inputs.argmax(1)), torch.arange(3)
        values = table
    with torch.no_grad():
        model.weight.copy_(values)
    ifc = IFComp(model, fisher="exact", damping=1e-13).fit([train])
    p = torch.from_numpy(counts / totals)
    result = hindsight(p, ifc.influence(test), 200)
    share = counts / totals
    np.testing.assert_allclose(result, share + (1 - share) / totals, rtol=1e-9)
    np.testing.assert_allclose(result, (counts + 1) / (totals + 1), atol=float((totals**-2.0).max()))


def test_library_gives_the_counts_of_many_classes() -> None:
    """With one category EKFAC is exact for any number of classes."""
    counts = np.array([50.0, 30.0, 15.0, 4.0, 1.0])
    model = nn.Embedding(1, 5).double()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(np.log(counts / 100))[None])
    ifc = IFComp(model, fisher="exact", damping=1e-13).fit([torch.zeros(100, dtype=torch.long)])
    share = torch.from_numpy(counts / 100)[None]
    result = hindsight(share, ifc.influence(torch.zeros(1, dtype=torch.long)), 100)[0]
    np.testing.assert_allclose(result, counts / 100 + (1 - counts / 100) / 100, rtol=1e-9)
    np.testing.assert_allclose(result, (counts + 1) / 101, atol=1e-4)
    assert math.isclose(float(ifc.factors.effective_parameters(1e-13)), 4.0, rel_tol=1e-9)
