"""Unusual models: parametrised weights, control flow, untrained statistics, dead layers and half precision.

Each is compared with the dense oracle of the plain model, or refused with advice.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from cases import Apply, mean, seeded, weight
from comparison import assert_same, oracle_influence
from ifcomp import IFComp, Relative
from ifcomp.errors import IfcompWarning, ModelError, NonFiniteError
from oracles import OracleBlock

DAMPING = 1e-3
X = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])


def net() -> nn.Module:
    """Four features, three classes."""

    def build() -> nn.Module:
        return nn.Sequential(OrderedDict(body=nn.Linear(4, 6), act=nn.Tanh(), head=nn.Linear(6, 3)))

    return seeded(build)().double()


def fit(model: nn.Module, x: Tensor = X) -> IFComp:
    return IFComp(model, fisher="exact", damping=DAMPING).fit([x])


def diagonal(*names: str) -> list[OracleBlock]:
    return [OracleBlock("diagonal", (name,)) for name in names]


def check_message(caught: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


# Parametrised weights


class Signed(nn.Module):
    """A parametrisation that changes the weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * weight.abs()


def custom(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Signed())


#: Parametrisations of a layer, and the names of its parameters.
PARAMETRISED: dict[str, tuple[Callable[[nn.Module], object], tuple[str, ...]]] = {
    "spectral_norm": (parametrizations.spectral_norm, ("parametrizations.weight.original",)),
    "spectral_norm_by_hooks": (nn.utils.spectral_norm, ("weight_orig",)),
    "weight_norm_by_hooks": (nn.utils.weight_norm, ("weight_g", "weight_v")),
    "orthogonal": (parametrizations.orthogonal, ("parametrizations.weight.original",)),
    "custom": (custom, ("parametrizations.weight.original",)),
    "pruned": (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), ("weight_orig",)),
}


def parametrised(kind: str) -> nn.Module:
    model = net()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        PARAMETRISED[kind][0](model.body)
    return model.double()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm:FutureWarning")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("kind", PARAMETRISED)
def test_parametrised_weights_are_effective_weights(kind: str, training: bool) -> None:
    model, plain = parametrised(kind).train(training), net().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = parametrised(kind).eval()
    weights(X)  # hooks compute the weight in the forward pass
    plain.load_state_dict(
        {
            **{f"head.{name}": value for name, value in weights.head.state_dict().items()},
            "body.weight": weights.body.weight,
            "body.bias": weights.body.bias,
        }
    )
    ifc = fit(model)
    assert_same(ifc.influence(X), fit(plain).influence(X), rtol=1e-8)
    assert {name for block in ifc._recorder.blocks for name in block.parameters} == dict(
        model.named_parameters()
    ).keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# Control flow


class Branching(nn.Module):
    """One of two layers, chosen by the sign of the sum of each example."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

    def choose(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() > 0 else self.two(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.cat([self.choose(row.unsqueeze(0)) for row in x])))


class Routing(Branching):
    """The same choice, with the examples of each layer in one call."""

    def forward(self, x: Tensor) -> Tensor:
        first = x.sum(1) > 0
        hidden = torch.cat([self.one(x[first]), self.two(x[~first])])
        return self.head(torch.tanh(hidden[torch.cat([first.nonzero(), (~first).nonzero()]).argsort(0).squeeze(1)]))


class ByBatch(Branching):
    """One choice for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.choose(x)))


@pytest.mark.parametrize("kind", [Branching, Routing])
def test_choices_per_example_are_exact(kind: type[nn.Module]) -> None:
    model = seeded(kind)().double()
    assert 0 < int((X.sum(1) > 0).sum()) < len(X)
    ifc = fit(model)
    blocks = [weight("one"), weight("two"), weight("head")]
    assert_same(ifc.influence(X), oracle_influence(ifc, seeded(Branching)(), blocks, X, DAMPING))


