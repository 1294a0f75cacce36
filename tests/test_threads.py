"""Threads that share a model get the results of one thread."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import CASES, seeded
from ifcomp import IFComp
from ifcomp.layers.threads import SharedContext, exclusive

#: Calls of each thread.
ROUNDS = 6


def run_threads(*works: Callable[[], Any], rounds: int = ROUNDS) -> list[list[Any]]:
    """Run every function repeatedly in a separate thread, all at the same time; return the results."""
    barrier, results = threading.Barrier(len(works)), [[] for _ in works]
    errors: list[BaseException] = []

    def repeat(number: int) -> None:
        barrier.wait(60)
        try:
            for _ in range(rounds):
                results[number].append(works[number]())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]
    return results


class Mixed(nn.Module):
    """Attention, BatchNorm, a parameter without a rule, and a convolution: every way in which layers are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.attention, self.token = nn.MultiheadAttention(4, 2, batch_first=True), nn.Parameter(torch.ones(1, 1, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.conv(x)).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), 1, 4), tokens], 1)
        return self.head(self.attention(tokens, tokens, tokens)[0].tanh().mean(1))


def mixed_case() -> tuple[nn.Module, list[Tensor], IFComp]:
    """The model, four batches and a fitted predictor."""
    model = seeded(Mixed)().double()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(size, 3, 5, generator=generator, dtype=torch.float64) for size in (4, 2, 5, 3)]
    return model, batches, IFComp(model, fisher="exact").fit(batches)


def test_four_threads_use_one_predictor() -> None:
    _, batches, ifc = mixed_case()
    expected = [ifc.influence(x) for x in batches]
    works = [lambda x=x: ifc.influence(x) for x in batches]
    for results, truth in zip(run_threads(*works), expected, strict=True):
        for result in results:
            assert_close(result, truth, rtol=1e-10, atol=1e-12)


def test_threads_score_explain_and_fit_at_the_same_time() -> None:
    model, batches, ifc = mixed_case()
    labelled = [(x, torch.arange(len(x)) % 3) for x in batches]
    table = ifc.score(labelled).frame
    complexity = ifc.stochastic_complexity(*labelled[0])
    moments = {name: block.second_moments for name, block in ifc.factors.blocks.items()}

    def fit() -> dict[str, Tensor]:
        factors = IFComp(model, fisher="exact").fit(batches).factors
        return {name: block.second_moments for name, block in factors.blocks.items()}

    def refit() -> Tensor:
        return ifc.fit(batches).influence(batches[0])

    influence = ifc.influence(batches[0])
    scores, complexities, fits, refits = run_threads(
        lambda: ifc.score(labelled).frame, lambda: ifc.stochastic_complexity(*labelled[0]), fit, refit
    )
    for frame in scores:
        for column in table:
            assert_close(torch.tensor(frame[column]), torch.tensor(table[column]), rtol=1e-9, atol=1e-12)
    for result in complexities:
        assert_close(result, complexity, rtol=1e-9, atol=1e-12)
    for result in fits:
        for name, value in moments.items():
            assert_close(result[name], value, rtol=1e-9, atol=1e-14)
    for result in refits:
        assert_close(result, influence, rtol=1e-9, atol=1e-12)


def test_predictors_of_different_layers_share_a_model_in_train_mode() -> None:
    model, batches, whole = mixed_case()
    head = IFComp(model, layers="last", fisher="exact").fit(batches)
    part = IFComp(nn.Sequential(model), layers=["*attention*"], fisher="exact").fit(batches)
    predictors = (whole, head, part)
    model.train()
    expected = [ifc.influence(batches[0]) for ifc in predictors]
    works = [lambda ifc=ifc: ifc.influence(batches[0]) for ifc in predictors]
    for results, truth in zip(run_threads(*works), expected, strict=True):
        for result in results:
            assert_close(result, truth, rtol=1e-10, atol=1e-12)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("grad", [False, True])
def test_a_foreign_thread_runs_the_model(grad: bool) -> None:
    model, batches, ifc = mixed_case()
    expected = ifc.influence(batches[0])
    with torch.no_grad():
        logits = model(batches[2])

    def forward() -> list[Tensor]:
        with torch.set_grad_enabled(grad):
            return [model(batches[2]).detach() for _ in range(20)]

    influence, outputs = run_threads(lambda: ifc.influence(batches[0]), forward, rounds=4 * ROUNDS)
    for result in influence:
        assert_close(result, expected, rtol=1e-10, atol=1e-12)
    for result in (output for part in outputs for output in part):
        assert_close(result, logits, rtol=1e-10, atol=1e-12)


def test_modes_of_another_thread_do_not_matter() -> None:
    model, batches, ifc = mixed_case()
    expected = ifc.influence(batches[0])

    def in_other_modes() -> Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=False):
            ifc.influence(batches[1])
            with torch.autocast("cpu", torch.bfloat16):
                return model(batches[1])

    influence, _ = run_threads(lambda: ifc.influence(batches[0]), in_other_modes)
    for result in influence:
        assert_close(result, expected, rtol=1e-10, atol=1e-12)


def test_a_loader_waits_for_a_thread_that_scores() -> None:
    _, batches, ifc = mixed_case()
    expected = ifc.influence(batches[0])
    found: list[Tensor] = []

    def loader() -> Any:
        for x in batches:
            found.extend(run_threads(lambda: ifc.influence(batches[0]), rounds=1)[0])
            yield x

    assert len(ifc.score(loader()).frame) == 14
    assert all(torch.equal(result, expected) for result in found)


def test_a_loader_scores_with_another_predictor() -> None:
    model, batches, ifc = mixed_case()
    other = IFComp(model, layers=["attention*"], fisher="exact").fit(batches)
    table = ifc.score(batches).frame

    def loader() -> Any:
        for x in batches:
            other.influence(x)
            yield x

    assert ifc.score(loader()).frame.equals(table)


def test_process_wide_settings_are_restored_by_the_last_thread() -> None:
    settings: list[str] = []

    class Setting:
        def __enter__(self) -> None:
            settings.append("on")

        def __exit__(self, *_: object) -> None:
            settings.append("off")

    shared = SharedContext(Setting)
    inner, outer = threading.Event(), threading.Event()

    def overlap() -> None:
        with shared:
            inner.set()
            outer.wait(60)

    thread = threading.Thread(target=overlap)
    with shared:
        thread.start()
        inner.wait(60)
    assert settings == ["on"]
    outer.set()
    thread.join(60)
    assert settings == ["on", "off"]


def test_locks_are_reentrant_and_do_not_keep_models() -> None:
    model = CASES["lenet"].make()
    with exclusive(model), exclusive(model):
        kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None
