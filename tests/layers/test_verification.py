"""Verification: rules are compared with autograd on the first batch, and later batches are checked against it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

from cases import CASES, seeded
from comparison import as_type
from ifcomp import IFComp
from ifcomp.data.batches import as_batch
from ifcomp.layers.inventory import take_inventory
from ifcomp.layers.layout import Layout
from ifcomp.layers.registry import Selection
from ifcomp.layers.verification import Verified, verify
from oracles import Inputs


def verified(model: nn.Module, inputs: Inputs) -> Verified:
    return verify(model, take_inventory(model, Selection()), as_batch(inputs))


# Layouts


class FoldedSecond(nn.Module):
    """A layer without bias on [B, T, F], or on [T*B, F] with the examples of one position adjacent."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5, bias=False)
        self.head = nn.Linear(5, 3)
        self.batch_first = batch_first
        nn.init.uniform_(self.fc.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.head(torch.relu(self.fc(x)).mean(1))
        rows = x.transpose(0, 1).reshape(-1, x.shape[2])
        return self.head(torch.relu(self.fc(rows)).view(x.shape[1], len(x), -1).mean(0))


@pytest.mark.parametrize(
    ("name", "layer", "layout"),
    [
        ("linear_tokens", "0", Layout.FIRST),
        ("linear_folded", "layer", Layout.FIRST),
        ("linear_sequence_first", "fc", Layout.SECOND),
        ("embedding_positions_leading", "position", Layout.SHARED),
        ("attention", "attn.q", Layout.FIRST),
    ],
)
def test_layouts_are_determined(name: str, layer: str, layout: Layout) -> None:
    case = CASES[name]
    result = verified(case.make().double(), as_type(case.sample(7), torch.float64))
    assert result.layouts[layer] is layout
    assert result.num_classes == case.num_classes
    assert set(result.order) == {tracked.name for tracked in result.inventory.layers}


def test_the_batch_can_be_the_second_factor_of_the_first_axis() -> None:
    x = torch.randn(7, 6, 4, generator=torch.Generator().manual_seed(0))
    assert verified(seeded(partial(FoldedSecond, False))(), x).layouts["fc"] is Layout.FOLDED_SECOND


def test_layers_without_a_fitting_layout_are_demoted() -> None:
    """The index of the positions has no batch axis."""
    case = CASES["embedding_positions_flat"]
    result = verified(case.make(), case.sample(7))
    assert [layer.name for layer in result.inventory.layers] == ["token", "head"]
    assert [block.name for block in result.inventory.others] == ["position.weight"]
    assert result.layouts.keys() == {"token", "head"}
    assert result.order == ("position", "token", "head")


# The examples of the first batch


@pytest.mark.parametrize("value", [0.0, -100.0], ids=["blank", "dead"])
@pytest.mark.parametrize("where", [[2], [0, 1], [0, 1, 2], [3, 5, 7, 9]], ids=str)
def test_examples_without_gradient_decide_nothing(where: list[int], value: float) -> None:
    """Every layout fits an example without gradient."""
    x = torch.randn(12, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[where] = value
    result, expected = (
        IFComp(seeded(partial(FoldedSecond, first))().double(), fisher="exact", damping=1e-2).fit([x]).influence(x)
        for first in (False, True)
    )
    assert_close(result, expected, rtol=1e-9, atol=1e-12)


class Summed(nn.Module):
    """Tokens summed, with the batch as the first or the second axis inside; the same function either way."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc(x if self.batch_first else x.transpose(0, 1)))
        return self.head(h.sum(1 if self.batch_first else 0))


@pytest.mark.parametrize(
    ("fit_lengths", "score_length"), [((4,), 1), ((4, 1), 4), ((1,), 1), ((3,), 3), ((1, 4), 4)], ids=str
)
def test_one_position_is_not_a_shared_row(fit_lengths: tuple[int, ...], score_length: int) -> None:
    """With one position the input of a layer is [1, B, F], like a row that the batch shares."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(5, length, 4, generator=generator, dtype=torch.float64) for length in fit_lengths]
    x = torch.randn(5, score_length, 4, generator=generator, dtype=torch.float64)
    result, expected = (
        IFComp(seeded(partial(Summed, first))().double(), fisher="exact", damping=1e-2).fit(data).influence(x)
        for first in (False, True)
    )
    assert_close(result, expected, rtol=1e-9, atol=0)


def counts() -> Tensor:
    """Integers from 0 to 2, and columns a hundred times as large."""
    integers = torch.randint(3, (9, 4), generator=torch.Generator().manual_seed(0)).double()
    return integers * torch.tensor([1.0, 100.0, 100.0, 100.0])


class Category(nn.Module):
    """The first column is a category, stored as a float beside large measurements."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.table(x[:, 0].long()), torch.tanh(x[:, 1:] / 100)], 1))


class Logarithm(nn.Module):
    """The logarithm of counts is undefined for negative inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.log(x + 1e-3))))


