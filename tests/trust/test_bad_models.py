"""Models as people have them: wrapped, compiled, scripted, parametrised, in half precision, half finished.

Each is compared with the dense oracle on the plain model, or refused with an error that says what to do.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing import assert_close

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


def says(caught: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


# Wrapped and compiled -----------------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "data_parallel": DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled_aot": lambda model: torch.compile(model, backend="aot_eager"),
    "compiled_in_place": compiled_in_place,
    "compiled_data_parallel": lambda model: torch.compile(DataParallel(model), backend="eager"),
}


def matches_oracle(wrapped: nn.Module) -> IFComp:
    ifc = fit(wrapped)
    assert [row.name for row in ifc.coverage.rows] == ["body", "head"]
    assert_same(ifc.influence(X), oracle_influence(ifc, net(), [weight("body"), weight("head")], X, DAMPING))
    return ifc


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_models_are_what_is_inside(wrapper: str) -> None:
    matches_oracle(WRAPPERS[wrapper](net()))


def test_a_distributed_model_is_what_is_inside(group: None) -> None:
    matches_oracle(DistributedDataParallel(net()))


def test_a_compiled_part_is_covered_whole() -> None:
    model = net()
    model.body = torch.compile(model.body, backend="eager")
    ifc = fit(model)
    assert [(row.name, row.kind) for row in ifc.coverage.rows] == [("body._orig_mod", "linear"), ("head", "linear")]
    assert torch.equal(ifc.influence(X), fit(net()).influence(X))


def test_factors_serve_a_model_with_and_without_its_wrapper(tmp_path: Path) -> None:
    fit(DataParallel(net())).save(tmp_path / "wrapped")
    fit(net()).save(tmp_path / "plain")
    expected = fit(net()).influence(X)
    assert torch.equal(IFComp.load(tmp_path / "wrapped", net()).influence(X), expected)
    assert torch.equal(IFComp.load(tmp_path / "plain", torch.compile(net(), backend="eager")).influence(X), expected)


def test_a_wrapped_model_works_as_before() -> None:
    wrapped = torch.compile(net(), backend="eager")
    fit(wrapped).influence(X)
    assert_close(wrapped(X), net()(X))


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.filterwarnings("ignore")  # torch's own, about FSDP on CPUs
@pytest.mark.parametrize(
    "shard", [lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")), sharded], ids=["1", "2"]
)
def test_sharded_parameters_are_refused(shard: Callable[[nn.Module], nn.Module], group: None) -> None:
    with pytest.raises(ModelError) as caught:
        IFComp(shard(net()))
    says(caught, "FSDP", "full state dict", "plain model")


# TorchScript --------------------------------------------------------------------------------------------------------

PARAMETERS = ("body.weight", "body.bias", "head.weight", "head.bias")

SCRIPTED: dict[str, tuple[Callable[[], nn.Module], list[OracleBlock]]] = {
    "script": (lambda: torch.jit.script(net()), diagonal(*PARAMETERS)),
    "trace": (lambda: torch.jit.trace(net(), X), diagonal(*PARAMETERS)),
}


@pytest.mark.parametrize("kind", SCRIPTED)
def test_scripted_models_have_diagonal_blocks(kind: str) -> None:
    make, blocks = SCRIPTED[kind]
    ifc = fit(make())
    assert {row.treatment for row in ifc.coverage.rows} == {"diagonal"}
    assert_same(ifc.influence(X), oracle_influence(ifc, net(), blocks, X, DAMPING))


def test_a_scripted_part_has_diagonal_blocks() -> None:
    model = net()
    model.body = torch.jit.script(model.body)
    ifc = fit(model)
    blocks = [*diagonal("body.weight", "body.bias"), weight("head")]
    assert_same(ifc.influence(X), oracle_influence(ifc, net(), blocks, X, DAMPING))


def test_a_frozen_script_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        IFComp(torch.jit.freeze(torch.jit.script(net())))
    says(caught, "torch.jit.freeze", "model that was trained")


# Quantised and without values ---------------------------------------------------------------------------------------


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(net().float(), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore")  # torch's own, about quantisation
def test_dynamically_quantised_layers_are_refused() -> None:
    whole, part = quantised(), net().float()
    part.body = whole.body
    for model, names in ((whole, "body, head"), (part, "(body)")):
        with pytest.raises(ModelError) as caught:
            IFComp(model)
        says(caught, "quantised", names, "before quantisation")


class StaticallyQuantised(nn.Module):
    """A body that will be quantised, and a head that will not."""

    def __init__(self) -> None:
        super().__init__()
        self.quantise, self.body = torch.ao.quantization.QuantStub(), nn.Linear(4, 6)
        self.back, self.head = torch.ao.quantization.DeQuantStub(), nn.Linear(6, 3)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.back(self.body(self.quantise(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@pytest.mark.filterwarnings("ignore")  # torch's own, about quantisation
def test_layers_after_statically_quantised_ones_are_covered() -> None:
    x = X.float()
    model = seeded(StaticallyQuantised)()
    model.qconfig, model.head.qconfig = torch.ao.quantization.get_default_qconfig("x86"), None
    model = torch.ao.quantization.prepare(model)
    model(x)
    model = torch.ao.quantization.convert(model)
    ifc = fit(model, x)
    assert [row.name for row in ifc.coverage.rows] == ["head"]
    features = model.features(x).detach()
    assert torch.equal(ifc.influence(x), fit(model.head, features).influence(features))


def test_tensors_without_values_are_refused() -> None:
    model = net()
    model.head.to("meta")
    with pytest.raises(ModelError) as caught:
        IFComp(model)
    says(caught, "meta", "head.weight", "head.bias", "load_state_dict")
    assert "body" not in str(caught.value)


def test_a_long_list_of_names_is_cut_short() -> None:
    with pytest.raises(ModelError) as caught:
        IFComp(nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))).to("meta"))
    says(caught, "0.weight", "and 12 more")


# Parametrised weights -----------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """A parametrisation that is no identity."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * weight.abs()


