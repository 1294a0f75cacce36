"""Results do not depend on the mode of the model and on autograd's modes, which stay as they are."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from cases import CASES, Case
from comparison import as_type, fitted
from ifcomp import IFComp
from oracles import Inputs

MODELS = ["lenet", "vision_transformer", "bert", "linear_sequence_first"]
SIZE = 7


def inputs_of(case: Case, size: int = SIZE, seed: int = 0) -> Inputs:
    return as_type(case.sample(size, seed), torch.float64)


@cache
def ready(name: str) -> IFComp:
    """The case fitted in double precision with the exact Fisher and a damping of 1e-3."""
    return fitted(CASES[name])


@pytest.mark.parametrize("name", MODELS)
def test_results_do_not_depend_on_the_mode_of_the_model(name: str) -> None:
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
@pytest.mark.parametrize("name", MODELS[:2])
def test_a_fit_does_not_depend_on_the_grad_mode(name: str, mode: str) -> None:
    case = CASES[name]
    inputs = inputs_of(case)
    model = case.make().double()
    with GRAD_MODES[mode]():
        ifc = IFComp(model, fisher="exact", damping=1e-3).fit([inputs_of(case, SIZE, seed=1)])
    assert torch.equal(ifc.influence(inputs), ready(name).influence(inputs))


@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("name", MODELS)
def test_scores_do_not_depend_on_the_grad_mode(name: str, mode: str) -> None:
    ifc, inputs = ready(name), inputs_of(CASES[name])
    expected = ifc.score([inputs]).frame, ifc.logit_kernel(inputs)
    with GRAD_MODES[mode]():
        frame, kernel = ifc.score([inputs]).frame, ifc.logit_kernel(inputs)
    pd.testing.assert_frame_equal(frame, expected[0], check_exact=True)
    assert torch.equal(kernel, expected[1])


@pytest.mark.parametrize("name", MODELS)
def test_inputs_can_be_made_in_inference_mode(name: str) -> None:
    case = CASES[name]
    with torch.inference_mode():
        data, inputs = inputs_of(case, SIZE, seed=1), inputs_of(case)
        batch = {key: value.clone() for key, value in inputs.items()} if isinstance(inputs, dict) else inputs.clone()
    ifc = IFComp(case.make().double(), fisher="exact", damping=1e-3).fit([data])
    assert torch.equal(ifc.influence(batch), ready(name).influence(inputs_of(case)))


class Loader:
    """Batches that are made inside a context, which stays open between batches."""

    def __init__(self, batches: list[Inputs], context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.batches, self.context = batches, context

    def __iter__(self) -> Iterator[Inputs]:
        with self.context():
            for batch in self.batches:
                yield batch.clone() if isinstance(batch, Tensor) else batch


@pytest.mark.parametrize("mode", GRAD_MODES)
def test_results_do_not_depend_on_the_grad_mode_of_the_loader(mode: str) -> None:
    case = CASES["lenet"]
    batches, inputs = list(inputs_of(case, SIZE, seed=1).split(3)), list(inputs_of(case).split(3))

    def influences() -> list[float]:
        ifc = IFComp(case.make().double(), fisher="exact", damping=1e-3).fit(Loader(batches, GRAD_MODES[mode]))
        return ifc.score(Loader(inputs, GRAD_MODES[mode])).frame["expected_influence"].tolist()

    with ThreadPoolExecutor(1) as thread:  # the context of the loader ends with the thread
        result = thread.submit(influences).result()
    ifc = IFComp(case.make().double(), fisher="exact", damping=1e-3).fit(batches)
    assert result == pytest.approx(ifc.score(inputs).frame["expected_influence"].tolist(), rel=1e-9)


def test_the_grad_mode_is_restored() -> None:
    for context in (nullcontext, torch.no_grad, torch.inference_mode):
        with context():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            ready("linear_tokens").influence(inputs_of(CASES["linear_tokens"]))
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
