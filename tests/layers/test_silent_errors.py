"""Regression tests of silent errors: small gradients, half precision, caches, symmetries, scattered rows."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import seeded
from ifcomp import IFComp, Relative
from ifcomp.data.batches import as_batch
from ifcomp.errors import ModelError
from ifcomp.layers.inventory import take_inventory
from ifcomp.layers.layout import Layout
from ifcomp.layers.recorder import Verified
from ifcomp.layers.registry import Selection
from ifcomp.layers.verification import verify


def verified(model: nn.Module, x: Tensor) -> Verified:
    return verify(model, take_inventory(model, Selection()), as_batch(x))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_batches_do_not_matter(ifc: IFComp, x: Tensor, rtol: float = 1e-9) -> None:
    whole = ifc.influence(x)
    for size in (1, 3):
        assert_close(torch.cat([ifc.influence(part) for part in x.split(size)]), whole, rtol=rtol, atol=0)


# Layouts are compared in float32 or better, at the scale of each block


class SequenceFirst(nn.Module):
    """A default encoder, whose batch is the second axis. Wide hidden layers have the largest gradients by far."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 32), nn.Linear(32, 3)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4), 4, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens.transpose(0, 1))).mean(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_has_the_layouts_of_float64(dtype: torch.dtype) -> None:
    tokens = torch.randint(20, (6, 12), generator=torch.Generator().manual_seed(0))
    expected = verified(seeded(SequenceFirst)().double(), tokens)
    model = seeded(SequenceFirst)().to(dtype)
    result = verified(model, tokens)
    assert set(expected.layouts.values()) == {Layout.FIRST, Layout.SECOND}
    assert result.layouts == expected.layouts
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


class FaintBranch(nn.Module):
    """A branch that runs sequence first and whose gradients are a tiny share of the head's."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.branch, self.head, self.scale = nn.Linear(4, 4), nn.Linear(4, 3), scale

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.branch(x.transpose(0, 1)).tanh().sum(0)
        return self.head(x.mean(1) + self.scale * hidden)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1e-2, torch.bfloat16), (1e-3, torch.float16), (1e-8, torch.float32), (1e-17, torch.float64)],
    ids=str,
)
def test_small_gradients_are_compared_at_their_scale(scale: float, dtype: torch.dtype) -> None:
    result = verified(seeded(partial(FaintBranch, scale))().to(dtype), randn(6, 9, 4).to(dtype))
    assert result.layouts["branch"] is Layout.SECOND


# Parameters without a layer rule


class CachedBias(nn.Module):
    """Gathers a bias once in eval mode, as vision transformers do; training clears the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.body, self.head = nn.Parameter(torch.randn(5)), nn.Linear(4, 6), nn.Linear(6, 3)
        self.cache: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> "CachedBias":
        if mode:
            self.cache = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.tensor([0, 1, 1, 2, 3, 4])
        bias = self.bias[index] if self.training else self.cache.setdefault("bias", self.bias[index])
        return self.head(torch.tanh(self.body(x) * bias))


class FreshBias(CachedBias):
    """The same function without a cache."""

    def forward(self, x: Tensor) -> Tensor:
        self.cache = {}
        return super().forward(x)


def test_values_that_a_module_caches_in_eval_mode() -> None:
    x = randn(9, 4).double()
    cached, fresh = (seeded(kind)().double() for kind in (CachedBias, FreshBias))
    with torch.no_grad():
        cached(x)  # the cache has no graph
    settings = {"fisher": "exact", "damping": 1e-2}
    result, expected = (IFComp(model, **settings).fit([x]) for model in (cached, fresh))
    assert float(expected.factors.blocks["bias"].second_moments.min()) > 0
    assert_close(result.influence(x), expected.influence(x), rtol=1e-9, atol=0)
    assert_batches_do_not_matter(result, x)
    assert not cached.cache


# Gradients that are zero by symmetry


class KeyBias(nn.Module):
    """Attention whose scores do not depend on the bias of the keys: it shifts all scores of a query."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.key_bias, self.head = nn.Parameter(torch.randn(8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.k(x) + self.key_bias
        weights = (self.q(x) @ keys.transpose(1, 2)).softmax(-1)
        return self.head((weights @ self.v(x)).mean(1))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str)
def test_rounding_errors_have_no_influence(dtype: torch.dtype, rtol: float) -> None:
    x = randn(32, 7, 8).to(dtype)
    ifc = IFComp(seeded(KeyBias)().to(dtype), fisher="exact", damping=Relative(1e-2)).fit([x])
    assert {layer.name: layer.verdict for layer in ifc.coverage.health}["key_bias"] == "dead"
    assert "rounding errors" in str(ifc.coverage)
    assert_batches_do_not_matter(ifc, x, rtol)


# Rows without a batch axis


class Unpadded(nn.Module):
    """Drops padded tokens before the layers and sums each example's tokens afterwards."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 3)
        self.norm, self.padded = nn.LayerNorm(5), padded

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens > 0
        if self.padded:
            hidden = self.norm(self.body(self.embed(tokens)).tanh())
            return self.head((hidden * mask.unsqueeze(-1)).sum(1))
        hidden = self.norm(self.body(self.embed(tokens[mask])).tanh())
        example = mask.nonzero()[:, 0]
        return self.head(torch.zeros(len(tokens), 5, dtype=hidden.dtype).index_add(0, example, hidden))


