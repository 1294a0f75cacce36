"""BatchNorm in eval mode: gradients of a single example equal those of the same example in a batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from cases import Apply, mean, seeded
from ifcomp import IFComp


def network() -> nn.Module:
    """Tokens of an image: the output gradient of the normalisation is transposed."""
    tokens = Apply(lambda x: x.flatten(2).transpose(1, 2))
    body = nn.Linear(12, 64), nn.Unflatten(1, (4, 4, 4)), nn.BatchNorm2d(4), tokens
    return nn.Sequential(*body, nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), mean(1), nn.Linear(4, 3))


@pytest.mark.parametrize("options", [{}, {"layers": ["0", "4", "5", "8"]}], ids=["covered", "not covered"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_single_examples_equal_a_batch(frozen: bool, options: dict[str, list[str]], dtype: torch.dtype) -> None:
    model = seeded(network)().to(dtype)
    model[2].requires_grad_(not frozen)
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    ifc = IFComp(model, fisher="exact", damping=1e-2, **options).fit([x])
    alone = torch.cat([ifc.influence(example) for example in x.split(1)])
    rtol = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 0.05}[dtype]
    assert_close(alone, ifc.influence(x), rtol=rtol, atol=0)


def test_half_inputs_with_single_statistics() -> None:
    model = seeded(network)()
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    plain = IFComp(model, fisher="exact", damping=1e-2).fit([x]).influence(x)
    with torch.autocast("cpu", torch.bfloat16):
        ifc = IFComp(model, fisher="exact", damping=1e-2).fit([x])
        alone = torch.cat([ifc.influence(example) for example in x.split(1)])
    assert_close(alone, plain, rtol=0.05, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_constant_channel_does_not_overflow_in_half_precision(dtype: torch.dtype) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)))()
    model[0].weight.detach()[0] = 0.0
    model[0].bias.detach()[0] = 600.0
    model[1].running_mean[0], model[1].running_var[0] = 600.0, 1e-9
    model = model.to(dtype)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert model(x).isfinite().all()
    assert IFComp(model, fisher="exact", damping=1e-2).fit([x]).influence(x).isfinite().all()


class OtherForward(nn.BatchNorm2d):
    """BatchNorm with its own ``forward``."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class JoinedScale(nn.Module):
    """Two parameters that are joined before use, so they have no layer rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
        self.network = network()
        self.network[2] = OtherForward(4)

    def forward(self, x: Tensor) -> Tensor:
        assert float(x.detach().sum()) < 1e9  # vmap cannot read values, so examples run one by one
        return self.network(x * torch.cat([self.first, self.second]))


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_parameters_without_a_rule_below_another_forward(frozen: bool) -> None:
    model = seeded(JoinedScale)().double()
    model.network[2].requires_grad_(not frozen)
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ifc = IFComp(model, fisher="exact", damping=1e-2).fit([x])
    assert_close(torch.cat([ifc.influence(example) for example in x.split(1)]), ifc.influence(x), rtol=1e-10, atol=0)
