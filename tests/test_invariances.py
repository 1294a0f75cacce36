"""What results must not depend on, what the model must be like afterwards, and what damping and probes mean."""

import copy
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from cases import LAYER_CASES, MODEL_CASES, Apply, Case, mean, seeded
from comparison import as_type, fitted
from experiments.models import LeNet
from ifcomp import IFComp, Relative
from ifcomp.curvature import passes, rotation
from ifcomp.influence import forms
from ifcomp.layers import session
from oracles import Inputs

CASES = {case.name: case for case in [*LAYER_CASES, *MODEL_CASES]}

#: One of each way in which a layer meets its batch, and three whole models.
NAMES = [
    "linear_tokens",
    "linear_sequence_first",
    "linear_folded",
    "conv2d_groups",
    "conv2d_folded",
    "batchnorm2d",
    "layernorm_two_axes",
    "embedding_padding",
    "embedding_positions_leading",
    "embedding_positions_flat",
    "attention",
    "attention_causal_padding",
    "linear_twice",
    "tied",
    "lstm",
    "lenet",
    "vision_transformer",
    "bert",
]
FEW = ["lenet", "vision_transformer", "bert", "linear_sequence_first"]
SIZE = 7


def inputs_of(case: Case, size: int = SIZE, seed: int = 0) -> Inputs:
    return as_type(case.sample(size, seed), torch.float64)


