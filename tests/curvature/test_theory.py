"""Identities of the EKFAC approximation: where it is exact, the scale of expected influence, kernels and limits."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases import CASES, FEW_CASES, NORM_CASES, Case, normal, seeded, weight
from comparison import assert_same, basis_arguments, dense, dense_moments, fitted, library_block, oracle_blocks
from ifcomp import IFComp
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

#: One case for each block kind and way of use, and three whole models.
SOME_CASES = [
    CASES[name]
    for name in (
        *("linear", "linear_tokens", "conv2d_groups", "conv2d_same_even", "batchnorm2d", "embedding_padding"),
        *("attention", "conv_twice", "tied", "class_token", "lenet", "bert"),
    )
]
SIZE = 7


def damped_inverse(matrix: Tensor, damping: float) -> Tensor:
    """Inverse of the matrix with damping on its diagonal."""
    return torch.linalg.inv(matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype))


# Where EKFAC is exact


class Offset(nn.Module):
    """``W a + z``. With ``W = 0`` the distribution depends on the offset ``z`` and not on ``a``."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, a: Tensor, z: Tensor) -> Tensor:
        """Logits [B, K]."""
        return self.layer(a) + z


def product_design() -> tuple[nn.Module, dict[str, Tensor], float]:
    """Every input with every distribution of labels, so that ``E[S (x) a a^T] = E[S] (x) E[a a^T]``."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    offsets = 2 * torch.randn(5, 3, generator=generator, dtype=torch.float64)
    model = Offset(nn.Linear(4, 3).double())
    with torch.no_grad():
        model.layer.weight.zero_()
        model.layer.bias.zero_()
    return model, {"a": inputs.repeat_interleave(5, 0), "z": offsets.repeat(6, 1)}, 1.0


def uniform_labels() -> tuple[nn.Module, dict[str, Tensor], float]:
    """At ``beta = 0`` every example has the uniform distribution."""
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

    match = library_block(ifc, block)
    moments = ifc.factors.blocks[match.name].second_moments
    rotation = rotation_matrix(moments.shape, **basis_arguments(ifc, match))
    assert_same(rotation @ torch.diag(moments.flatten()) @ rotation.T, fisher, floor=1e-13)
    for damping in (1e-1, 1e-3, 1e-6):
        expected = dense_influence(gradients, damped_inverse(fisher, damping))
        assert_same(ifc.influence(data, damping=damping), expected)


def test_ekfac_is_not_the_fisher_otherwise() -> None:
    """Without the product design the two differ, so the comparison above can fail."""
    model, data, beta = product_design()
    with torch.no_grad():
        model.layer.weight.normal_(generator=torch.Generator().manual_seed(1))
    ifc = IFComp(model, beta=beta, fisher="exact").fit([data])
    block = OracleBlock("kronecker", ("layer.weight", "layer.bias"))
    p = label_probabilities(example_logits(model, data), beta)
    gradients = label_gradients(block_jacobian(example_jacobians(model, data), block), p)
    expected = dense_influence(gradients, damped_inverse(dense_fisher(gradients, p), 1e-3))
    assert float((ifc.influence(data, damping=1e-3) / expected - 1).abs().max()) > 0.05


@pytest.mark.parametrize("case", [*NORM_CASES, CASES["tied"], CASES["class_token"]], ids=str)
def test_diagonal_blocks_are_the_diagonal_of_the_fisher(case: Case) -> None:
    ifc, examples = fitted(case), dense(case, SIZE)
    blocks = [block for block in case.blocks if block.kind == "diagonal"]
    blocks += [OracleBlock("diagonal", (name,)) for name in case.other]
    assert blocks
    for block in blocks:
        fisher = dense_fisher(examples.gradients(block, 1.0), examples.probability(1.0))
        factors = ifc.factors.blocks[library_block(ifc, block).name]
        assert factors.basis is None
        assert_same(factors.second_moments, fisher.diagonal(), floor=1e-20)


# The scale of expected influence


@pytest.mark.parametrize("damping", [1e-1, 1e-9, Relative(0.1)], ids=str)
@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_training_mean_of_expected_influence(case: Case, damping: Damping) -> None:
    """With the exact Fisher it is ``sum Lambda / (Lambda + delta)``, for any damping and any basis."""
    ifc, examples = fitted(case, beta=0.7), dense(case, SIZE)
    influence = ifc.influence(examples.inputs, damping=damping)
    training_mean = float((examples.probability(0.7) * influence).sum(1).mean())
    assert training_mean == pytest.approx(ifc.factors.effective_parameters(damping), rel=1e-9)
    expected = 0.0
    for _, moments in dense_moments(ifc, case, examples).values():
        delta = damping.multiple * float(moments.mean()) if isinstance(damping, Relative) else damping
        expected += float((moments / (moments + delta)).sum())
    assert training_mean == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_training_mean_counts_the_parameters_with_curvature(case: Case) -> None:
    """In the limit of no damping; directions are counted in the second moments of the oracle."""
    ifc, examples = fitted(case), dense(case, SIZE)
    moments = [expected for _, expected in dense_moments(ifc, case, examples).values()]
    directions = sum(int(curved(entries).sum()) for entries in moments)
    damping = 1e-9 * min(float(entries[curved(entries)].min()) for entries in moments)
    influence = ifc.influence(examples.inputs, damping=damping)
    assert float((examples.probability(1.0) * influence).sum(1).mean()) == pytest.approx(directions, abs=1e-6)
    assert ifc.factors.effective_parameters(damping) == pytest.approx(directions, abs=1e-6)


def curved(moments: Tensor) -> Tensor:
    """Which second moments are larger than squared rounding errors of gradients."""
    return moments > 1e-22 * moments.max()


def test_only_the_free_direction_of_the_softmax_has_no_curvature() -> None:
    """A constant added to all logits changes no probability: one direction for each input and the bias of the head."""
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


@pytest.mark.parametrize("damping", [1e-6, Relative(0.1)], ids=str)
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_the_training_mean_of_expected_influence_is_the_number_of_effective_parameters(
    case: Case, damping: Damping
) -> None:
    ifc = fitted(case, beta=0.7)
    table = ifc.score([dense(case, SIZE).inputs], damping=damping).frame
    assert table["expected_influence"].mean() == pytest.approx(ifc.factors.effective_parameters(damping), rel=1e-9)


@pytest.mark.parametrize("case", [CASES["linear"], CASES["bert"]], ids=str)
def test_without_damping_only_directions_with_curvature_count(case: Case) -> None:
    """Without damping the inverse is the pseudo-inverse; rounding errors are not curvature."""
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
    mean = ifc.score([examples.inputs], damping=0.0).frame["expected_influence"].mean()
    assert mean == pytest.approx(directions, rel=1e-9)


# The logit kernel


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_influence_is_a_quadratic_form_in_the_logit_kernel(case: Case) -> None:
    beta = 0.3
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


# The limit of beta


@pytest.mark.parametrize(
    "case",
    [CASES[name] for name in ("linear", "linear_tokens", "conv2d", "batchnorm2d", "embedding", "attention")],
    ids=str,
)
def test_influence_is_linear_in_a_small_beta(case: Case) -> None:
    """The difference to ``beta = 0`` is proportional to beta."""
    inputs = dense(case, size=5, seed=0).inputs
    limit = fitted(case, beta=0.0).influence(inputs)
    assert (limit > 0).all()
    betas = (1e-2, 1e-3, 1e-4)
    errors = [(fitted(case, beta=beta).influence(inputs) - limit).abs() for beta in betas]
    assert float((errors[0] / limit).max()) < 0.05
    for larger, smaller in itertools.pairwise(errors):
        assert float(larger.norm() / smaller.norm()) == pytest.approx(10.0, rel=0.01)
