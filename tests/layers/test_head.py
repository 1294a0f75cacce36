"""The head of a classifier is found by its output, and its input is recorded."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ifcomp.data.batches import as_batch
from ifcomp.layers.head import Head, find_head
from ifcomp.layers.inventory import take_inventory
from ifcomp.layers.registry import Selection
from ifcomp.layers.verification import verified_recorder


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh())


class Scaled(nn.Module):
    """Logits are a multiple of the output of a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = 2 * self.head(self.body(x))
        return logits


class ByFunction(Scaled):
    """The weight of the head is used by a function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x), self.head.weight, self.head.bias)


class WithLogits(Scaled):
    """Returns an object with logits, as models of transformers do."""

    def forward(self, x: Tensor) -> object:
        return type("Output", (), {"logits": self.head(input=self.body(x))})()


class Twice(Scaled):
    """The head is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        self.head(self.body(-x))
        logits: Tensor = self.head(self.body(x))
        return logits


def test_cases() -> None:
    cases: list[tuple[Callable[[], nn.Module], Head | None]] = [
        (lambda: nn.Sequential(OrderedDict(body=body(), head=nn.Linear(6, 3))), Head("head", 6)),
        (lambda: nn.Linear(4, 3), Head("", 4)),
        (lambda: nn.Sequential(body(), nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))), Head("1", 6)),
        (WithLogits, Head("head", 6)),
        (Scaled, None),
        (ByFunction, None),
        (Twice, None),
        (lambda: torch.jit.trace(body().append(nn.Linear(6, 3)), torch.ones(2, 4)), None),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()), None),
    ]
    for build, expected in cases:
        torch.manual_seed(0)
        model, x = build(), torch.randn(5, 4)
        assert find_head(model, as_batch(x)) == expected, model
        assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("layers", [None, ("body.*",)])
def test_the_input_of_the_head_is_recorded(layers: tuple[str, ...] | None) -> None:
    """Also if the head is not covered."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(body=body(), head=nn.Linear(6, 3))).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    batch = as_batch(x)
    recorder = verified_recorder(model, take_inventory(model, Selection(layers)), batch, layers)
    with recorder.attached():
        recording = recorder.record(batch)
    assert recording.penultimate is not None
    assert torch.equal(recording.penultimate, model.body(x))
    assert not recording.penultimate.requires_grad
    assert not model.head._forward_pre_hooks
