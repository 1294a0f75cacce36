"""What the quantities must be where mathematics gives the answer: exact cases, identities, limits and retraining."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor, nn

from cases import LAYER_CASES, MODEL_CASES, NORM_CASES, Case, normal, seeded, weight
from comparison import assert_same, basis_arguments, dense, dense_moments, fitted, library_block, oracle_blocks
from ifcomp import IFComp, complexity
from ifcomp.curvature.factors import Damping, Relative
from oracles import (
    OracleBlock,
    block_jacobian,
    dense_fisher,
    dense_influence,
    example_jacobians,
    example_logits,
    expected_second_moments,
    label_gradients,
    label_probabilities,
    rotation_matrix,
)

Array = NDArray[np.float64]

ALL_CASES = {case.name: case for case in (*LAYER_CASES, *MODEL_CASES)}
FEW_CASES = [
    ALL_CASES[name]
    for name in (
        *("linear", "linear_tokens", "conv2d_groups", "conv2d_same_even", "batchnorm2d", "embedding_padding"),
        *("attention", "conv_twice", "tied", "class_token", "lenet", "bert"),
    )
]
SIZE = 7


def uniform_damping(matrix: Tensor, damping: float) -> Tensor:
    """Inverse of the matrix with damping on its diagonal."""
    return torch.linalg.inv(matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype))


# Where EKFAC is exact ----------------------------------------------------------------------------------------------


class Offset(nn.Module):
    """``W a + z``: with ``W = 0`` the distribution depends on the given offset ``z`` alone, and not on ``a``."""

    def __init__(self, layer: nn.Linear) -> None:
        """Keeps the layer."""
        super().__init__()
        self.layer = layer

    def forward(self, a: Tensor, z: Tensor) -> Tensor:
        """Logits [B, K]."""
        return self.layer(a) + z


def product_design() -> tuple[nn.Module, dict[str, Tensor], float]:
    """Every input beside every distribution of labels, so that ``E[S (x) a a^T] = E[S] (x) E[a a^T]``."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    offsets = 2 * torch.randn(5, 3, generator=generator, dtype=torch.float64)
    model = Offset(nn.Linear(4, 3).double())
    with torch.no_grad():
        model.layer.weight.zero_()
        model.layer.bias.zero_()
    return model, {"a": inputs.repeat_interleave(5, 0), "z": offsets.repeat(6, 1)}, 1.0


def uniform_labels() -> tuple[nn.Module, dict[str, Tensor], float]:
    """At ``beta = 0`` every example has the same distribution, whatever the weights and inputs are."""
    model, data, _ = product_design()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.layer.weight.normal_(generator=generator)
    return model, {name: torch.randn(value.shape, generator=generator).double() for name, value in data.items()}, 0.0


@pytest.mark.parametrize("design", [product_design, uniform_labels])
def test_ekfac_is_the_fisher_where_it_is_a_kronecker_product(design: object) -> None:
    model, data, beta = design()
    ifc = IFComp(model, beta=beta, fisher="exact").fit([data])
    block = OracleBlock("kronecker", ("layer.weight", "layer.bias"))
    p = label_probabilities(example_logits(model, data), beta)
    gradients = label_gradients(block_jacobian(example_jacobians(model, data), block), p)
    fisher = dense_fisher(gradients, p)

    own = library_block(ifc, block)
    moments = ifc.factors.blocks[own.name].second_moments
    rotation = rotation_matrix(moments.shape, **basis_arguments(ifc, own))
    assert_same(rotation @ torch.diag(moments.flatten()) @ rotation.T, fisher, floor=1e-13)
    for damping in (1e-1, 1e-3, 1e-6):
        expected = dense_influence(gradients, uniform_damping(fisher, damping))
        assert_same(ifc.influence(data, damping=damping), expected)


def test_ekfac_is_not_the_fisher_otherwise() -> None:
    """The comparison above can fail: away from the product design the two differ."""
    model, data, beta = product_design()
    with torch.no_grad():
        model.layer.weight.normal_(generator=torch.Generator().manual_seed(1))
    ifc = IFComp(model, beta=beta, fisher="exact").fit([data])
    block = OracleBlock("kronecker", ("layer.weight", "layer.bias"))
    p = label_probabilities(example_logits(model, data), beta)
    gradients = label_gradients(block_jacobian(example_jacobians(model, data), block), p)
    expected = dense_influence(gradients, uniform_damping(dense_fisher(gradients, p), 1e-3))
    assert float((ifc.influence(data, damping=1e-3) / expected - 1).abs().max()) > 0.05


