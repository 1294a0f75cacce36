"""Data as people have it: constant, duplicated, of one class, shuffled, endless, of many shapes, from workers that die.

Each is compared with the dense oracle or with the same data in good order, or refused with an error that says what to
do.
"""

import itertools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from cases import mean, seeded, weight
from comparison import assert_same, oracle_influence
from ifcomp import IFComp, Relative
from ifcomp.data.loaders import FirstExamples, explain_dead_workers
from ifcomp.errors import DataError, IfcompWarning, LabelError, LogitsError

DAMPING = 1e-3
BLOCKS = [weight("0"), weight("2")]
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 3


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))().double()


def fit(batches: Any, **options: Any) -> IFComp:
    return IFComp(net(), **{"fisher": "exact", "damping": DAMPING, **options}).fit(batches)


def says(caught: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


# What is in the data ------------------------------------------------------------------------------------------------

DATA: dict[str, Tensor] = {
    "constant": torch.ones_like(X),
    "zero": torch.zeros_like(X),
    "constant_feature": X * torch.tensor([1.0, 1.0, 1.0, 0.0]) + torch.tensor([0.0, 0.0, 0.0, 5.0]),
    "duplicated": X[:3].repeat(4, 1),
    "one_example": X[:1],
    "fewer_examples_than_features": X[:2],
}

#: At most so many directions have curvature: for each layer the rank of its inputs (bias included) times that of its
#: output gradients, of which an example gives two, as one of three logits is free.
RANKS = {
    "constant": 2 + 2,
    "zero": 2 + 2,
    "constant_feature": 4 * 6 + 7 * 2,
    "duplicated": 3 * 6 + 3 * 2,
    "one_example": 2 + 2,
    "fewer_examples_than_features": 2 * 4 + 2 * 2,
}


@pytest.mark.parametrize("kind", DATA)
def test_dull_data_is_fitted(kind: str) -> None:
    """Compared on training data and on other inputs; without damping by the rank of what the model saw.

    E[IF] of training data has the mean ``sum Lambda / (Lambda + delta)``, and that is a whole number for delta = 0.
    """
    x, ifc = DATA[kind], fit([DATA[kind]])
    for inputs in (x, X):
        expected = oracle_influence(ifc, net(), BLOCKS, inputs, DAMPING)
        assert_same(ifc.influence(inputs), expected, rtol=1e-8, floor=1e-12)
    assert ifc.factors is not None
    for damping in (0.0, 1e-12, Relative(0.1)):
        means = ifc.score([x], damping=damping).frame["expected_influence"].mean()
        assert means == pytest.approx(ifc.factors.effective_parameters(damping), rel=1e-9)
        assert ifc.influence(X, damping=damping).isfinite().all()
    rank = ifc.factors.effective_parameters(0.0)
    assert rank == pytest.approx(round(rank), abs=1e-9)
    assert rank <= RANKS[kind]


def test_duplicates_change_the_count_only() -> None:
    once, twice = fit([(X, Y)]), fit([(X, Y), (X, Y)])
    assert_close(twice.influence(X), once.influence(X), rtol=1e-9, atol=0)
    found, expected = (ifc.parametric_complexity(X, linearized=True) for ifc in (twice, once))
    assert_close(found, expected / 2, rtol=1e-9, atol=0)


@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
def test_data_of_one_class_is_fitted_and_scored(fisher: str) -> None:
    labels = torch.full_like(Y, 2)
    ifc = fit([(X, labels)], fisher=fisher)
    assert_same(ifc.influence(X), oracle_influence(ifc, net(), BLOCKS, X, DAMPING))
    frame = ifc.score([(X, labels)]).frame
    assert frame["label"].tolist() == [2] * 12
    assert frame["influence"].tolist() == pytest.approx(ifc.influence(X)[:, 2].tolist())


@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
@pytest.mark.parametrize("missing", [-100, -1])
def test_labels_that_mark_what_is_to_be_ignored_are_refused(missing: int, fisher: str) -> None:
    labels = Y.clone()
    labels[5] = missing
    for run in (lambda: fit([(X, labels)], fisher=fisher), lambda: fit([X]).score([(X, labels)])):
        with pytest.raises(LabelError) as caught:
            run()
        says(caught, f"label {missing}", "example 5", "leave out", "-100")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_labels_of_every_integer_type_are_the_same(dtype: torch.dtype) -> None:
    expected = fit([(X, Y)], fisher="empirical").score([(X, Y)]).frame
    found = fit([(X, Y.to(dtype))], fisher="empirical").score([(X, Y.to(dtype))]).frame
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


def test_logits_in_a_tuple_are_refused_with_what_to_do() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x), x

    with pytest.raises(LogitsError) as caught:
        IFComp(Pair()).fit([X])
    says(caught, "tuple", "picks the logits")


# Shapes -------------------------------------------------------------------------------------------------------------


