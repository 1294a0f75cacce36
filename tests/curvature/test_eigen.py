"""Eigenvectors of covariances, and their names."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from comparison import assert_same
from ifcomp.blocks.block import Basis
from ifcomp.curvature.accumulation import CovarianceSums
from ifcomp.curvature.eigen import basis_tensors, collect_bases, eigenbases, eigenvectors
from ifcomp.errors import NonFiniteError


def spectrum(*eigenvalues: float) -> Tensor:
    """A random symmetric matrix [1, C, C] with these eigenvalues."""
    generator = torch.Generator().manual_seed(0)
    size = len(eigenvalues)
    vectors = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    return (vectors @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ vectors.T).unsqueeze(0)


def diagonal(*entries: float) -> Tensor:
    """A diagonal matrix [1, C, C]."""
    return torch.diag(torch.tensor(entries)).unsqueeze(0)


@pytest.mark.parametrize(
    "matrices",
    [
        spectrum(0.0, 0.0, 0.0, 2.0),
        spectrum(1.0, 1.0, 1.0, 1.0),
        spectrum(1e-300, 1e-12, 1.0, 1e12),
        torch.zeros(1, 3, 3, dtype=torch.float64),
        torch.zeros(1, 3, 3),
        torch.ones(1, 1, 1),
        torch.cat([spectrum(0.0, 1.0), torch.zeros(1, 2, 2, dtype=torch.float64)]),
        torch.full((1, 5, 5), 1e30),
        torch.zeros(2, 0, 0),
    ],
    ids=["rank 1", "degenerate", "wide", "zero", "zero single", "one", "groups", "large single", "empty"],
)
def test_eigenvectors_are_orthonormal_and_diagonalise(matrices: Tensor) -> None:
    vectors = eigenvectors("inputs/layer", matrices)
    assert vectors.dtype == matrices.dtype
    assert vectors.shape == matrices.shape
    assert_close(vectors.mT @ vectors, torch.eye(matrices.shape[-1]).to(vectors).expand_as(vectors))
    rotated = vectors.double().mT @ matrices.double() @ vectors.double()
    off_diagonal = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    largest = float(matrices.abs().max()) if matrices.numel() else 0.0
    rounding = 50 * torch.finfo(matrices.dtype).eps * largest
    assert not off_diagonal.numel() or float(off_diagonal.abs().max()) <= rounding


def test_the_smallest_eigenvalue_is_first() -> None:
    assert torch.equal(eigenvectors("inputs/layer", diagonal(2.0, 1.0)).abs(), torch.eye(2).flip(0).unsqueeze(0))


# Decompositions that do not converge


class FailingEigh:
    """Replaces `torch.linalg.eigh`; the first calls do not converge.

    Attributes:
        matrices: The argument of every call.
    """

    def __init__(self, failures: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.matrices: list[Tensor] = []
        self._failures, self._original = failures, torch.linalg.eigh
        monkeypatch.setattr(torch.linalg, "eigh", self)

    def __call__(self, matrix: Tensor) -> object:
        self.matrices.append(matrix.clone())
        if len(self.matrices) <= self._failures:
            raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")
        return self._original(matrix)


@pytest.mark.parametrize("failures", [1, 3])
def test_a_failed_decomposition_is_repeated_with_jitter(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    eigh = FailingEigh(failures, monkeypatch)
    matrix = spectrum(1.0, 2.0, 5.0, 40.0)
    vectors = eigenvectors("inputs/layer", matrix)
    assert len(eigh.matrices) == failures + 1
    assert torch.equal(eigh.matrices[0], matrix)
    jitters = [given - matrix for given in eigh.matrices]
    sizes = [float(jitter.diagonal(dim1=-2, dim2=-1).mean()) for jitter in jitters]
    assert sizes == sorted(set(sizes)), "the jitter grows"
    assert 0 < sizes[-1] <= 1e-5 * 12.0, "the jitter is small relative to the mean of the diagonal"
    for jitter in jitters:
        assert_same(jitter, torch.diag_embed(jitter.diagonal(dim1=-2, dim2=-1)), floor=1e-12)
    rotated = vectors.mT @ matrix @ vectors
    assert_same(rotated, diagonal(1.0, 2.0, 5.0, 40.0).double(), floor=1e-13)


def test_a_decomposition_that_never_converges_names_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    eigh = FailingEigh(math.inf, monkeypatch)
    with pytest.raises(NonFiniteError, match=r"layer 'body\.fc' does not converge"):
        eigenbases(CovarianceSums({}, [{"body.fc": spectrum(1.0, 2.0)}]))
    assert len(eigh.matrices) > 1


def test_single_precision_is_decomposed_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    eigh = FailingEigh(0, monkeypatch)
    assert eigenvectors("inputs/layer", spectrum(1.0, 2.0, 3.0).float()).dtype == torch.float32
    assert [matrix.dtype for matrix in eigh.matrices] == [torch.float64]


@pytest.mark.parametrize("entry", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["inputs", "output gradients"])
def test_a_covariance_that_is_not_finite_names_its_layer(side: str, entry: float) -> None:
    covariances = {name: torch.eye(3).unsqueeze(0) for name in ("body.0", "body.7.fc")}
    broken = {**covariances, "body.7.fc": covariances["body.7.fc"].clone()}
    broken["body.7.fc"][0, 0, 1] = entry
    sums = CovarianceSums(broken, [covariances]) if side == "inputs" else CovarianceSums(covariances, [broken])
    with pytest.raises(NonFiniteError, match=rf"the {side} of layer 'body\.7\.fc'"):
        eigenbases(sums)


# Bases of several fits

OUTPUTS = [{"a": diagonal(1.0, 2.0, 3.0), "b": diagonal(2.0, 3.0, 4.0)}, {"a": diagonal(3.0, 2.0, 1.0)}]
SUMS = CovarianceSums({"a": diagonal(2.0, 1.0)}, OUTPUTS)


def test_fits_share_their_input_basis() -> None:
    one, other = eigenbases(SUMS)
    assert one.keys() == {"a", "b"}
    assert other.keys() == {"a"}
    assert one["a"].inputs is other["a"].inputs
    assert one["b"].inputs is None
    assert torch.equal(one["a"].outputs.abs(), torch.eye(3).unsqueeze(0))
    assert torch.equal(other["a"].outputs.abs(), torch.eye(3).flip(0).unsqueeze(0))


def test_another_decomposition_can_be_given() -> None:
    names = []

    def decompose(name: str, matrix: Tensor) -> Tensor:
        names.append(name)
        return -matrix

    one, other = eigenbases(SUMS, decompose)
    assert names == ["inputs/a", "outputs/0/a", "outputs/0/b", "outputs/1/a"]
    assert torch.equal(one["b"].outputs, -OUTPUTS[0]["b"])
    assert torch.equal(other["a"].outputs, -OUTPUTS[1]["a"])


def test_covariances_and_their_eigenvectors_have_the_same_names() -> None:
    assert list(SUMS.tensors) == list(basis_tensors(eigenbases(SUMS)))


def test_bases_are_collected_from_their_tensors() -> None:
    """The name of a layer may contain slashes."""
    inputs = torch.eye(2)
    bases = [
        {"a/0": Basis(inputs, torch.eye(3)), "b": Basis(None, torch.eye(4))},
        {"a/0": Basis(inputs, -torch.eye(3))},
    ]
    for found, expected in zip(collect_bases(basis_tensors(bases), 2), bases, strict=True):
        assert found.keys() == expected.keys()
        for name, basis in expected.items():
            assert found[name].inputs is basis.inputs
            assert found[name].outputs is basis.outputs
