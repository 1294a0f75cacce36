"""Results do not depend on batches, microbatches, cotangents at once, earlier calls, threads and memory layout."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import BATCH_CASES, CASES, Apply, Case, mean, seeded
from comparison import as_type, fitted
from ifcomp import IFComp, Relative
from ifcomp.curvature.labels import label_cotangents
from ifcomp.data.batches import as_batch
from ifcomp.influence.forms import FormEvaluator
from ifcomp.scoring import Microbatch, build_evaluation, evaluate, expected_influence, label_influence, logit_kernel
from oracles import Inputs

MODELS = ["lenet", "vision_transformer", "bert", "linear_sequence_first"]
SIZE = 7


def inputs_of(case: Case, size: int = SIZE, seed: int = 0) -> Inputs:
    return as_type(case.sample(size, seed), torch.float64)


def parts(inputs: Inputs, size: int) -> list[Inputs]:
    """Consecutive batches of at most ``size`` examples."""
    if isinstance(inputs, Tensor):
        return list(inputs.split(size))
    columns = {name: value.split(size) for name, value in inputs.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@cache
def ready(name: str) -> IFComp:
    """The case fitted in double precision with the exact Fisher and a damping of 1e-3."""
    return fitted(CASES[name])


def same(result: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
    assert_close(result, expected, rtol=rtol, atol=rtol * float(expected.abs().max()) * 1e-3)


# Batches and microbatches


@pytest.mark.parametrize("case", BATCH_CASES, ids=str)
def test_scores_do_not_depend_on_batches(case: Case) -> None:
    ifc, inputs = ready(case.name), inputs_of(case)
    frame, kernel = ifc.score([inputs]).frame, ifc.logit_kernel(inputs)
    for size in (1, 3):
        batches = parts(inputs, size)
        pd.testing.assert_frame_equal(ifc.score(batches).frame, frame, rtol=1e-12, atol=0)
        same(torch.cat([ifc.logit_kernel(batch) for batch in batches]), kernel, 1e-11)
    probed = ifc.score(parts(inputs, 2), probes=2).frame
    pd.testing.assert_frame_equal(probed, ifc.score([inputs], probes=2).frame, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_a_fit_does_not_depend_on_batches(name: str) -> None:
    case = CASES[name]
    data, inputs = inputs_of(case, 30, seed=1), inputs_of(case, 4)

    def influence(batches: list[Inputs]) -> Tensor:
        model = case.make().double()
        return IFComp(model, damping=Relative(1.0), label_samples=2, seed=3).fit(batches).influence(inputs)

    assert_close(influence(parts(data, 7)), influence([data]), rtol=1e-9, atol=0)


#: Results of a microbatch, each with its number of cotangents (None: one per class).
STEPS: dict[str, tuple[Callable[[Microbatch], Tensor], int | None]] = {
    "influence": (label_influence, None),
    "kernel": (logit_kernel, 1),
    "probes": (lambda microbatch: expected_influence(microbatch, 2, seed=0).value, 2),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", BATCH_CASES, ids=str)
def test_results_do_not_depend_on_microbatches(case: Case, step: str) -> None:
    """The limit leaves memory for one example and one cotangent at a time."""
    ifc, batch = ready(case.name), as_batch(inputs_of(case))
    recorder, factors = ifc._recorder, ifc.factors
    assert recorder is not None
    assert factors is not None
    run, cotangents = STEPS[step][0], STEPS[step][1] or case.num_classes
    whole = build_evaluation(recorder, factors, 1e-3).with_limit(10**9)
    (expected,) = evaluate(whole, [batch], cotangents, run)
    (peaks,) = whole.microbatches.peaks.values()
    split = whole.with_limit(whole.microbatches.fixed_bytes + peaks["1 x 1"] * 11 // 10)
    results = list(evaluate(split, [batch], cotangents, run))
    assert [len(result) for result in results] == [1] * SIZE
    same(torch.cat(results), expected, 1e-11)


@pytest.mark.parametrize("case", BATCH_CASES, ids=str)
def test_influence_does_not_depend_on_cotangents_at_once(case: Case) -> None:
    ifc, inputs = ready(case.name), inputs_of(case)
    recorder, factors = ifc._recorder, ifc.factors
    assert recorder is not None
    assert factors is not None
    weights, expected = build_evaluation(recorder, factors, 1e-3).weights, ifc.influence(inputs)
    with recorder.attached():
        recording = recorder.record(as_batch(inputs))
        with recorder.computing():
            cotangents = label_cotangents(torch.softmax(recording.logits, 1))
            for chunk_size in (1, 2, case.num_classes):
                evaluator = FormEvaluator(factors, weights, recording, chunk_size, case.num_classes)
                same(evaluator.quadratic(cotangents), expected)


# Calls and threads


@pytest.mark.parametrize("name", MODELS)
def test_results_do_not_depend_on_earlier_calls(name: str) -> None:
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
def test_results_do_not_depend_on_threads(name: str) -> None:
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


# Memory layout of inputs, operations in place

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
def test_results_do_not_depend_on_the_form_of_inputs(name: str, form: str) -> None:
    case = CASES[name]
    data, inputs = inputs_of(case, SIZE, seed=1), inputs_of(case)
    assert isinstance(inputs, Tensor)
    assert isinstance(data, Tensor)
    given = FORMS[form](inputs)
    ifc = IFComp(case.make().double(), fisher="exact", damping=1e-3).fit([FORMS[form](data)])
    result = ifc.influence(given)
    same(result, ready(name).influence(inputs), 1e-9)
    assert not result.requires_grad
    assert not given.is_leaf or given.grad is None
    assert torch.equal(given, inputs)


def network(activation: Callable[[bool], nn.Module], first: bool, inplace: bool) -> nn.Module:
    """A small network with the activation after each layer, and before all of them if ``first``."""
    return nn.Sequential(
        activation(inplace) if first else nn.Identity(),
        *(nn.Conv2d(2, 4, 2), activation(inplace), nn.BatchNorm2d(4), activation(inplace)),
        *(mean(2, 3), nn.Linear(4, 6), activation(inplace), nn.Linear(6, 3)),
    )


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
def test_results_do_not_depend_on_activations_in_place(activation: str, first: bool) -> None:
    x = torch.randn(9, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results: list[Any] = []
    for inplace in (True, False):
        model = seeded(partial(network, ACTIVATIONS[activation], first, inplace))().double()
        given = x.clone()
        ifc = IFComp(model, fisher="exact", damping=1e-3).fit([given[:5], given[5:]])
        results.append(ifc.influence(given))
        assert torch.equal(given, x), "the inputs were changed"
    same(*results)