@pytest.mark.parametrize("beta", [1.0, 0.0])
@pytest.mark.parametrize("case", [*NORM_CASES, ALL_CASES["tied"], ALL_CASES["class_token"]], ids=str)
def test_diagonal_block_is_the_diagonal_of_the_fisher(case: Case, beta: float) -> None:
    ifc, examples = fitted(case, beta=beta), dense(case, SIZE)
    blocks = [block for block in case.blocks if block.kind == "diagonal"]
    blocks += [OracleBlock("diagonal", (name,)) for name in case.other]
    assert blocks
    for block in blocks:
        fisher = dense_fisher(examples.gradients(block, beta), examples.probability(beta))
        found = ifc.factors.blocks[library_block(ifc, block).name]
        assert found.basis is None
        assert_same(found.second_moments, fisher.diagonal(), floor=1e-20)


# The scale of expected influence -----------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [1e-1, 1e-4, 1e-9, Relative(0.1), Relative(1e-6)], ids=str)
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_training_mean_of_expected_influence(case: Case, damping: Damping) -> None:
    """It is ``sum Lambda / (Lambda + delta)`` with the exact Fisher, for any damping and any basis."""
    ifc, examples = fitted(case, beta=0.7), dense(case, SIZE)
    influence = ifc.influence(examples.inputs, damping=damping)
    training_mean = float((examples.probability(0.7) * influence).sum(1).mean())
    assert training_mean == pytest.approx(ifc.factors.effective_parameters(damping), rel=1e-9)
    expected = 0.0
    for _, moments in dense_moments(ifc, case, examples).values():
        delta = damping.multiple * float(moments.mean()) if isinstance(damping, Relative) else damping
        expected += float((moments / (moments + delta)).sum())
    assert training_mean == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_training_mean_counts_the_parameters_with_curvature(case: Case) -> None:
    """As damping goes to 0, with the directions counted in the oracle's second moments."""
    ifc, examples = fitted(case), dense(case, SIZE)
    moments = [expected for _, expected in dense_moments(ifc, case, examples).values()]
    directions = sum(int(curved(entries).sum()) for entries in moments)
    damping = 1e-10 * min(float(entries[curved(entries)].min()) for entries in moments)
    influence = ifc.influence(examples.inputs, damping=damping)
    assert float((examples.probability(1.0) * influence).sum(1).mean()) == pytest.approx(directions, abs=1e-6)
    assert ifc.factors.effective_parameters(damping) == pytest.approx(directions, abs=1e-6)


def curved(moments: Tensor) -> Tensor:
    """Which second moments are more than the square of what rounding leaves of a gradient."""
    return moments > 1e-22 * moments.max()


def test_only_the_free_direction_of_the_softmax_has_no_curvature() -> None:
    """A constant added to all logits changes nothing, for each of the head's inputs and its bias."""
    case = Case(
        "cnn",
        seeded(
            lambda: nn.Sequential(
                *(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 5, 3, stride=2), nn.Tanh(), nn.Flatten()),
                *(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 4)),
            )
        ),
        normal(1, 7, 7),
        4,
        (weight("0"), weight("2"), weight("5"), weight("7")),
    )
    ifc, examples = fitted(case, size=60), dense(case, 60)
    parameters = sum(parameter.numel() for parameter in ifc.model.parameters())
    flat = {name: (~curved(moments)).sum(-1) for name, (moments, _) in dense_moments(ifc, case, examples).items()}
    assert {name: int(count.sum()) for name, count in flat.items()} == {"0": 0, "2": 0, "5": 0, "7": 8 + 1}
    assert flat["7"].tolist() == [[9, 0, 0, 0]], "all in one row of the eigenbasis"
    head = ifc.factors.blocks["7"].basis.outputs[0, :, 0]
    assert_same(head.abs(), torch.full((4,), 0.5, dtype=torch.float64))
    assert head.sum().abs() == pytest.approx(2.0), "the direction (1, 1, 1, 1)"
    influence = ifc.influence(examples.inputs, damping=1e-13)
    assert float((examples.probability(1.0) * influence).sum(1).mean()) == pytest.approx(parameters - 9, abs=1e-4)


