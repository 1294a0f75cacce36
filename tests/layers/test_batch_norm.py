"""BatchNorm in eval mode: gradients of a single example equal those of the same example in a batch."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from cases import seeded
from ifcomp import IFComp


def network() -> nn.Module:
    """The mean over positions makes the output gradient of the normalisation an expanded tensor."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


@pytest.mark.parametrize("options", [{}, {"layers": ["0", "4"]}], ids=["covered", "not covered"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_single_examples_equal_a_batch(frozen: bool, options: dict[str, list[str]], dtype: torch.dtype) -> None:
    model = seeded(network)().to(dtype)
    model[1].requires_grad_(not frozen)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    ifc = IFComp(model, fisher="exact", damping=1e-2, **options).fit([x])
    alone = torch.cat([ifc.influence(example) for example in x.split(1)])
    rtol = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 0.05}[dtype]
    assert_close(alone, ifc.influence(x), rtol=rtol, atol=0)


def test_half_inputs_with_single_statistics() -> None:
    model = seeded(network)()
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = IFComp(model, fisher="exact", damping=1e-2).fit([x]).influence(x)
    with torch.autocast("cpu", torch.bfloat16):
        ifc = IFComp(model, fisher="exact", damping=1e-2).fit([x])
        alone = torch.cat([ifc.influence(example) for example in x.split(1)])
    assert_close(alone, plain, rtol=0.05, atol=0)