def parts(inputs: Inputs, size: int) -> list[Inputs]:
    """Consecutive batches of at most ``size`` examples."""
    if isinstance(inputs, Tensor):
        return list(inputs.split(size))
    columns = {name: value.split(size) for name, value in inputs.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def sum_of(batches: list[Inputs]) -> int:
    """Examples in all batches."""
    return sum(len(next(iter(batch.values())) if isinstance(batch, dict) else batch) for batch in batches)


@cache
def ready(name: str) -> IFComp:
    """The case fitted in double precision with the exact Fisher and a damping of 1e-3."""
    return fitted(CASES[name])


def same(found: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
    assert_close(found, expected, rtol=rtol, atol=rtol * float(expected.abs().max()) * 1e-3)


# Batches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_batch_size_of_scoring_does_not_matter(name: str) -> None:
    ifc, inputs = ready(name), inputs_of(CASES[name])
    frame, kernel = ifc.score([inputs]).frame, ifc.logit_kernel(inputs)
    for size in (1, 2, 3):
        batches = parts(inputs, size)
        pd.testing.assert_frame_equal(ifc.score(batches).frame, frame, rtol=1e-12, atol=0)
        same(torch.cat([ifc.logit_kernel(part) for part in batches[-2:]]), kernel[-sum_of(batches[-2:]) :], 1e-11)
    probed = ifc.score(parts(inputs, 2), probes=2).frame
    pd.testing.assert_frame_equal(probed, ifc.score([inputs], probes=2).frame, rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("name", FEW)
def test_batch_size_of_influence_does_not_matter(name: str, size: int) -> None:
    ifc, inputs = ready(name), inputs_of(CASES[name])
    same(torch.cat([ifc.influence(part) for part in parts(inputs, size)]), ifc.influence(inputs))


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_batch_size_of_the_fit_does_not_matter(name: str, size: int) -> None:
    case = CASES[name]
    data, inputs = inputs_of(case, 30, seed=1), inputs_of(case, 4)

    def influence(batches: list[Inputs]) -> Tensor:
        model = case.make().double()
        return IFComp(model, damping=Relative(1.0), label_samples=2, seed=3).fit(batches).influence(inputs)

    assert_close(influence(parts(data, size)), influence([data]), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    inputs = inputs_of(case)
    options = {"fisher": "sampled", "damping": Relative(1.0), "size": 30}
    whole = fitted(case, **options)
    expected = [whole.influence(inputs), whole.logit_kernel(inputs), whole.parametric_complexity(inputs, probes=2)]
    monkeypatch.setattr("ifcomp.layers.session.PIECE_BYTES", 1)
    torn = fitted(case, **options)
    found = [torn.influence(inputs), torn.logit_kernel(inputs), torn.parametric_complexity(inputs, probes=2)]
    for one, other in zip(found, expected, strict=True):
        same(one, other, 1e-9)


@pytest.mark.parametrize("entries", [1, 60])
@pytest.mark.parametrize("name", ["conv2d_groups", "linear_tokens", "lenet", "vision_transformer"])
def test_slabs_do_not_matter(name: str, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fit, in scores and between examples: a few columns at a time are the same as all."""
    case = CASES[name]
    inputs = inputs_of(case)
    labels = torch.arange(SIZE) % 2

    def results() -> list[Tensor]:
        ifc = fitted(case, fisher="sampled", damping=Relative(1.0), size=30)
        effects = ifc.explain(inputs, labels, [(inputs, labels)], k=SIZE).frame
        effects = effects.sort_values(["query", "role", "index"])["effect"].to_numpy()
        return [ifc.influence(inputs), ifc.logit_kernel(inputs), torch.tensor(effects)]

    expected = results()
    monkeypatch.setattr(rotation, "SLAB_ENTRIES", entries)
    monkeypatch.setattr(forms, "choose_kernel", lambda *_: "direct")
    for one, other in zip(results(), expected, strict=True):
        same(one, other, 1e-9)


def hold_at_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the cotangents that are held at once, in every module that goes by the limit."""
    users = [module for module in (session, forms, passes) if hasattr(module, "COTANGENTS_AT_ONCE")]
    assert users
    for module in users:
        monkeypatch.setattr(module, "COTANGENTS_AT_ONCE", count)


@pytest.mark.parametrize("name", NAMES)
def test_cotangents_at_once_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ifc, inputs = ready(name), inputs_of(CASES[name])
    expected = ifc.influence(inputs)
    for at_once in (1, 2):
        hold_at_once(at_once, monkeypatch)
        same(ifc.influence(inputs), expected)
        same(fitted(CASES[name]).influence(inputs), expected, 1e-9)


class Folded(nn.Module):
    """A layer without bias on [B, T, F], or on [T * B, F] with the examples of one position together."""

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


@pytest.mark.parametrize("value", [0.0, -100.0], ids=["blank", "dead"])
@pytest.mark.parametrize("where", [[2], [0, 1], [0, 1, 2], [3, 5, 7, 9]], ids=str)
def test_examples_without_gradient_do_not_mislead(where: list[int], value: float) -> None:
    """Rules are checked on a few examples; those that no gradient reaches say nothing about the batch axis."""
    x = torch.randn(12, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[where] = value
    found, expected = (
        IFComp(seeded(partial(Folded, first))().double(), fisher="exact", damping=1e-2).fit([x]).influence(x)
        for first in (False, True)
    )
    assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Category(nn.Module):
    """The first column is a category, kept as a float beside large measurements."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 4)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.table(x[:, 0].long()), torch.tanh(x[:, 1:] / 100)], 1))


class Logarithm(nn.Module):
    """Counts go through a logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.log(x + 1e-3))))


class Strict(nn.Module):
    """Runs on rows of its data only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Logarithm()
        self.known = counted()

    def forward(self, x: Tensor) -> Tensor:
        assert all(bool((self.known == row).all(1).any()) for row in x), "these are not the given inputs"
        return self.inner(x)


def counted() -> Tensor:
    """Whole numbers from 0 to 2, and columns a hundred times as large."""
    whole = torch.randint(3, (9, 4), generator=torch.Generator().manual_seed(0)).double()
    return whole * torch.tensor([1.0, 100.0, 100.0, 100.0])


@pytest.mark.parametrize("make", [Category, Logarithm, Strict])
def test_the_model_sees_the_given_inputs_only(make: Callable[[], nn.Module]) -> None:
    """Other values could be outside of what a model is made for."""
    ifc = IFComp(seeded(make)().double()).fit([counted()])
    assert ifc.influence(counted()).isfinite().all()


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
def test_one_position_is_not_one_row_for_all_examples(fit_lengths: tuple[int, ...], score_length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(5, length, 4, generator=generator, dtype=torch.float64) for length in fit_lengths]
    x = torch.randn(5, score_length, 4, generator=generator, dtype=torch.float64)
    found, expected = (
        IFComp(seeded(partial(Summed, first))().double(), fisher="exact", damping=1e-2).fit(data).influence(x)
        for first in (False, True)
    )
    assert_close(found, expected, rtol=1e-9, atol=0)


# Calls, threads, modes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_order_of_calls_does_not_matter(name: str) -> None:
    case = CASES[name]
    ifc, inputs = fitted(case), inputs_of(case)
    influence, kernel, frame = ifc.influence(inputs), ifc.logit_kernel(inputs), ifc.score([inputs]).frame
    for damping in (1.0, Relative(0.5), 1e-12, 0.0):
        ifc.parametric_complexity(inputs, damping=damping, probes=1)
        ifc.influence(inputs, damping=damping)
    pd.testing.assert_frame_equal(ifc.score([inputs]).frame, frame, check_exact=True)
    assert torch.equal(ifc.logit_kernel(inputs), kernel)
    assert torch.equal(ifc.influence(inputs), influence)


@pytest.mark.parametrize("name", ["lenet", "linear_sequence_first"])
def test_number_of_threads_does_not_matter(name: str) -> None:
    case = CASES[name]
    inputs = inputs_of(case)
    expected = ready(name).influence(inputs)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        same(ready(name).influence(inputs), expected)
        same(fitted(case).influence(inputs), expected, 1e-9)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", FEW)
def test_mode_of_the_model_does_not_matter(name: str) -> None:
    case = CASES[name]
    inputs = inputs_of(case)
    model = case.make().double().train()
    ifc = IFComp(model, fisher="exact", damping=1e-3).fit([inputs_of(case, SIZE, seed=1)])
    assert model.training
    assert torch.equal(ifc.influence(inputs), ready(name).influence(inputs))
    model.eval()
    assert torch.equal(ifc.influence(inputs), ready(name).influence(inputs))


GRAD_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("name", FEW[:2])
def test_grad_mode_of_a_fit_does_not_matter(name: str, mode: str) -> None:
    case = CASES[name]
    inputs = inputs_of(case)
    model = case.make().double()
    with GRAD_MODES[mode]():
        ifc = IFComp(model, fisher="exact", damping=1e-3).fit([inputs_of(case, SIZE, seed=1)])
    assert torch.equal(ifc.influence(inputs), ready(name).influence(inputs))


@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("name", FEW)
def test_grad_mode_of_scoring_does_not_matter(name: str, mode: str) -> None:
    ifc, inputs = ready(name), inputs_of(CASES[name])
    expected = ifc.score([inputs]).frame, ifc.logit_kernel(inputs)
    with GRAD_MODES[mode]():
        frame, kernel = ifc.score([inputs]).frame, ifc.logit_kernel(inputs)
    pd.testing.assert_frame_equal(frame, expected[0], check_exact=True)
    assert torch.equal(kernel, expected[1])


@pytest.mark.parametrize("name", FEW)
def test_inputs_made_in_inference_mode_are_as_good(name: str) -> None:
    case = CASES[name]
    with torch.inference_mode():
        data, inputs = inputs_of(case, SIZE, seed=1), inputs_of(case)
        batch = {key: value.clone() for key, value in inputs.items()} if isinstance(inputs, dict) else inputs.clone()
    ifc = IFComp(case.make().double(), fisher="exact", damping=1e-3).fit([data])
    assert torch.equal(ifc.influence(batch), ready(name).influence(inputs_of(case)))


class Yields:
    """Batches that are made inside a context, which stays open between them."""

    def __init__(self, batches: list[Inputs], context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.batches, self.context = batches, context

    def __iter__(self) -> Iterator[Inputs]:
        with self.context():
            for batch in self.batches:
                yield batch.clone() if isinstance(batch, Tensor) else batch


@pytest.mark.parametrize("mode", GRAD_MODES)
def test_grad_mode_inside_the_loader_does_not_matter(mode: str) -> None:
    case = CASES["lenet"]
    batches, inputs = parts(inputs_of(case, SIZE, seed=1), 3), parts(inputs_of(case), 3)

    def influences() -> list[float]:
        ifc = IFComp(case.make().double(), fisher="exact", damping=1e-3).fit(Yields(batches, GRAD_MODES[mode]))
        return ifc.score(Yields(inputs, GRAD_MODES[mode])).frame["expected_influence"].tolist()

    with ThreadPoolExecutor(1) as own_thread:  # what the loader leaves behind stays there
        found = own_thread.submit(influences).result()
    ifc = IFComp(case.make().double(), fisher="exact", damping=1e-3).fit(batches)
    assert found == pytest.approx(ifc.score(inputs).frame["expected_influence"].tolist(), rel=1e-9)


# Inputs and activations ---------------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "part_of_a_graph": lambda x: x.clone().requires_grad_() * 1.0,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every_second": lambda x: torch.stack([x, x], 1).flatten(0, 1)[::2],
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "parameter": nn.Parameter,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["lenet", "vision_transformer", "conv2d_groups"])
def test_form_of_the_inputs_does_not_matter(name: str, form: str) -> None:
    case = CASES[name]
    data, inputs = inputs_of(case, SIZE, seed=1), inputs_of(case)
    assert isinstance(inputs, Tensor)
    assert isinstance(data, Tensor)
    given = FORMS[form](inputs)
    ifc = IFComp(case.make().double(), fisher="exact", damping=1e-3).fit([FORMS[form](data)])
    found = ifc.influence(given)
    same(found, ready(name).influence(inputs), 1e-9)
    assert not found.requires_grad
    assert not given.is_leaf or given.grad is None
    assert torch.equal(given, inputs)


def activated(activation: Callable[[bool], nn.Module], first: bool) -> nn.Module:
    """A small network with the activation after each layer, and before all of them if ``first``."""

    def build(inplace: bool) -> nn.Module:
        return nn.Sequential(
            activation(inplace) if first else nn.Identity(),
            *(nn.Conv2d(2, 4, 2), activation(inplace), nn.BatchNorm2d(4), activation(inplace)),
            *(mean(2, 3), nn.Linear(4, 6), activation(inplace), nn.Linear(6, 3)),
        )

    return build


ACTIVATIONS: dict[str, Callable[[bool], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": lambda inplace: nn.LeakyReLU(0.1, inplace),
    "elu": lambda inplace: nn.ELU(inplace=inplace),
    "silu": nn.SiLU,
    "hardtanh": lambda inplace: nn.Hardtanh(inplace=inplace),
    "dropout": lambda inplace: nn.Dropout(0.5, inplace),
    "add": lambda inplace: Apply((lambda x: x.add_(1)) if inplace else (lambda x: x + 1)),
}


@pytest.mark.parametrize(
    ("activation", "first"), [*((name, False) for name in ACTIVATIONS), ("relu", True), ("add", True)], ids=str
)
def test_activations_in_place_give_the_same(activation: str, first: bool) -> None:
    build = activated(ACTIVATIONS[activation], first)
    x = torch.randn(9, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for inplace in (True, False):
        model = seeded(partial(build, inplace))().double()
        given = x.clone()
        ifc = IFComp(model, fisher="exact", damping=1e-3).fit([given[:5], given[5:]])
        results.append(ifc.influence(given))
        assert torch.equal(given, x), "the inputs were changed"
    same(*results)


# The model afterwards -----------------------------------------------------------------------------------------------


class Fused(nn.Module):
    """A model that fails once so many forward passes have been made."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.left = 10**9

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise BlownError
        return self.inner(*args, **kwargs)


class BlownError(Exception):
    """What `Fused` and `Failing` raise; no error of the library or of torch."""


class Failing:
    """Batches whose iteration fails before the given batch of the given pass."""

    def __init__(self, batches: list[Inputs], at_pass: int, at_batch: int) -> None:
        self.batches, self.at_pass, self.at_batch = batches, at_pass, at_batch
        self.passes = 0

    def __iter__(self) -> Iterator[Inputs]:
        self.passes += 1
        for number, batch in enumerate(self.batches):
            if (self.passes, number) == (self.at_pass, self.at_batch):
                raise BlownError
            yield batch


def used_model(name: str) -> Fused:
    """A model in the middle of someone's work: mixed modes, frozen parts, own hooks, gradients left over."""
    model = Fused(CASES[name].make().double())
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
    """Everything about a model, and about random numbers, that must not change."""
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


def unchanged(model: nn.Module, before: dict[str, Any]) -> None:
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


KEPT = ["lenet", "vision_transformer", "bert", "attention_batch_first", "encoder_layer", "lstm", "tied", "weight_norm"]


@pytest.mark.parametrize("name", KEPT)
def test_the_model_comes_back_as_it_was(name: str) -> None:
    case, model = CASES[name], used_model(name)
    inputs, before = inputs_of(case), snapshot(model)
    ifc = IFComp(model)
    unchanged(model, before)
    ifc.fit(parts(inputs, 3))
    unchanged(model, before)
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
        unchanged(model, before)


@pytest.mark.parametrize("at_batch", [0, 1, 2])
@pytest.mark.parametrize("at_pass", [1, 2])
@pytest.mark.parametrize("name", ["vision_transformer", "lenet"])
def test_the_model_comes_back_when_the_data_fails_in_a_fit(name: str, at_pass: int, at_batch: int) -> None:
    model = used_model(name)
    before = snapshot(model)
    with pytest.raises(BlownError) as caught:
        IFComp(model).fit(Failing(parts(inputs_of(CASES[name]), 3), at_pass, at_batch))
    unchanged(model, before)
    assert caught.value.__traceback__ is not None  # the frames of the failed call are still alive


@pytest.mark.parametrize("forwards", [0, 1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", KEPT[:4])
def test_the_model_comes_back_when_it_fails_in_a_fit(name: str, forwards: int) -> None:
    model = used_model(name)
    before = snapshot(model)
    model.left = forwards
    with pytest.raises(BlownError) as caught:
        IFComp(model).fit(parts(inputs_of(CASES[name]), 3))
    unchanged(model, before)
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
def test_the_model_comes_back_when_scoring_fails(name: str, call: str) -> None:
    model, inputs = used_model(name), inputs_of(CASES[name])
    ifc = IFComp(model).fit(parts(inputs, 3))
    expected, before = ifc.influence(inputs), snapshot(model)
    model.left = 10**9 if call == "score_second_batch" else 0
    with pytest.raises(BlownError) as caught:
        FAILING_CALLS[call](ifc, parts(inputs, 3))
    unchanged(model, before)
    model.left = 10**9
    assert torch.equal(ifc.influence(inputs), expected)
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("frozen", [False, True], ids=["skipped", "frozen"])
def test_an_embedding_that_renormalises_itself_is_not_changed(frozen: bool) -> None:
    """Looking up a row of an embedding with ``max_norm`` writes to its weights, whatever the mode."""
    model = nn.Sequential(nn.Embedding(6, 3, max_norm=0.5), mean(1), nn.Linear(3, 3)).double()
    model[0].weight.requires_grad_(not frozen)
    before = snapshot(model)
    seen, unseen = torch.tensor([[0, 1], [2, 0], [1, 1]]), torch.tensor([[3, 4], [5, 3]])
    ifc = IFComp(model, skip_uncovered=True).fit([seen])
    assert ifc.influence(unseen).isfinite().all()
    assert torch.equal(model[0].weight, before["state"]["0.weight"])


def test_an_own_forward_of_a_module_stays() -> None:
    """A forward that was replaced on the instance is someone else's, and is neither lost nor bypassed."""
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
    assert not torch.allclose(ifc.influence(inputs), ready(case.name).influence(inputs))
    assert attention.forward is doubled
    torch.testing.assert_close(ifc.predict_proba(inputs, alpha=0.0), model(inputs).softmax(1).detach())


# Damping ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("kind", [float, Relative])
def test_influence_falls_as_damping_grows(name: str, kind: Callable[[float], Any]) -> None:
    ifc, inputs = ready(name), inputs_of(CASES[name])
    values = [ifc.influence(inputs, damping=kind(value)) for value in (1e-8, 1e-4, 1e-2, 1.0, 1e2, 1e6, 2e6)]
    for weaker, stronger in pairwise(values):
        assert (stronger < weaker).all()
    assert (values[-1] > 0).all()
    assert_close(values[-1], values[-2] / 2, rtol=1e-4, atol=0)


@pytest.mark.parametrize("damping", [0.0, 1e-12, 0.5, 1, Relative(0.01), Relative(0)], ids=repr)
def test_damping_of_a_call_is_that_of_the_constructor(damping: Any) -> None:
    case = CASES["vision_transformer"]
    inputs = inputs_of(case)
    own, called = fitted(case, damping=damping), ready(case.name)
    assert torch.equal(own.influence(inputs), called.influence(inputs, damping=damping))
    assert torch.equal(own.logit_kernel(inputs), called.logit_kernel(inputs, damping=damping))
    assert torch.equal(own.predict_proba(inputs), called.predict_proba(inputs, damping=damping))
    frames = own.score([inputs]), called.score([inputs], damping=damping)
    pd.testing.assert_frame_equal(frames[0].frame, frames[1].frame, check_exact=True)
    assert frames[0].settings == frames[1].settings
    labels = torch.ones(SIZE, dtype=torch.long)
    one, other = (
        own.stochastic_complexity(inputs, labels),
        called.stochastic_complexity(inputs, labels, damping=damping),
    )
    assert torch.equal(one, other)


def test_relative_damping_is_a_multiple_of_the_mean_curvature() -> None:
    ifc = ready("vision_transformer")
    assert ifc.factors is not None
    for name, block in ifc.factors.blocks.items():
        mean_curvature = float(block.second_moments.mean())
        assert ifc.factors.damping_of(name, Relative(0.3)) == pytest.approx(0.3 * mean_curvature, rel=1e-12)
        assert ifc.factors.damping_of(name, 0.3) == 0.3


def test_relative_damping_is_the_absolute_one_of_each_block() -> None:
    case = CASES["vision_transformer"]
    inputs, data = inputs_of(case), inputs_of(case, SIZE, seed=1)
    whole = ready(case.name)
    assert whole.factors is not None
    total = torch.zeros(SIZE, case.num_classes, dtype=torch.float64)
    for name in ("patch", "mlp.0", "norm1", "head", "token"):
        one = IFComp(case.make().double(), layers=name, fisher="exact").fit([data])
        relative = one.influence(inputs, damping=Relative(0.1))
        same(one.influence(inputs, damping=whole.factors.damping_of(name, Relative(0.1))), relative)
        total += relative
    assert (total < whole.influence(inputs, damping=Relative(0.1))).all()


# Probes -------------------------------------------------------------------------------------------------------------

SEEDS = 300
PROBED = "linear_folded"


def estimates(ifc: IFComp, inputs: Inputs, probes: int, seeds: int = SEEDS) -> Tensor:
    """E[IF] over n from probes of many seeds, [seeds, B]; the exact Fisher does not depend on the seed."""
    other = copy.copy(ifc)
    found = []
    for seed in range(seeds):
        assert ifc.factors is not None
        other.factors = replace(ifc.factors, settings=replace(ifc.factors.settings, seed=seed))
        found.append(other.parametric_complexity(inputs, probes=probes, linearized=True))
    return torch.stack(found)


@pytest.mark.parametrize("name", NAMES)
def test_as_many_probes_as_classes_are_exact(name: str) -> None:
    ifc, inputs = ready(name), inputs_of(CASES[name])
    exact = ifc.parametric_complexity(inputs)
    same(ifc.parametric_complexity(inputs, probes=CASES[name].num_classes), exact, 1e-10)


@pytest.mark.parametrize("probes", [1, 2])
def test_probes_are_unbiased(probes: int) -> None:
    ifc, inputs = ready(PROBED), inputs_of(CASES[PROBED])
    exact = ifc.parametric_complexity(inputs, linearized=True)
    found = estimates(ifc, inputs, probes)
    error = found.std(0) / SEEDS**0.5
    assert (error < 0.2 * exact).all()
    assert ((found.mean(0) - exact).abs() < 4 * error).all()


def test_more_probes_scatter_less() -> None:
    ifc, inputs = ready("lenet"), inputs_of(CASES["lenet"], 4)
    scatter = [estimates(ifc, inputs, probes, 60).std(0) for probes in (1, 2, 3, 4)]
    for fewer, more in pairwise(scatter):
        assert (more < fewer).all()
    assert (scatter[-1] < 1e-9).all()


# Small damping in single precision ----------------------------------------------------------------------------------

DAMPINGS = [0.0, 1e-42, 1e-30, 1e-12, Relative(1e-6), Relative(0.1)]


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Handwritten digits of 8 by 8 pixels, scaled up to 28 by 28."""
    images, labels = load_digits(return_X_y=True)
    small = torch.as_tensor(images[:600], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return functional.interpolate(small, size=(28, 28), mode="bilinear"), torch.as_tensor(labels[:600])


@cache
def trained_lenet(beta: float) -> IFComp:
    """A LeNet with a few steps of training, fitted in single precision."""
    x, y = digits()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(60):
        rows = slice(step * 50 % 600, step * 50 % 600 + 50)
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return IFComp(model.eval(), beta=beta).fit(list(x[:200].split(50)))


FAR: dict[str, Callable[[Tensor], Tensor]] = {
    "training": lambda x: x,
    "unseen": lambda x: digits()[0][400:404],
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "times_100": lambda x: 100 * x,
    "negative_times_100": lambda x: -100 * x,
    "noise": lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("damping", DAMPINGS, ids=repr)
@pytest.mark.parametrize("far", FAR)
def test_single_precision_stays_finite(far: str, damping: Any) -> None:
    ifc, x = trained_lenet(1.0), FAR[far](digits()[0][:4])
    influence = ifc.influence(x, damping=damping)
    assert influence.isfinite().all()
    assert (influence >= 0).all()
    distribution = ifc.predict_proba(x, damping=damping)
    assert_close(distribution.sum(1), torch.ones(4, dtype=torch.float64))
    frame = ifc.score([(x, digits()[1][:4])], damping=damping).frame
    assert np.isfinite(frame.to_numpy()).all()


@pytest.mark.parametrize("damping", DAMPINGS[:4], ids=repr)
def test_single_precision_stays_finite_for_the_kernel(damping: float) -> None:
    ifc, x = trained_lenet(0.01), 100 * digits()[0][:3]
    kernel = ifc.logit_kernel(x, damping=damping)
    assert kernel.isfinite().all()
    assert (kernel.diagonal(dim1=1, dim2=2) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steepness", [1e2, 1e3, 1e6])
def test_a_model_that_is_certain_of_everything_gets_numbers(steepness: float, dtype: torch.dtype) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))().to(dtype)
    with torch.no_grad():
        model[2].weight.mul_(steepness)
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.zeros(20, dtype=torch.long)
    for fisher in ("sampled", "exact"):
        ifc = IFComp(model, fisher=fisher).fit([x])
        for damping in (0.0, 1e-30, Relative(0.1)):
            frame = ifc.score([(x, labels)], damping=damping).frame
            assert frame.columns[~np.isfinite(frame).all()].empty


def test_contexts_are_left_as_they_were() -> None:
    for context in (nullcontext, torch.no_grad, torch.inference_mode):
        with context():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            ready("linear_tokens").influence(inputs_of(CASES["linear_tokens"]))
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