def ragged(lengths: tuple[int, ...], seed: int = 0) -> Tensor:
    tokens = torch.randint(1, 9, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    return tokens * (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1))


@pytest.mark.parametrize(
    "lengths",
    [
        ((4, 4, 4, 4), (3, 4, 4, 5)),
        ((4, 4, 4, 4), (3, 5, 4, 4)),
        ((4, 4, 4, 4), (5, 3, 4, 4)),
        ((4, 4, 4, 4), (4, 4, 2, 6)),
        ((4, 4, 4, 4), (1, 2, 3, 6)),
        ((2, 3, 4, 5), (4, 4, 4, 4)),
    ],
    ids=str,
)
def test_tokens_without_padding(lengths: tuple[tuple[int, ...], ...]) -> None:
    """The number of tokens is divisible by the number of examples in every batch."""
    data = [ragged(batch, seed) for seed, batch in enumerate(lengths)]
    result, expected = (
        IFComp(seeded(partial(Unpadded, padded))().double(), fisher="exact", damping=1e-2).fit(data)
        for padded in (False, True)
    )
    assert all(row.treatment != "diagonal" for row in result.coverage.rows if row.name in ("embed", "body", "head"))
    for x in data:
        assert_batches_do_not_matter(result, x)
        assert_close(result.influence(x), expected.influence(x), rtol=1e-9, atol=0)


class Frames(nn.Module):
    """Drops frames of zeros before the layers: rows depend on the content of a single float input."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.body, self.head, self.padded = nn.Linear(4, 5), nn.Linear(5, 3), padded

    def forward(self, x: Tensor) -> Tensor:
        mask = x.abs().sum(-1) > 0
        if self.padded:
            return self.head((self.body(x).tanh() * mask.unsqueeze(-1)).sum(1))
        hidden = self.body(x[mask]).tanh()
        return self.head(torch.zeros(len(x), 5, dtype=x.dtype).index_add(0, mask.nonzero()[:, 0], hidden))


def test_frames_without_padding() -> None:
    data = [
        randn(*tokens.shape, 4, seed=seed).double() * (tokens > 0).unsqueeze(-1)
        for seed, tokens in enumerate((ragged((4, 4, 4, 4)), ragged((3, 5, 4, 4))))
    ]
    result, expected = (
        IFComp(seeded(partial(Frames, padded))().double(), fisher="exact", damping=1e-2).fit(data)
        for padded in (False, True)
    )
    assert_close(result.influence(data[1]), expected.influence(data[1]), rtol=1e-9, atol=0)


class Sorting(nn.Module):
    """Sorts the examples by length before a layer, as code for packed sequences does."""

    def __init__(self, sorts: bool) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 3)
        self.sorts = sorts

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens > 0
        order = mask.sum(1).argsort(descending=True, stable=True) if self.sorts else torch.arange(len(tokens))
        hidden = self.body(self.embed(tokens[order])).tanh() * mask[order].unsqueeze(-1)
        return self.head(hidden.sum(1)[order.argsort()])


def test_models_that_sort_their_batch() -> None:
    """The first examples are in order, so sorting does not change them."""
    data = [ragged((6, 4, 2)), ragged((1, 5, 3, 2), seed=1)]
    result, expected = (
        IFComp(seeded(partial(Sorting, sorts))().double(), fisher="exact", damping=1e-2).fit(data)
        for sorts in (True, False)
    )
    for x in data:
        assert_close(result.influence(x), expected.influence(x), rtol=1e-9, atol=0)
        assert_batches_do_not_matter(result, x)


# Uses that the verified examples do not show


class LaterUse(nn.Module):
    """Uses a layer, and its weight directly once inputs are long."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        if x.shape[1] > 4:
            hidden = hidden + x @ self.body.weight.T
        return self.head(hidden.mean(1))


def test_a_use_that_was_not_verified_is_refused() -> None:
    short, long = randn(5, 3, 4).double(), randn(5, 6, 4).double()
    ifc = IFComp(seeded(LaterUse)().double(), fisher="exact", damping=1e-2).fit([short])
    assert ifc.influence(short).isfinite().all()
    with pytest.raises(ModelError, match=r"'body'.*also used outside"):
        ifc.influence(long)


class Positions(nn.Module):
    """A table of positions that is cut to the length of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.body, self.head = nn.Parameter(torch.randn(1, 6, 4)), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x + self.positions[:, : x.shape[1]]).tanh().mean(1))


def test_tables_that_are_cut_to_the_input() -> None:
    data = [randn(5, length, 4, seed=length).double() for length in (6, 3)]
    first, last = (
        IFComp(seeded(Positions)().double(), fisher="exact", damping=1e-2).fit(order) for order in (data, data[::-1])
    )
    for x in data:
        assert_close(first.influence(x), last.influence(x), rtol=1e-9, atol=0)
        assert_batches_do_not_matter(first, x)