@pytest.mark.parametrize("damping", [1e-1, 1e-6, Relative(0.1)], ids=str)
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_surprise_has_training_mean_one(case: Case, damping: Damping) -> None:
    ifc = fitted(case, beta=0.7)
    table = ifc.score([dense(case, SIZE).inputs], damping=damping).frame
    assert table["surprise"].mean() == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("case", [ALL_CASES["linear"], ALL_CASES["bert"]], ids=str)
def test_without_damping_only_directions_with_curvature_count(case: Case) -> None:
    """Undamped is the pseudo-inverse: what rounding leaves in a direction without curvature is no curvature."""
    ifc, examples = fitted(case), dense(case, SIZE)
    expected, directions = torch.zeros_like(examples.logits), 0
    for block in oracle_blocks(case):
        arguments, gradients = basis_arguments(ifc, library_block(ifc, block)), examples.gradients(block, 1.0)
        rotation = rotation_matrix(gradients.shape[2:], **arguments)
        moments = expected_second_moments(gradients, examples.probability(1.0), **arguments).flatten()
        kept = rotation[:, curved(moments)]
        expected += dense_influence(gradients, kept @ torch.diag(1 / moments[curved(moments)]) @ kept.T)
        directions += kept.shape[1]
    assert ifc.factors.effective_parameters(0.0) == pytest.approx(directions, rel=1e-9)
    assert_same(ifc.influence(examples.inputs, damping=0.0), expected)
    assert ifc.score([examples.inputs], damping=0.0).frame["surprise"].mean() == pytest.approx(1.0, rel=1e-9)


# The logit kernel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_influence_is_a_form_in_the_logit_kernel(case: Case, beta: float) -> None:
    ifc, examples = fitted(case, beta=beta), dense(case, size=5, seed=0)
    p, kernel = examples.probability(beta).numpy(), ifc.logit_kernel(examples.inputs).numpy()
    influence = ifc.influence(examples.inputs).numpy()
    residuals = p[:, None, :] - np.eye(case.num_classes)
    np.testing.assert_allclose(np.einsum("byk,bkl,byl->by", residuals, kernel, residuals), influence, rtol=1e-9)

    covariance = np.einsum("bk,kl->bkl", p, np.eye(case.num_classes)) - p[:, :, None] * p[:, None, :]
    trace = np.trace(covariance @ kernel, axis1=1, axis2=2)
    np.testing.assert_allclose(trace, (p * influence).sum(1), rtol=1e-9)
    table = ifc.score([examples.inputs]).frame
    np.testing.assert_allclose(table["expected_influence"], trace, rtol=1e-9)

    largest = np.abs(kernel).max(axis=(1, 2), keepdims=True)
    assert (np.abs(kernel - kernel.swapaxes(1, 2)) <= 1e-13 * largest).all()
    assert (np.linalg.eigvalsh(kernel) >= -1e-12 * largest[..., 0]).all()


# The limit of beta -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [ALL_CASES[name] for name in ("linear", "linear_tokens", "conv2d", "batchnorm2d", "embedding", "attention")],
    ids=str,
)
def test_influence_is_linear_in_a_small_beta(case: Case) -> None:
    """``beta = 0`` is the limit: the difference to it falls tenfold with beta, in every entry."""
    inputs = dense(case, size=5, seed=0).inputs
    limit = fitted(case, beta=0.0).influence(inputs)
    assert (limit > 0).all()
    betas = (1e-2, 1e-3, 1e-4)
    errors = [(fitted(case, beta=beta).influence(inputs) - limit).abs() for beta in betas]
    assert float((errors[0] / limit).max()) < 0.05
    for larger, smaller in itertools.pairwise(errors):
        assert float(larger.norm() / smaller.norm()) == pytest.approx(10.0, rel=0.01)


# Codelengths -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Random probabilities and influences: as tensors for the library, as arrays for the formulas."""

    p: Tensor
    influence: Tensor
    count: int = 50

    @property
    def arrays(self) -> tuple[Array, Array]:
        """The same in numpy."""
        return self.p.numpy(), self.influence.numpy()


