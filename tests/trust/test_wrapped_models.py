"""Wrapped, compiled, scripted, sharded and quantised models.

Each is compared with the dense oracle of the plain model, or refused with advice.
"""

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
from torch.testing import assert_close

from cases import seeded, weight
from comparison import assert_same, oracle_influence
from ifcomp import IFComp
from ifcomp.errors import ModelError
from oracles import OracleBlock

DAMPING = 1e-3
X = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


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


# Wrapped and compiled


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
def test_wrappers_are_removed(wrapper: str) -> None:
    matches_oracle(WRAPPERS[wrapper](net()))


def test_distributed_data_parallel_is_removed(group: None) -> None:
    matches_oracle(DistributedDataParallel(net()))


def test_compiled_modules_are_covered() -> None:
    model = net()
    model.body = torch.compile(model.body, backend="eager")
    ifc = fit(model)
    assert [(row.name, row.kind) for row in ifc.coverage.rows] == [("body._orig_mod", "linear"), ("head", "linear")]
    assert torch.equal(ifc.influence(X), fit(net()).influence(X))


def test_factors_fit_a_model_with_and_without_its_wrapper(tmp_path: Path) -> None:
    fit(DataParallel(net())).save(tmp_path / "wrapped")
    fit(net()).save(tmp_path / "plain")
    expected = fit(net()).influence(X)
    assert torch.equal(IFComp.load(tmp_path / "wrapped", net()).influence(X), expected)
    assert torch.equal(IFComp.load(tmp_path / "plain", torch.compile(net(), backend="eager")).influence(X), expected)


def test_a_wrapped_model_still_runs() -> None:
    wrapped = torch.compile(net(), backend="eager")
    fit(wrapped).influence(X)
    assert_close(wrapped(X), net()(X))


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.filterwarnings("ignore")  # warnings of torch about FSDP on CPUs
@pytest.mark.parametrize(
    "shard", [lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")), sharded], ids=["1", "2"]
)
def test_sharded_parameters_are_refused(shard: Callable[[nn.Module], nn.Module], group: None) -> None:
    with pytest.raises(ModelError) as caught:
        IFComp(shard(net()))
    check_message(caught, "FSDP", "full state dict", "plain model")


# TorchScript

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


def test_scripted_modules_have_diagonal_blocks() -> None:
    model = net()
    model.body = torch.jit.script(model.body)
    ifc = fit(model)
    blocks = [*diagonal("body.weight", "body.bias"), weight("head")]
    assert_same(ifc.influence(X), oracle_influence(ifc, net(), blocks, X, DAMPING))


def test_a_frozen_script_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        IFComp(torch.jit.freeze(torch.jit.script(net())))
    check_message(caught, "torch.jit.freeze", "model that was trained")


# Quantised models and models without values


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(net().float(), {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore")  # warnings of torch about quantisation
def test_dynamically_quantised_layers_are_refused() -> None:
    both, one = quantised(), net().float()
    one.body = both.body
    for model, names in ((both, "body, head"), (one, "(body)")):
        with pytest.raises(ModelError) as caught:
            IFComp(model)
        check_message(caught, "quantised", names, "before quantisation")


class StaticallyQuantised(nn.Module):
    """A body that is quantised, and a head that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.quantise, self.body = torch.ao.quantization.QuantStub(), nn.Linear(4, 6)
        self.back, self.head = torch.ao.quantization.DeQuantStub(), nn.Linear(6, 3)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.back(self.body(self.quantise(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@pytest.mark.filterwarnings("ignore")  # warnings of torch about quantisation
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
    check_message(caught, "meta", "head.weight", "head.bias", "load_state_dict")
    assert "body" not in str(caught.value)


def test_a_long_list_of_names_is_shortened() -> None:
    with pytest.raises(ModelError) as caught:
        IFComp(nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))).to("meta"))
    check_message(caught, "0.weight", "and 12 more")