class Strict(Logarithm):
    """Fails on rows that are not in the data."""

    def forward(self, x: Tensor) -> Tensor:
        assert all(bool((counts() == row).all(1).any()) for row in x), "these are not the given inputs"
        return super().forward(x)


@pytest.mark.parametrize("make", [Category, Logarithm, Strict])
def test_the_model_runs_on_the_given_inputs_only(make: Callable[[], nn.Module]) -> None:
    ifc = IFComp(seeded(make)().double()).fit([counts()])
    assert ifc.influence(counts()).isfinite().all()


# Later batches and files


class LongOnly(nn.Module):
    """A layer that runs only for sequences of more than two positions, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 2:
            x = self.extra(x.transpose(0, 1)).tanh().transpose(0, 1)
        return self.head(x.mean(1))


def sequences(length: int) -> Tensor:
    return torch.randn(6, length, 4, generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (2, 3, 4)], ids=str)
def test_layers_that_do_not_run_on_the_first_batch_are_covered(lengths: tuple[int, ...]) -> None:
    """The layer has another layout than the default one."""
    data = [sequences(length).double() for length in lengths]
    late, first = (
        IFComp(seeded(LongOnly)().double(), fisher="exact", damping=1e-2).fit(order) for order in (data, data[::-1])
    )
    assert {row.treatment for row in late.coverage.rows if row.name == "extra"} == {"EKFAC"}
    for x in data:
        assert_close(late.influence(x), first.influence(x), rtol=1e-9, atol=0)
        assert_close(torch.cat([late.influence(row) for row in x.split(1)]), late.influence(x), rtol=1e-9, atol=0)


def test_demoted_layers_stay_demoted_after_loading(tmp_path: Path) -> None:
    """Blank sequences do not determine the layout of the first layer."""
    ifc = IFComp(seeded(LongOnly)(), damping=1e-2).fit([torch.zeros(6, 3, 4), sequences(3)])
    ifc.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", seeded(LongOnly)())
    assert_close(loaded.influence(sequences(4)), ifc.influence(sequences(4)), rtol=1e-6, atol=0)


class HeadFirst(nn.Module):
    """A head that is defined before the body."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def test_the_last_layer_is_the_last_in_the_forward_pass(tmp_path: Path) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    ifc = IFComp(seeded(HeadFirst)(), layers="last").fit([x])
    ifc.save(tmp_path / "run.ifcomp")
    loaded = IFComp.load(tmp_path / "run.ifcomp", seeded(HeadFirst)())
    assert [row.name for row in loaded.coverage.rows if row.covered] == ["head"]
    assert torch.equal(loaded.influence(x), ifc.influence(x))


def test_the_last_layer_has_a_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), weight_norm(nn.Linear(5, 3)), nn.LayerNorm(3))
    assert [row.name for row in IFComp(model, layers="last").coverage.rows if row.covered] == ["2"]
