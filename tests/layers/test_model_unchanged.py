"""The model is the same after every call, also after a failure."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases import CASES as LISTED_CASES
from cases import WEIGHT_NORM, Case, mean
from comparison import as_type, fitted
from ifcomp import IFComp
from oracles import Inputs

CASES = {**LISTED_CASES, WEIGHT_NORM.name: WEIGHT_NORM}

SIZE = 7


def inputs_of(case: Case, size: int = SIZE, seed: int = 0) -> Inputs:
    return as_type(case.sample(size, seed), torch.float64)


def parts(inputs: Inputs, size: int) -> list[Inputs]:
    """Consecutive batches of at most ``size`` examples."""
    if isinstance(inputs, Tensor):
        return list(inputs.split(size))
    columns = {name: value.split(size) for name, value in inputs.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class Limited(nn.Module):
    """A model that fails after a number of forward passes.

    Attributes:
        left: Number of forward passes before the failure.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.left = 10**9

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise InjectedError
        return self.inner(*args, **kwargs)


class InjectedError(Exception):
    """Raised by `Limited` and `Failing`; not an error of the library or of torch."""


class Failing:
    """Batches whose iteration fails before the given batch of the given pass."""

    def __init__(self, batches: list[Inputs], at_pass: int, at_batch: int) -> None:
        self.batches, self.at_pass, self.at_batch = batches, at_pass, at_batch
        self.passes = 0

    def __iter__(self) -> Iterator[Inputs]:
        self.passes += 1
        for number, batch in enumerate(self.batches):
            if (self.passes, number) == (self.at_pass, self.at_batch):
                raise InjectedError
            yield batch


def used_model(name: str) -> Limited:
    """A model with mixed modes, frozen parameters, hooks and gradients."""
    model = Limited(CASES[name].make().double())
    order = random.Random(name)
    for module in model.modules():
        module.training = order.random() < 0.5
    names = [name for name, _ in model.named_parameters()]
    model.get_parameter(names[1]).requires_grad_(False)
    first = model.get_parameter(names[0])
    first.grad = torch.ones_like(first)
    leaf = list(model.modules())[-1]
    leaf.register_forward_hook(lambda *_: None)
    leaf.register_forward_pre_hook(lambda *_: None)
    leaf.register_full_backward_hook(lambda *_: None)
    leaf.register_state_dict_post_hook(lambda *_: None)
    return model


def snapshot(model: nn.Module) -> dict[str, Any]:
    """The state of a model, of random generators and of autograd that must not change."""
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    hooks = {
        (name, key): list(value)
        for name, module in modules.items()
        for key, value in vars(module).items()
        if "hook" in key and isinstance(value, dict)
    }
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "versions": {name: value._version for name, value in model.state_dict(keep_vars=True).items()},
        "identity": {name: (id(value), value.data_ptr()) for name, value in parameters.items()},
        "training": {name: module.training for name, module in modules.items()},
        "requires_grad": {name: value.requires_grad for name, value in parameters.items()},
        "grad": {name: None if value.grad is None else value.grad.clone() for name, value in parameters.items()},
        "hooks": hooks,
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "torch_random": torch.get_rng_state(),
        "numpy_random": np.random.get_state()[1],
        "python_random": random.getstate(),
        "grad_mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def check_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    for key, value in before.items():
        if key in ("state", "grad"):
            assert value.keys() == after[key].keys()
            different = [name for name, one in value.items() if not _equal(one, after[key][name])]
            assert not different, f"{key} of {different} changed"
        elif key in ("torch_random", "numpy_random"):
            assert bool((value == after[key]).all()), f"{key} changed"
        else:
            assert value == after[key], f"{key} changed"


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


MODELS = [
    "lenet",
    "vision_transformer",
    "bert",
    "attention_batch_first",
    "encoder_layer",
    "lstm",
    "tied",
    "weight_norm",
]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # inputs of the last layer need no gradient
@pytest.mark.parametrize(("name", "layers"), [*((name, None) for name in MODELS), ("lenet", "last")])
def test_the_model_is_not_changed(name: str, layers: str | None) -> None:
    """With all layers, and with one, for which other parameters need no gradient."""
    case, model = CASES[name], used_model(name)
    inputs, before = inputs_of(case), snapshot(model)
    ifc = IFComp(model, layers=layers)
    check_unchanged(model, before)
    ifc.fit(parts(inputs, 3))
    check_unchanged(model, before)
    labels = torch.zeros(SIZE, dtype=torch.long)
    calls: list[Callable[[], object]] = [
        lambda: ifc.influence(inputs),
        lambda: ifc.logit_kernel(inputs),
        lambda: ifc.predict_proba(inputs),
        lambda: ifc.parametric_complexity(inputs, probes=2),
        lambda: ifc.stochastic_complexity(inputs, labels),
        lambda: ifc.score(parts(inputs, 3)),
    ]
    for call in calls:
        call()
        check_unchanged(model, before)


