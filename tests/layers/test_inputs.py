"""Inputs that all examples share, with as many entries as the batch has examples."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import seeded, weight
from comparison import oracle_influence
from ifcomp import IFComp
from ifcomp.data.batches import as_batch, iter_tensors, named_tensors
from ifcomp.errors import ModelError
from ifcomp.layers.inputs import shared_inputs
from oracles import OracleBlock

SIZE = 5
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(SIZE, SIZE, 4, generator=GENERATOR, dtype=torch.float64)
POS = torch.randn(SIZE, 4, generator=GENERATOR, dtype=torch.float64)
TABLE = torch.randn(SIZE, 4, generator=GENERATOR, dtype=torch.float64)
WEIGHTS = torch.rand(SIZE, SIZE, generator=GENERATOR, dtype=torch.float64)


class Positions(nn.Module):
    """Tokens [B, T, 4] with positions [T, 4], a table [N, 4] and weights per token; parameters with and without a rule.

    The mean over the table also runs with a part of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale, self.head = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(
        self,
        x: Tensor,
        pos: Tensor | None = None,
        table: Tensor | None = None,
        weights: Tensor | None = None,
        factor: Tensor | None = None,
        nested: Any = None,
    ) -> Tensor:
        if pos is not None:
            x = x + pos
        if table is not None:
            x = x * self.embed(table).mean(0)
        if nested is not None:
            x = x * nested[0]["table"].tanh().mean(0) + nested[1][0]["bias"]
        if weights is not None:
            x = x * weights.unsqueeze(-1)
        if factor is not None:
            x = x * factor
        return self.head(torch.tanh(self.embed(x)).mean(1) * self.scale)


def batch_of(names: str, size: int) -> dict[str, Any]:
    """The named inputs of the first examples."""
    inputs = {
        "x": X[:size],
        "pos": POS,
        "table": TABLE,
        "weights": WEIGHTS[:size],
        "factor": torch.tensor(0.7, dtype=torch.float64),
        "nested": [{"table": TABLE}, ({"bias": X[:size, :1]},)],
    }
    return {name: inputs[name] for name in names.split()} | {"labels": torch.arange(size) % 3}


NAMES = ["x pos", "table x", "x weights", "x pos weights", "pos table x", "x pos table weights factor", "nested x"]


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("first", [SIZE, 3])
def test_shared_inputs_are_not_sliced(names: str, first: int) -> None:
    """A batch of three examples is not ambiguous, since the shared inputs have five entries."""
    part, rest = batch_of(names, first), batch_of(names, SIZE)
    ifc = IFComp(seeded(Positions)().double(), fisher="exact").fit([part, rest])
    reference = IFComp(seeded(Positions)().double(), fisher="exact").fit([part, *singles(names)])
    truth = torch.cat([reference.influence(single) for single in singles(names)])
    assert_close(ifc.influence(rest), truth, rtol=1e-8, atol=1e-10)
    part_scores, scores = (ifc.score([batch]).frame["expected_influence"] for batch in (batch_of(names, 4), rest))
    assert_close(torch.tensor(scores[:4]), torch.tensor(part_scores))


class Bound(Positions):
    """The same model with the positions inside."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, POS.to(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_influence_with_shared_positions_is_exact(dtype: torch.dtype) -> None:
    inputs = {"x": X.to(dtype), "pos": POS.to(dtype)}
    ifc = IFComp(seeded(Positions)().to(dtype), fisher="exact", damping=1e-3).fit([inputs])
    blocks = [weight("embed"), weight("head"), OracleBlock("diagonal", ("scale",))]
    expected = oracle_influence(ifc, seeded(Bound)().to(dtype), blocks, inputs["x"], 1e-3)
    rtol = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    assert_close(ifc.influence(inputs), expected, rtol=rtol, atol=0)


def singles(names: str) -> list[dict[str, Any]]:
    """The five examples one by one; shared inputs are whole."""
    batches = []
    for index in range(SIZE):
        batch = batch_of(names, SIZE)
        rows: dict[str, Any] = {"x": X[index : index + 1], "weights": WEIGHTS[index : index + 1]}
        rows["labels"] = torch.tensor([index % 3])
        rows["nested"] = [{"table": TABLE}, ({"bias": X[index : index + 1, :1]},)]
        batches.append({name: rows.get(name, value) for name, value in batch.items()})
    return batches


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        ("x pos", {"/1/pos"}),
        ("x weights", set()),
        ("x pos table weights factor", {"/1/pos", "/1/table", "/1/factor"}),
        ("nested x", {"/1/nested/0/table"}),
    ],
)
def test_the_assignment_is_settled(names: str, shared: set[str]) -> None:
    assert shared_inputs(seeded(Positions)().double(), as_batch(batch_of(names, SIZE))) == shared


def test_examples_that_depend_on_each_other_are_refused() -> None:
    class Mixing(Positions):
        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            return super().forward(x - x.mean(0), weights=weights)

    with pytest.raises(ModelError, match="depend on the other examples"):
        IFComp(seeded(Mixing)().double()).fit([{"x": X, "weights": WEIGHTS}])


def test_labels_give_the_size_of_the_batch() -> None:
    batch = as_batch({"x": X[:3], "pos": POS, "table": TABLE, "labels": torch.tensor([0, 1, 2])})
    assert batch.size == 3
    assert [len(value) for value in batch.select(slice(0, 2)).tensors()] == [2, SIZE, SIZE]


def test_names_follow_the_order_of_tensors() -> None:
    value = batch_of("x pos nested factor", SIZE)
    named = list(named_tensors(value))
    assert len(dict(named)) == len(named)
    assert all(tensor is other for (_, tensor), other in zip(named, iter_tensors(value), strict=True))
