"""Buffers that the forward pass changes are restored."""

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import CASES, seeded
from ifcomp import IFComp


def test_counters_are_restored() -> None:
    case = CASES["counting"]
    model, inputs = case.make(), case.sample(6)
    buffers = dict(model.named_buffers())
    ifc = IFComp(model).fit([inputs])
    first = ifc.influence(inputs)
    assert torch.equal(ifc.influence(inputs), first)
    for name, value in model.named_buffers():
        assert value is buffers[name]
        assert not value.any()
    model(inputs)
    assert model.calls == 1


class Cached(nn.Module):
    """Positions in a buffer that grows with the length of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.length = nn.Linear(3, 3), 0
        self.register_buffer("positions", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.positions = torch.arange(self.length, device=x.device).to(x)
        return self.head((x * self.positions[: x.shape[1]].unsqueeze(-1)).mean(1))


def test_caches_may_grow() -> None:
    model, inputs = seeded(Cached)(), torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    expected = seeded(Cached)()(inputs)
    ifc = IFComp(model).fit([inputs[:, :2]])
    assert ifc.fit([inputs]).influence(inputs).isfinite().all()
    assert_close(model(inputs), expected)