def test_layers_may_run_differently_later() -> None:
    """All examples of the first batch use one layer, of the second batch two of four."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x *= x.sum(1, keepdim=True).sign() * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    assert (x.sum(1) > 0).tolist() == [True, False, True, False]
    first = torch.where(x.sum(1, keepdim=True) > 0, x, -x)
    ifc = IFComp(seeded(Routing)().double(), fisher="exact", damping=DAMPING).fit([first, x])
    blocks = [weight("one"), weight("two"), weight("head")]
    assert_same(ifc.influence(x), oracle_influence(ifc, seeded(Branching)(), blocks, x, DAMPING))


@pytest.mark.parametrize("sums", [(3.0, -2.0, 1.0), (1.0, -2.0, 3.0), (-2.0, 1.0, 3.0)], ids=str)
def test_a_choice_for_the_whole_batch_is_refused(sums: tuple[float, ...]) -> None:
    x = torch.ones(3, 4, dtype=torch.float64) * torch.tensor(sums).unsqueeze(1)
    with pytest.raises(ModelError) as caught:
        fit(seeded(ByBatch)().double(), x)
    check_message(caught, "depend on the other examples", "decision", "whole batch")


# Modes, statistics, layouts


def with_norm(updated: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
        if updated:
            model(X)
    return model.eval()


@pytest.mark.filterwarnings("error")
def test_statistics_that_were_never_updated_cause_a_warning() -> None:
    with pytest.warns(IfcompWarning, match="statistics of 1 .* mean 0 and variance 1.*train mode") as caught:
        fit(with_norm(updated=False))
    assert caught[0].filename == __file__
    fit(with_norm(updated=True))


def test_dropout_is_disabled() -> None:
    model = nn.Sequential(net().body, nn.Dropout(0.9), nn.Tanh(), nn.Dropout(0.9), net().head).train()
    ifc = fit(model)
    assert torch.equal(ifc.influence(X), fit(net()).influence(X))
    assert model[1].training


def test_a_channels_last_model_gives_the_same() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), mean(2, 3), nn.Linear(4, 3))

    x = torch.randn(7, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, last = (seeded(build)().double() for _ in range(2))
    last.to(memory_format=torch.channels_last)
    ifc = fit(last, x.to(memory_format=torch.channels_last))
    assert_same(ifc.influence(x), oracle_influence(ifc, plain, [weight("0"), weight("3")], x, DAMPING))


def test_there_may_be_more_logits_than_classes_in_the_data() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8)))().double()
    ifc = IFComp(model, fisher="exact", damping=DAMPING).fit([(X, Y)])
    assert_same(ifc.influence(X), oracle_influence(ifc, model, [weight("0"), weight("2")], X, DAMPING))
    assert ifc.score([(X, Y)]).frame["label"].tolist() == Y.tolist()


# Dead layers


def with_dead_layer() -> nn.Module:
    """The hidden units are never active, so only the bias of the head has a gradient."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))().double()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    return model


def test_a_dead_layer_adds_nothing() -> None:
    ifc = fit(with_dead_layer())
    expected = oracle_influence(ifc, with_dead_layer(), [weight("0"), weight("2")], X, DAMPING)
    assert_same(ifc.influence(X), expected)
    for damping in (0.0, Relative(0.1)):
        assert ifc.influence(X, damping=damping).isfinite().all()
    assert [layer.verdict for layer in ifc.coverage.health] == ["dead", "fine"]


def test_a_model_without_gradients_has_no_influence() -> None:
    model = nn.Sequential(with_dead_layer()[0], nn.ReLU(), nn.Linear(6, 3, bias=False)).double()
    ifc = fit(model)
    for damping in (0.0, 1e-3, Relative(0.1)):
        assert torch.equal(ifc.influence(X, damping=damping), torch.zeros(9, 3, dtype=torch.float64))
        assert not ifc.score([X], damping=damping).frame.isna().any(axis=None)


# Half precision


class Scaled(nn.Module):
    """A weight layer, a norm, a bare parameter and a steep head."""

    def __init__(self, steepness: float) -> None:
        super().__init__()
        self.body, self.norm, self.scale = nn.Linear(4, 16), nn.LayerNorm(16), nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 3)
        with torch.no_grad():
            self.head.weight.mul_(steepness)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))) * self.scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steepness", [1.0, 10.0, 30.0])
def test_half_precision_equals_double_up_to_rounding(steepness: float, dtype: torch.dtype) -> None:
    """With a steep head many residuals are below 6e-8, the smallest number of float16.

    A rounding error of ``eps |z|`` of a logit z changes probabilities and influence by about this relative error.
    """
    half = seeded(lambda: Scaled(steepness))().to(dtype)
    double, x = copy.deepcopy(half).double(), X.to(dtype)
    result = IFComp(half, fisher="exact").fit([x]).influence(x)
    expected = IFComp(double, fisher="exact").fit([x.double()]).influence(x.double())
    error = (result / expected - 1).abs()
    rounding = torch.finfo(dtype).eps * (1 + float(double(x.double()).detach().abs().max()))
    assert float(error.median()) < rounding
    assert float(error.max()) < 5 * rounding


def test_gradients_that_overflow_in_half_precision_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), Apply(lambda x: x / 1000), nn.Linear(6, 3))
    with torch.no_grad():
        model[2].weight.fill_(6e4).view(-1)[0] = 0
    with pytest.raises(NonFiniteError) as caught:
        IFComp(model.half()).fit([X.half()])
    check_message(caught, "float16", "model.float()", "bfloat16")