def custom(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Doubled())


#: How a layer is parametrised, and what its parameters are called then.
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
def test_parametrised_weights_have_diagonal_blocks(kind: str, training: bool) -> None:
    model = parametrised(kind).train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ifc = fit(model)
    blocks = [*diagonal(*(f"body.{name}" for name in PARAMETRISED[kind][1]), "body.bias"), weight("head")]
    assert_same(ifc.influence(X), oracle_influence(ifc, parametrised(kind), blocks, X, DAMPING), rtol=1e-8)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# Control flow -------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """One of two layers, by the sign of an example's sum."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

    def choose(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() > 0 else self.two(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.cat([self.choose(row.unsqueeze(0)) for row in x])))


class Routing(Branching):
    """The same in two groups."""

    def forward(self, x: Tensor) -> Tensor:
        first = x.sum(1) > 0
        hidden = torch.cat([self.one(x[first]), self.two(x[~first])])
        return self.head(torch.tanh(hidden[torch.cat([first.nonzero(), (~first).nonzero()]).argsort(0).squeeze(1)]))


class ByBatch(Branching):
    """One decision for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.choose(x)))


@pytest.mark.parametrize("kind", [Branching, Routing])
def test_decisions_for_each_example_are_followed(kind: type[nn.Module]) -> None:
    model = seeded(kind)().double()
    assert 0 < int((X.sum(1) > 0).sum()) < len(X)
    ifc = fit(model)
    parts = ("one.weight", "one.bias", "two.weight", "two.bias")
    expected = oracle_influence(ifc, seeded(Branching)(), [*diagonal(*parts), weight("head")], X, DAMPING)
    assert_same(ifc.influence(X), expected)


def test_a_layer_that_runs_otherwise_later_is_named() -> None:
    """All of the first batch go one way, and of the second only two of four."""
    x = torch.ones(4, 4, dtype=torch.float64) * torch.tensor([[1.0], [2.0], [-1.0], [-2.0]])
    with pytest.raises(ModelError) as caught:
        IFComp(seeded(Routing)().double()).fit([x.abs(), x])
    says(caught, "Layer 'one'", "does not run as", "[2, 4]", "batch of 4", "layers=")


@pytest.mark.parametrize("sums", [(3.0, -2.0, 1.0), (1.0, -2.0, 3.0), (-2.0, 1.0, 3.0)], ids=str)
def test_a_decision_for_the_batch_is_refused(sums: tuple[float, ...]) -> None:
    x = torch.ones(3, 4, dtype=torch.float64) * torch.tensor(sums).unsqueeze(1)
    with pytest.raises(ModelError) as caught:
        fit(seeded(ByBatch)().double(), x)
    says(caught, "depend on the other examples", "decision", "whole batch")


# Modes, statistics, layouts ------------------------------------------------------------------------------------------


def with_norm(updated: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
        if updated:
            model(X)
    return model.eval()


@pytest.mark.filterwarnings("error")
def test_statistics_that_were_never_updated_are_told() -> None:
    with pytest.warns(IfcompWarning, match="statistics of 1 .* mean 0 and variance 1.*train mode") as told:
        fit(with_norm(updated=False))
    assert told[0].filename == __file__
    fit(with_norm(updated=True))


def test_dropout_in_train_mode_is_switched_off() -> None:
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


def test_more_logits_than_classes_in_the_data_are_as_good() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8)))().double()
    ifc = IFComp(model, fisher="exact", damping=DAMPING).fit([(X, Y)])
    assert_same(ifc.influence(X), oracle_influence(ifc, model, [weight("0"), weight("2")], X, DAMPING))
    assert ifc.score([(X, Y)]).frame["label"].tolist() == Y.tolist()


# Dead layers --------------------------------------------------------------------------------------------------------


def with_dead_layer() -> nn.Module:
    """The hidden units are never active, so that only the bias of the head has a gradient."""
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


def test_a_model_of_which_nothing_has_a_gradient_scores_nothing() -> None:
    model = nn.Sequential(with_dead_layer()[0], nn.ReLU(), nn.Linear(6, 3, bias=False)).double()
    ifc = fit(model)
    for damping in (0.0, 1e-3, Relative(0.1)):
        assert torch.equal(ifc.influence(X, damping=damping), torch.zeros(9, 3, dtype=torch.float64))
        assert not ifc.score([X], damping=damping).frame.isna().any(axis=None)


# Half precision -----------------------------------------------------------------------------------------------------


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
def test_half_precision_is_the_same_model_up_to_rounding(steepness: float, dtype: torch.dtype) -> None:
    """With a steep head many residuals are below 6e-8, where float16 has no more numbers.

    Rounding of a logit z by ``eps |z|`` changes probabilities, and so influence, by about as much, relatively.
    """
    half = seeded(lambda: Scaled(steepness))().to(dtype)
    double, x = copy.deepcopy(half).double(), X.to(dtype)
    found = IFComp(half, fisher="exact").fit([x]).influence(x)
    expected = IFComp(double, fisher="exact").fit([x.double()]).influence(x.double())
    error = (found / expected - 1).abs()
    rounding = torch.finfo(dtype).eps * (1 + float(double(x.double()).detach().abs().max()))
    assert float(error.median()) < rounding
    assert float(error.max()) < 5 * rounding


def test_gradients_that_overflow_in_half_precision_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), Apply(lambda x: x / 1000), nn.Linear(6, 3))
    with torch.no_grad():
        model[2].weight.fill_(6e4).view(-1)[0] = 0
    with pytest.raises(NonFiniteError) as caught:
        IFComp(model.half()).fit([X.half()])
    says(caught, "float16", "model.float()", "bfloat16")
