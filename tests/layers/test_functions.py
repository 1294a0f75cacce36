"""Layers that are recorded by the functions that use their parameters."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from cases import seeded
from ifcomp import IFComp

SETTINGS = {"fisher": "exact", "damping": 1e-3}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# Effective weights: the same results as the plain layer with that weight


class StandardisedConv(nn.Conv2d):
    """A convolution with standardised weights and a gain, padded by hand."""

    def __init__(self) -> None:
        super().__init__(2, 3, 3, stride=2)
        self.gain = nn.Parameter(torch.ones(3, 1, 1, 1))

    @property
    def effective(self) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self.gain * centred / (centred.std((1, 2, 3), keepdim=True) + 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.effective, self.bias, self.stride, (1, 1))


class DoubledLinear(nn.Linear):
    """A Linear that doubles its weight."""

    @property
    def effective(self) -> Tensor:
        return 2 * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.effective, self.bias)


def older_weight_norm(module: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(module)


def plain_conv(layer: StandardisedConv) -> nn.Module:
    plain = nn.Conv2d(2, 3, 3, stride=2, padding=1).double()
    plain.load_state_dict({"weight": layer.effective, "bias": layer.bias})
    return nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), plain)


def plain_linear(layer: nn.Module) -> nn.Module:
    weight = layer.effective if isinstance(layer, DoubledLinear) else layer.weight
    plain = nn.Linear(4, 5, bias=layer.bias is not None).double()
    state = {"weight": weight} if layer.bias is None else {"weight": weight, "bias": layer.bias}
    plain.load_state_dict(state)
    return plain


@dataclass(frozen=True)
class Effective:
    """A layer with an effective weight, and the plain layer with that weight."""

    make: Callable[[], nn.Module]
    plain: Callable[..., nn.Module]
    shape: tuple[int, ...]


EFFECTIVE = {
    "weight standardisation": Effective(StandardisedConv, plain_conv, (2, 6, 6)),
    "scaled": Effective(lambda: DoubledLinear(4, 5), plain_linear, (4,)),
    "weight_norm": Effective(lambda: parametrizations.weight_norm(nn.Linear(4, 5)), plain_linear, (4,)),
    "weight_norm, tokens": Effective(lambda: parametrizations.weight_norm(nn.Linear(4, 5)), plain_linear, (3, 4)),
    "spectral_norm": Effective(lambda: parametrizations.spectral_norm(nn.Linear(4, 5)), plain_linear, (4,)),
    "orthogonal": Effective(lambda: parametrizations.orthogonal(nn.Linear(4, 5, bias=False)), plain_linear, (4,)),
    "older weight_norm": Effective(lambda: older_weight_norm(nn.Linear(4, 5)), plain_linear, (4,)),
}


@pytest.mark.parametrize("name", EFFECTIVE)
def test_effective_weights_are_the_parameters(name: str) -> None:
    case = EFFECTIVE[name]
    x = randn(9, *case.shape)
    layer = seeded(case.make)().double()
    size = layer(x)[0].numel()
    head = seeded(lambda: nn.Linear(size, 3))().double()
    effective = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), head)
    plain = nn.Sequential(case.plain(layer), nn.Tanh(), nn.Flatten(), head)
    result, expected = (IFComp(model, **SETTINGS).fit([x]) for model in (effective, plain))
    assert_close(result.influence(x), expected.influence(x), rtol=1e-9, atol=0)
    assert result.coverage.covered == sum(parameter.numel() for parameter in effective.parameters())
    assert {row.treatment for row in result.coverage.rows} == {"EKFAC"}


class TwoUses(nn.Module):
    """A weight that is used doubled by its layer, and plain by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = DoubledLinear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(x)) + x @ self.layer.weight.T)


class TwoUsesInOne(nn.Module):
    """The same function without an effective weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        return self.head(torch.tanh(x @ (2 * weight.T) + bias) + x @ weight.T)


def test_weights_with_another_use_are_demoted() -> None:
    x = randn(9, 4)
    result, expected = (IFComp(seeded(kind)().double(), **SETTINGS).fit([x]) for kind in (TwoUses, TwoUsesInOne))
    assert_close(result.influence(x), expected.influence(x), rtol=1e-9, atol=0)
    assert {row.name for row in result.coverage.rows} == {"layer.weight", "layer.bias", "head"}


# Weights that a parent module uses, and norms with another forward


class Parent(nn.Module):
    """Uses the weight of a child directly, with a separate bias."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(4, 6, bias=False), nn.Linear(6, 3)
        self.bias, self.direct = nn.Parameter(torch.randn(6)), direct

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.qkv.weight, self.bias) if self.direct else self.qkv(x) + self.bias
        return self.head(torch.tanh(hidden).mean(1))