def test_batches_of_different_shapes_are_fitted_and_scored() -> None:
    """Images of any size, by a network that pools; an example of any shape is compared with the oracle."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), mean(2, 3), nn.Linear(4, 3))

    model, generator = seeded(build)().double(), torch.Generator().manual_seed(0)
    shapes = [(4, 2, 5, 5), (3, 2, 4, 7), (1, 2, 8, 3)]
    batches = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    ifc = IFComp(model, fisher="exact", damping=DAMPING).fit(batches)
    assert ifc.factors is not None
    assert ifc.factors.count == 8
    frame = ifc.score(batches).frame
    expected = []
    for batch in batches:
        influence = oracle_influence(ifc, model, [weight("0"), weight("3")], batch, DAMPING)
        assert_same(ifc.influence(batch), influence)
        expected += (influence * model(batch).softmax(1)).sum(1).tolist()
    assert frame["expected_influence"].tolist() == pytest.approx(expected, rel=1e-9)


# Loaders ------------------------------------------------------------------------------------------------------------


def test_a_shuffled_loader_is_fitted_like_any_other() -> None:
    shuffled = DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True)
    assert_close(fit(shuffled).influence(X), fit([(X, Y)]).influence(X), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True),
        DataLoader(TensorDataset(X, Y), batch_size=5, sampler=SubsetRandomSampler(range(12))),
    ],
    ids=["shuffle", "sampler"],
)
def test_scores_in_an_unknown_order_are_told(loader: DataLoader[Any]) -> None:
    ifc = fit([(X, Y)])
    with pytest.warns(IfcompWarning, match="shuffles.*row i.*shuffle=False") as told:
        found = ifc.score(loader).frame["expected_influence"]
    assert told[0].filename == __file__
    assert sorted(found) == pytest.approx(sorted(ifc.score([X]).frame["expected_influence"]))


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """All examples again and again."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.cycle(zip(X, Y, strict=True))


class Streams:
    """Batches without an end, from the start at each iteration."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        self.form = form

    def __iter__(self) -> Iterator[Any]:
        return (self.form(X[i : i + 5], Y[i : i + 5]) for i in itertools.cycle((0, 5)))


ENDLESS: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(Endless(), batch_size=5),
    "pairs": lambda: Streams(lambda x, y: (x, y)),
    "dicts": lambda: Streams(lambda x, y: {"input": x, "labels": y}),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_data_without_an_end_can_be_limited(kind: str) -> None:
    limited = FirstExamples(ENDLESS[kind](), 8)
    ifc, expected = fit(limited, fisher="empirical"), fit([(X[:8], Y[:8])], fisher="empirical")
    assert ifc.factors is not None
    assert ifc.factors.count == 8
    pd.testing.assert_frame_equal(ifc.score(limited).frame, expected.score([(X[:8], Y[:8])]).frame, rtol=1e-9)


@pytest.mark.parametrize(("examples", "sizes"), [(0, []), (4, [4]), (5, [5]), (9, [5, 4]), (99, [5, 5, 2])])
def test_a_limit_cuts_the_last_batch(examples: int, sizes: list[int]) -> None:
    assert [len(batch) for batch in FirstExamples([X[:5], X[5:10], X[10:]], examples)] == sizes


@pytest.mark.parametrize(
    "endless", [lambda: itertools.cycle([X]), lambda: itertools.repeat(X)], ids=["cycle", "repeat"]
)
def test_what_never_ends_for_certain_is_refused(endless: Callable[[], Iterator[Tensor]]) -> None:
    ifc = fit([X])
    for run in (lambda: ifc.score(endless()), lambda: ifc.explain(X[:1], Y[:1], endless())):
        with pytest.raises(DataError) as caught:
            run()
        says(caught, "never ends", "itertools", "FirstExamples")
    assert len(ifc.score(itertools.repeat(X, 2))) == 24


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows whose seventh does something bad."""

    def __init__(self, bad: Callable[[], Any]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 7:
            self.bad()
        return X[index], Y[index]


def die() -> None:
    os._exit(1)


def fail(error: Exception) -> None:
    raise error


RUNS: dict[str, Callable[[Any], object]] = {"fit": fit, "score": lambda loader: fit([X]).score(loader)}


OWN_PROCESS = """
import itertools
from torch.utils.data import DataLoader
from trust.test_bad_data import RUNS, DataError, Rows, die
for run, size in itertools.product(RUNS.values(), (3, 12)):
    try:
        run(DataLoader(Rows(die), batch_size=size, num_workers=1))
    except DataError as error:
        print(error)
"""


def test_a_worker_that_dies_is_named() -> None:
    """In a process of its own, as torch raises from a signal handler, at any place."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    call = [sys.executable, "-c", OWN_PROCESS]
    ended = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    messages = ended.stdout.splitlines()
    assert len(messages) == 4
    for message in messages:
        assert all(word in message for word in ("worker", "died", "memory", "num_workers=0"))


def test_a_connection_that_ends_inside_multiprocessing_is_a_dead_worker() -> None:
    one, other = multiprocessing.Pipe()
    other.close()
    with pytest.raises(DataError, match="died"), explain_dead_workers():
        one.recv()


@pytest.mark.parametrize(
    ("error", "workers"), [(KeyError, 0), (RuntimeError, 0), (RuntimeError, 1), (ConnectionError, 0), (EOFError, 0)]
)
def test_what_a_data_set_raises_comes_through(error: type[Exception], workers: int) -> None:
    loader = DataLoader(Rows(partial(fail, error("no such picture"))), batch_size=3, num_workers=workers)
    for run in RUNS.values():
        with pytest.raises(error, match="no such picture"):
            run(loader)