def scores(size: int = 40, classes: int = 5) -> Scores:
    """Influences from far less to far more than n, and confident as well as uniform distributions."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(size, classes)) * rng.choice([0.1, 1.0, 10.0], size=(size, 1))
    p = np.exp(logits - logits.max(1, keepdims=True))
    influence = np.exp(rng.normal(scale=5, size=(size, classes)))
    return Scores(torch.from_numpy(p / p.sum(1, keepdims=True)), torch.from_numpy(influence))


@pytest.mark.parametrize("alpha", [0.0, 0.15, 1.0, 30.0, 1e30])
def test_pnml_distribution(alpha: float) -> None:
    given = scores()
    p, influence = given.arrays
    hindsight = p * (1 + alpha / given.count * influence)
    expected = hindsight / hindsight.sum(1, keepdims=True)
    found = complexity.pnml_distribution(given.p, given.influence, given.count, alpha).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(found.sum(1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(
        complexity.hindsight_probabilities(given.p, given.influence, given.count, alpha).numpy(), hindsight, rtol=1e-12
    )
    if alpha == 0:
        np.testing.assert_allclose(found, p, rtol=1e-15)
    if alpha == 1e30:
        weighted = p * influence
        np.testing.assert_allclose(found, weighted / weighted.sum(1, keepdims=True), rtol=1e-12)
        assert (found.argmax(1) != p.argmax(1)).any(), "the case in which keep_argmax matters"


@pytest.mark.parametrize("alpha", [0.0, 0.15, 1.0, 30.0, 1e30])
def test_pnml_distribution_that_keeps_the_argmax(alpha: float) -> None:
    given = scores()
    p, influence = given.arrays
    doubt = alpha * (p * influence).sum(1, keepdims=True) / given.count
    found = complexity.pnml_distribution(given.p, given.influence, given.count, alpha, keep_argmax=True).numpy()
    np.testing.assert_allclose(found, (p + doubt / 5) / (1 + doubt), rtol=1e-12)
    np.testing.assert_allclose(found.sum(1), 1.0, rtol=1e-12)
    if alpha == 0:
        np.testing.assert_allclose(found, p, rtol=1e-15)
    if alpha <= 30.0:  # beyond, nothing of the distribution is left in float64
        np.testing.assert_array_equal(found.argmax(1), p.argmax(1))
    top = p.argmax(1)
    assert (found[np.arange(len(found)), top] == found.max(1)).all()


def test_huge_influences_stay_a_distribution() -> None:
    """As they come from directions with hardly any curvature and hardly any damping."""
    p, influence = (torch.tensor([row], dtype=torch.float64) for row in ([0.9, 0.1], [1e250, 1e270]))
    for keep in (False, True):
        found = complexity.pnml_distribution(p, influence, 10, 1e30, keep_argmax=keep)
        assert found.isfinite().all()
        assert float(found.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("alpha", [0.0, 0.15, 1.0, 1e30])
def test_codelengths(alpha: float) -> None:
    given = scores()
    p, influence = given.arrays
    labels = np.arange(len(p)) % 5
    rows = np.arange(len(p))
    n = given.count
    expected_influence = (p * influence).sum(1)
    np.testing.assert_allclose(
        complexity.expected_influence(given.p, given.influence).numpy(), expected_influence, rtol=1e-12
    )
    error = -np.log(p[rows, labels])
    found_error = complexity.codelength(given.p.log(), torch.from_numpy(labels))
    np.testing.assert_allclose(found_error.numpy(), error, rtol=1e-12)

    expected = torch.from_numpy(expected_influence)
    parametric = complexity.parametric_complexity(expected, n, alpha)
    np.testing.assert_allclose(parametric.numpy(), np.log(1 + alpha / n * expected_influence), rtol=1e-9, atol=1e-15)
    linear = complexity.parametric_complexity(expected, n, alpha, linearized=True)
    np.testing.assert_allclose(linear.numpy(), alpha / n * expected_influence, rtol=1e-12)
    assert (linear >= parametric).all()
    if alpha:
        np.testing.assert_array_equal(linear.argsort(), expected_influence.argsort())
        np.testing.assert_array_equal(parametric.argsort(), expected_influence.argsort())

    own = influence[rows, labels]
    regret = complexity.regret(torch.from_numpy(own), n, alpha)
    np.testing.assert_allclose(regret.numpy(), np.log(1 + alpha / n * own), rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(
        complexity.regret(torch.from_numpy(own), n, alpha, linearized=True).numpy(), alpha / n * own, rtol=1e-12
    )

    seen = complexity.stochastic_complexity(found_error, parametric).numpy()
    np.testing.assert_allclose(seen, error + np.log(1 + alpha / n * expected_influence), rtol=1e-9)
    unseen = complexity.stochastic_complexity(found_error, parametric, regret).numpy()
    hindsight = p * (1 + alpha / n * influence)
    log_expected = -np.log(hindsight[rows, labels]) + np.log(hindsight.sum(1))
    np.testing.assert_allclose(unseen, log_expected, rtol=1e-9, atol=1e-9)
    if alpha == 0:
        np.testing.assert_allclose(seen, error, rtol=1e-12)
        np.testing.assert_allclose(unseen, error, rtol=1e-12)


def test_small_complexities_do_not_cancel() -> None:
    tiny = torch.tensor([1e-18, 1e-12], dtype=torch.float64)
    for found in (complexity.parametric_complexity(tiny, 100), complexity.regret(tiny, 100)):
        np.testing.assert_allclose(found.numpy(), [1e-20, 1e-14], rtol=1e-12)


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("linearized", [True, False])
def test_predictor_gives_the_formulas(seen: bool, linearized: bool) -> None:
    """From the library's influence to its codelengths, in plain numpy."""
    case, alpha, labels = ALL_CASES["lenet"], 0.4, torch.arange(5) % 4
    ifc, examples = fitted(case, beta=0.3), dense(case, size=5, seed=0)
    p, influence = examples.probability(0.3).numpy(), ifc.influence(examples.inputs).numpy()
    ratio, mean_ratio = alpha / SIZE * influence, alpha / SIZE * (p * influence).sum(1)
    parametric = mean_ratio if linearized else np.log1p(mean_ratio)
    np.testing.assert_allclose(
        ifc.parametric_complexity(examples.inputs, alpha=alpha, linearized=linearized), parametric, rtol=1e-9
    )
    own = (np.arange(5), labels.numpy())
    regret = ratio[own] if linearized else np.log1p(ratio[own])
    error = -np.log(p[own])
    stochastic = error + parametric - (0 if seen else regret)
    found = ifc.stochastic_complexity(examples.inputs, labels, alpha=alpha, linearized=linearized, seen=seen)
    np.testing.assert_allclose(found, stochastic, rtol=1e-9)
    table = ifc.score([(examples.inputs, labels)], alpha=alpha, linearized=linearized, seen=seen).frame
    columns = {
        "parametric_complexity": parametric,
        "stochastic_complexity": stochastic,
        "regret": regret,
        "error": error,
        "influence": influence[own],
        "confidence": p.max(1),
        "prediction": p.argmax(1),
        "label_probability": p[own],
    }
    for name, column in columns.items():
        np.testing.assert_allclose(table[name], column, rtol=1e-9, err_msg=name)
    hindsight = p * (1 + ratio)
    found = ifc.predict_proba(examples.inputs, alpha=alpha).numpy()
    np.testing.assert_allclose(found, hindsight / hindsight.sum(1, keepdims=True), rtol=1e-9)


