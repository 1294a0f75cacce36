"""Embedding blocks equal Kronecker blocks with one-hot inputs."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ifcomp.blocks.block import Basis
from ifcomp.blocks.embedding import EmbeddingBlock

ENTRIES, WIDTH, COTANGENTS = 6, 3, 2

#: Repeated indices, in every order.
INDICES = torch.tensor([[3, 5, 3, 3], [5, 5, 1, 0], [0, 1, 2, 4]])
BLOCK = EmbeddingBlock("table", "embedding", ("table.weight",), ENTRIES * WIDTH, ENTRIES, WIDTH)
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


OUTPUT_GRADS = random(len(INDICES), COTANGENTS, INDICES.shape[1], WIDTH)
BASIS = Basis(None, random(1, WIDTH, WIDTH))


def gradients(basis: Basis | None) -> Tensor:
    """``sum_t Q_S^T b_t e_t^T`` with one-hot vectors e, [B, C, D, V]."""
    one_hot = torch.nn.functional.one_hot(INDICES, ENTRIES).double()
    rotated = OUTPUT_GRADS if basis is None else OUTPUT_GRADS @ basis.outputs[0]
    return torch.einsum("bctd,btv->bcdv", rotated, one_hot)


@pytest.mark.parametrize("basis", [None, BASIS], ids=["parameters", "eigenbasis"])
def test_gradients(basis: Basis | None) -> None:
    assert_close(BLOCK.gradients(INDICES, OUTPUT_GRADS, basis), gradients(basis).flatten(2))


def test_covariance_of_outputs() -> None:
    vectors = OUTPUT_GRADS.reshape(-1, WIDTH)
    assert_close(BLOCK.output_covariance(OUTPUT_GRADS), (vectors.T @ vectors).unsqueeze(0))
    assert BLOCK.input_covariance(INDICES, None) is None


def test_second_moments_are_added() -> None:
    total = torch.ones(1, WIDTH, ENTRIES, dtype=torch.float64)
    BLOCK.add_second_moments(total, INDICES, OUTPUT_GRADS, BASIS, None)
    assert_close(total[0], 1 + gradients(BASIS).square().sum((0, 1)))


def test_forms() -> None:
    weights = random(1, WIDTH, ENTRIES).square()
    form = BLOCK.form(INDICES, BASIS, weights, None)
    rotated = gradients(BASIS)
    bilinear = torch.einsum("bcdv,bedv,dv->bce", rotated, rotated, weights[0])
    assert_close(form.bilinear(OUTPUT_GRADS), bilinear)
    assert_close(form.quadratic(OUTPUT_GRADS), bilinear.diagonal(dim1=1, dim2=2))