@pytest.mark.parametrize("at_batch", [0, 1, 2])
@pytest.mark.parametrize("at_pass", [1, 2])
@pytest.mark.parametrize("name", ["vision_transformer", "lenet"])
def test_the_model_is_restored_if_the_data_fails_in_a_fit(name: str, at_pass: int, at_batch: int) -> None:
    model = used_model(name)
    before = snapshot(model)
    with pytest.raises(InjectedError) as caught:
        IFComp(model).fit(Failing(parts(inputs_of(CASES[name]), 3), at_pass, at_batch))
    check_unchanged(model, before)
    assert caught.value.__traceback__ is not None  # the frames of the failed call are still alive


@pytest.mark.parametrize("forwards", [0, 1, 3, 7])
@pytest.mark.parametrize("name", MODELS[:4])
def test_the_model_is_restored_if_it_fails_in_a_fit(name: str, forwards: int) -> None:
    model = used_model(name)
    before = snapshot(model)
    model.left = forwards
    with pytest.raises(InjectedError) as caught:
        IFComp(model).fit(parts(inputs_of(CASES[name]), 3))
    check_unchanged(model, before)
    assert caught.value.__traceback__ is not None


FAILING_CALLS: dict[str, Callable[[IFComp, list[Inputs]], object]] = {
    "influence": lambda ifc, batches: ifc.influence(batches[0]),
    "logit_kernel": lambda ifc, batches: ifc.logit_kernel(batches[0]),
    "predict_proba": lambda ifc, batches: ifc.predict_proba(batches[0]),
    "parametric_complexity": lambda ifc, batches: ifc.parametric_complexity(batches[0]),
    "score": lambda ifc, batches: ifc.score(batches),
    "score_second_batch": lambda ifc, batches: ifc.score(Failing(batches, 1, 1)),
}


@pytest.mark.parametrize("call", FAILING_CALLS)
@pytest.mark.parametrize("name", ["vision_transformer", "lenet"])
def test_the_model_is_restored_if_scoring_fails(name: str, call: str) -> None:
    model, inputs = used_model(name), inputs_of(CASES[name])
    ifc = IFComp(model).fit(parts(inputs, 3))
    expected, before = ifc.influence(inputs), snapshot(model)
    model.left = 10**9 if call == "score_second_batch" else 0
    with pytest.raises(InjectedError) as caught:
        FAILING_CALLS[call](ifc, parts(inputs, 3))
    check_unchanged(model, before)
    model.left = 10**9
    assert torch.equal(ifc.influence(inputs), expected)
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("frozen", [False, True], ids=["skipped", "frozen"])
def test_an_embedding_with_max_norm_is_not_changed(frozen: bool) -> None:
    """A lookup in an embedding with ``max_norm`` changes its weights in every mode."""
    model = nn.Sequential(nn.Embedding(6, 3, max_norm=0.5), mean(1), nn.Linear(3, 3)).double()
    model[0].weight.requires_grad_(not frozen)
    before = snapshot(model)
    seen, unseen = torch.tensor([[0, 1], [2, 0], [1, 1]]), torch.tensor([[3, 4], [5, 3]])
    ifc = IFComp(model, skip_uncovered=True).fit([seen])
    assert ifc.influence(unseen).isfinite().all()
    assert torch.equal(model[0].weight, before["state"]["0.weight"])


def test_a_replaced_forward_of_a_module_is_used_and_kept() -> None:
    case = CASES["attention_batch_first"]
    model = case.make().double()
    attention = model.get_submodule("attn")
    original = attention.forward

    def doubled(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, weights = original(*args, **kwargs)
        return 2 * output, weights

    attention.forward = doubled  # type: ignore[method-assign]
    inputs = inputs_of(case)
    ifc = IFComp(model, fisher="exact", damping=1e-3).fit([inputs_of(case, SIZE, seed=1)])
    assert not torch.allclose(ifc.influence(inputs), fitted(case).influence(inputs))
    assert attention.forward is doubled
    torch.testing.assert_close(ifc.predict_proba(inputs, alpha=0.0), model(inputs).softmax(1).detach())
