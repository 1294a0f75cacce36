"""Models with several positional inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from cases import seeded
from ifcomp import IFComp
from ifcomp.data.loaders import FirstExamples


class Two(nn.Module):
    """Adds two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(2, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return (torch.tanh(self.first(x)) + self.second(z)) * self.scale


class Optional(Two):
    """The second input may be left out."""

    def forward(self, x: Tensor, z: Tensor | None = None, double: bool = False) -> Tensor:
        return (1 + double) * super().forward(x, z)


class Variadic(Two):
    """Any number of inputs."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*inputs)


class Pair(Two):
    """One argument, a pair."""

    def forward(self, inputs: Any) -> Tensor:
        return super().forward(*inputs)


class Flagged(Two):
    """One pair, and a flag."""

    def forward(self, inputs: Any, double: bool = False) -> Tensor:
        return (1 + double) * super().forward(*inputs)


class Untyped(Two):
    """An optional second input without annotations."""

    def forward(self, x, z=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        return super().forward(x, z)


class Annotated(Two):
    """One list, and an optional second input."""

    def forward(self, inputs: list[Tensor], bias: Tensor | None = None) -> Tensor:
        return super().forward(*inputs) + (0 if bias is None else bias)


GENERATOR = torch.Generator().manual_seed(0)
X, Z = (torch.randn(6, size, generator=GENERATOR, dtype=torch.float64) for size in (4, 2))
Y = torch.arange(6) % 3


class Rows(TensorDataset):
    """Examples ``((x, z), y)``."""

    def __getitem__(self, index: int) -> Any:
        x, z, y = super().__getitem__(index)
        return (x, z), y


@pytest.mark.parametrize("build", [Two, Optional, Variadic, Pair, Flagged, Untyped, Annotated])
@pytest.mark.parametrize("as_list", [True, False])
def test_pairs_of_inputs(build: type[Two], as_list: bool) -> None:
    reference = IFComp(seeded(Two)().double(), fisher="empirical").fit([{"x": X, "z": Z, "labels": Y}])
    expected = reference.score([{"x": X, "z": Z, "labels": Y}]).frame
    ifc = IFComp(seeded(build)().double(), fisher="empirical")
    data = DataLoader(Rows(X, Z, Y), batch_size=4) if as_list else [((X[:4], Z[:4]), Y[:4]), ((X[4:], Z[4:]), Y[4:])]
    frame = ifc.fit(data).score(data).frame
    for column in expected:
        assert_close(torch.tensor(frame[column]), torch.tensor(expected[column]), rtol=1e-9, atol=1e-12)
    assert_close(ifc.influence(((X, Z),)), reference.influence({"x": X, "z": Z}), rtol=1e-9, atol=1e-12)
    truth = reference.stochastic_complexity({"x": X, "z": Z}, Y)
    assert_close(ifc.stochastic_complexity((X, Z), Y), truth, rtol=1e-9, atol=1e-12)


def test_first_examples_of_pairs() -> None:
    batches = list(FirstExamples([((X, Z), Y)], 2))
    ((x, z), y) = batches[0]
    assert (len(x), len(z), len(y)) == (2, 2, 2)
