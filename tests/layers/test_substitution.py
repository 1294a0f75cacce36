"""Parameters without a rule, wherever the model uses them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import seeded
from comparison import oracle_influence
from ifcomp import IFComp
from oracles import OracleBlock


@torch.jit.script
def scripted(x: Tensor, scale: Tensor) -> Tensor:
    """A product in compiled code."""
    return torch.tanh(x * scale)


class Product(torch.autograd.Function):
    """A product with a custom backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grad * scale, grad * x


class Scaled(nn.Module):
    """A scale that is used in one of several ways, and one that is never used."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.scale, self.unused, self.head = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2)), nn.Linear(4, 3)
        self.way, self.kept = way, [self.scale]
        self.function = lambda x: x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        ways = {
            "scripted": lambda: scripted(x, self.scale),
            "function": lambda: Product.apply(x, self.scale),
            "list": lambda: x * self.kept[0],
            "closure": lambda: self.function(x),
            "stack": lambda: x * torch.stack([self.scale, self.scale]).mean(0),
        }
        return self.head(torch.tanh(ways[self.way]()))


@pytest.mark.parametrize("way", ["scripted", "function", "list", "closure", "stack"])
def test_every_use_has_a_gradient(way: str) -> None:
    model = seeded(lambda: Scaled(way))().double()
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ifc = IFComp(model, fisher="exact", damping=1e-3).fit([x])
    blocks = [OracleBlock("diagonal", ("scale",)), OracleBlock("kronecker", ("head.weight", "head.bias"))]
    way_of_oracle = "scripted" if way == "scripted" else "stack"  # a copy of the model would keep the old closure
    oracle = seeded(lambda: Scaled(way_of_oracle))().double()
    assert_close(ifc.influence(x), oracle_influence(ifc, oracle, blocks, x, 1e-3), rtol=1e-9, atol=0)