# Retraining --------------------------------------------------------------------------------------------------------
#
# Softmax regression f = W a (a bias is an a that is always 1) is trained to the minimum theta of
#
#     L(theta) = sum_{i <= n} -log p(y_i | x_i, theta) + ridge / 2 |theta|^2,
#
# and retrained with one more term -log p(y | x, theta). The gradient of that term at the first minimum is g_y, and L's
# Hessian there is n F + ridge: logits are linear in theta, so the Hessian of each loss is (diag p - p p^T) (x) a a^T,
# which does not depend on the label and is the exact Fisher. One Newton step from the first minimum gives
#
#     theta_new = theta - (n F + ridge)^-1 g_y + O(n^-2),
#     log p_new(y | x) = log p(y | x) + g_y^T (n F + ridge)^-1 g_y + O(n^-2) = log p + IF / n + O(n^-2),
#
# with IF = g_y^T (F + delta)^-1 g_y and delta = ridge / n. So p_y (1 + IF/n) is the label's probability in the model
# that has seen it, with an error that falls like n^-2.


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
        """Of the objective, [K J]."""
        residuals = self.probabilities(theta, self.inputs) - np.eye(self.classes)[self.labels]
        return (residuals.T @ self.inputs).ravel() + self.ridge * theta

    def hessian(self, theta: Array) -> Array:
        """Of the objective, [K J, K J]."""
        p = self.probabilities(theta, self.inputs)
        spread = p[:, :, None] * np.eye(self.classes) - p[:, :, None] * p[:, None, :]
        blocks = np.einsum("bkl,bi,bj->kilj", spread, self.inputs, self.inputs)
        return blocks.reshape(len(theta), len(theta)) + self.ridge * np.eye(len(theta))

    def minimum(self, start: Array | None = None) -> Array:
        """Where the gradient vanishes."""
        theta = np.zeros(self.classes * self.inputs.shape[1]) if start is None else start
        found = optimize.root(self.gradient, theta, jac=self.hessian, method="hybr", options={"xtol": 1e-14})
        assert np.abs(self.gradient(found.x)).max() < 1e-12 * len(self.inputs)
        return found.x

    def with_example(self, example: Array, label: int) -> "Regression":
        """The same with one more example."""
        inputs, labels = np.vstack([self.inputs, example]), np.append(self.labels, label)
        return Regression(inputs, labels, self.classes, self.ridge)

    def network(self, theta: Array) -> nn.Module:
        """As a model for the oracle and the library."""
        model = nn.Linear(self.inputs.shape[1], self.classes, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(torch.from_numpy(theta.reshape(self.classes, -1)))
        return model

    def retrained(self, theta: Array, example: Array) -> Array:
        """Probability of each label in the model that has also been trained on it, [K]."""
        return np.array(
            [
                self.probabilities(self.with_example(example, label).minimum(theta), example[None])[0, label]
                for label in range(self.classes)
            ]
        )


def hindsight(p: Tensor, influence: Tensor, count: int) -> Array:
    """``p_y (1 + IF / n)``, [B, K]."""
    return (p * (1 + influence / count)).numpy()


def slope(sizes: list[int], errors: list[float]) -> float:
    """Exponent of a power law through the errors."""
    return float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


SIZES = [100, 200, 400, 800, 1600]


def test_hindsight_probability_is_that_of_the_retrained_model() -> None:
    """With the dense Fisher of softmax regression the error falls like ``n^-2``, and the influence term is not idle."""
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
        influence = dense_influence(gradients, uniform_damping(fisher, data.ridge / size))
        retrained = np.stack([data.retrained(theta, example) for example in examples])
        errors.append(float(np.abs(retrained - hindsight(p, influence, size)).mean()))
        without.append(float(np.abs(retrained - p.numpy()).mean()))
    assert -2.4 <= slope(SIZES, errors) <= -1.6
    assert -1.2 <= slope(SIZES, without) <= -0.8, "the model itself is off by 1/n"
    assert errors[-1] < 0.02 * without[-1]


def categories(size: int, ridge: float) -> Regression:
    """One of three categories as input, two classes: the Fisher is a Kronecker form, whatever the labels are.

    With one-hot inputs it is block-diagonal over categories, and with two classes every ``diag p - p p^T`` has the
    eigenvectors (1, 1) and (1, -1). The categories' different frequencies make their covariance's eigenvectors unique.
    """
    category = np.repeat([0, 1, 2], [size // 2, size * 3 // 10, size // 5])
    labels = np.zeros(size, dtype=np.int64)
    for index, share in enumerate((0.3, 0.6, 0.8)):
        rows = np.flatnonzero(category == index)
        labels[rows[: round(share * len(rows))]] = 1
    return Regression(np.eye(3)[category], labels, 2, ridge)


def test_library_gives_the_retrained_model_where_ekfac_is_exact() -> None:
    """The same with the library's own influence, damped by the ridge over n."""
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
    """Without a ridge the refit is counting: ``k_y / n_v`` becomes ``(k_y + 1) / (n_v + 1)``.

    And ``p_y (1 + IF/n)`` is ``k_y / n_v + (1 - k_y / n_v) / n_v``, the same up to ``n_v^-2``.
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
    found = hindsight(p, ifc.influence(test), 200)
    share = counts / totals
    np.testing.assert_allclose(found, share + (1 - share) / totals, rtol=1e-9)
    np.testing.assert_allclose(found, (counts + 1) / (totals + 1), atol=float((totals**-2.0).max()))


def test_library_gives_the_counts_of_many_classes() -> None:
    """One category and any number of classes: the Fisher of a bias alone is its own Kronecker form."""
    counts = np.array([50.0, 30.0, 15.0, 4.0, 1.0])
    model = nn.Embedding(1, 5).double()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(np.log(counts / 100))[None])
    ifc = IFComp(model, fisher="exact", damping=1e-13).fit([torch.zeros(100, dtype=torch.long)])
    share = torch.from_numpy(counts / 100)[None]
    found = hindsight(share, ifc.influence(torch.zeros(1, dtype=torch.long)), 100)[0]
    np.testing.assert_allclose(found, counts / 100 + (1 - counts / 100) / 100, rtol=1e-9)
    np.testing.assert_allclose(found, (counts + 1) / 101, atol=1e-4)
    assert math.isclose(float(ifc.factors.effective_parameters(1e-13)), 4.0, rel_tol=1e-9)
