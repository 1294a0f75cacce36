"""The recorder attaches to a model once, and leaves it as it was."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cases import CASES
from ifcomp import IFComp


def test_scoring_inside_an_iterator_of_the_data() -> None:
    case = CASES["lenet"]
    model, inputs = case.make(), case.sample(6)
    ifc = IFComp(model).fit([inputs])
    expected, found = ifc.influence(inputs), []

    def batches() -> Iterator[Tensor]:
        yield inputs
        found.append(ifc.influence(inputs))
        yield inputs

    table = ifc.score(batches())
    assert torch.equal(found[0], expected)
    assert len(table.frame) == 12
    assert "forward" not in vars(next(module for module in model.modules() if not list(module.children())))
    assert all(not module._forward_hooks for module in model.modules())