class ActivatedNorm(nn.BatchNorm2d):
    """BatchNorm followed by an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(
            F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        )


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        normalised = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return normalised.permute(0, 3, 1, 2)


class Permuted(nn.Module):
    """The same in single modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SelfMade(nn.Module):
    """RMSNorm as language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def image_network(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.Flatten(), nn.Linear(48, 3))


def token_network(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Flatten(), nn.Linear(12, 3))


PAIRS = {
    "parent": (lambda: Parent(True), lambda: Parent(False), (5, 4)),
    "batch norm with activation": (
        lambda: image_network(ActivatedNorm(3)),
        lambda: image_network(nn.Sequential(nn.BatchNorm2d(3), nn.Tanh())),
        (2, 6, 6),
    ),
    "channel norm": (lambda: image_network(ChannelNorm(3)), lambda: image_network(Permuted()), (2, 6, 6)),
    "self-made norm": (
        lambda: token_network(SelfMade()),
        lambda: token_network(nn.RMSNorm(4, eps=1e-6)),
        (3, 4),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_functions_give_the_results_of_modules(name: str) -> None:
    make, make_plain, shape = PAIRS[name]
    x = randn(9, *shape)
    result, expected = (IFComp(seeded(build)().double(), **SETTINGS).fit([x]) for build in (make, make_plain))
    assert_close(result.influence(x), expected.influence(x), rtol=1e-9, atol=0)
    assert_close(torch.cat([result.influence(row) for row in x.split(1)]), result.influence(x), rtol=1e-9, atol=0)
    assert result._recorder is not None
    assert not result._recorder.inventory.others


# Bare parameters


class Bare(nn.Module):
    """A class token, positions, scales in place and out of place, a scalar gain and a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 4, 4))
        self.scale, self.gain = nn.Parameter(torch.randn(4)), nn.Parameter(torch.tensor(0.7))
        self.offset, self.body, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        hidden = torch.tanh(self.body(tokens)) * (1.0 + self.scale)
        folded = torch.tanh(hidden.reshape(-1, 4) - self.offset.view(1, 4)).view_as(hidden)
        return self.head(folded.mul(3).mul_(self.gain).mean(1))


def test_bare_parameters_need_no_vmap() -> None:
    x = randn(7, 3, 4)
    ifc = IFComp(seeded(Bare)().double(), **SETTINGS).fit([x])
    assert ifc._recorder is not None
    assert not ifc._recorder.inventory.others
    assert {layer.name for layer in ifc._recorder.inventory.bare} == {"token", "positions", "scale", "gain", "offset"}
    for name in ("token", "positions", "scale", "gain", "offset"):
        moments = ifc.factors.blocks[name].second_moments
        assert_close(moments, dense_moments(seeded(Bare)().double(), name, x), rtol=1e-9, atol=1e-18)
    assert_close(torch.cat([ifc.influence(row) for row in x.split(1)]), ifc.influence(x), rtol=1e-9, atol=0)


def dense_moments(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """Mean over examples and labels of squared gradients, by autograd of single examples."""
    parameter, total = model.get_parameter(name), 0.0
    for example in x.split(1):
        logits = model(example)[0]
        losses = -logits.log_softmax(0)
        for loss, probability in zip(losses, logits.softmax(0).detach(), strict=True):
            (grad,) = torch.autograd.grad(loss, parameter, retain_graph=True)
            total = total + probability * grad.flatten().square() / len(x)
    return total


class InPlace(nn.Module):
    """Scales the output of a layer in place, which is a view for a batch of one."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.body, self.head, self.in_place = nn.Linear(4, 5), nn.Linear(5, 3), in_place

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x.transpose(0, 1))
        hidden = hidden.div_(3.0) if self.in_place else hidden / 3.0
        return self.head(torch.tanh(hidden).mean(0))


def test_outputs_that_are_changed_in_place() -> None:
    x = randn(7, 3, 4)
    result, expected = (IFComp(seeded(lambda v=v: InPlace(v))().double(), **SETTINGS).fit([x]) for v in (True, False))
    for size in (1, 3, 7):
        actual = torch.cat([result.influence(part) for part in x.split(size)])
        assert_close(actual, expected.influence(x), rtol=1e-9, atol=0)
