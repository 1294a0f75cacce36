"""Random transforms and shuffling are detected before the model runs."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ifcomp import Checkpoint, IFComp
from ifcomp.errors import DataError

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3


class Counting(nn.Module):
    """A linear model that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


class Rows(Dataset[Any]):
    """Examples with a transform."""

    def __init__(self, transform: Callable[[Tensor], Any]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return self.transform(X[index]), int(Y[index])


def jitter(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn(4)


def flip(x: Tensor) -> Tensor:
    return x.flip(0) if random.random() < 0.5 else x


def noise(x: Tensor) -> Any:
    return (x.numpy() + np.random.normal(size=4)).astype(np.float32)


class Batches:
    """Re-iterable batches that may differ between iterations."""

    def __init__(self, first: Callable[[], tuple[Tensor, Any]]) -> None:
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        yield self.first()
        yield X[20:], Y[20:]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((jitter(x), y) for x, y in zip(X, Y, strict=True))


def relabelled() -> tuple[Tensor, Tensor]:
    return X[:20], torch.randint(3, (20,))


RUNS: dict[str, Callable[[IFComp, Any], object]] = {
    "fit": lambda ifc, data: ifc.fit(data),
    "score": lambda ifc, data: ifc.score(data),
    "audit": lambda ifc, data: ifc.audit(data),
    "reference": lambda ifc, data: ifc.audit([(X, Y)], reference=data),
    "explain": lambda ifc, data: ifc.explain(X[:1], Y[:1], data),
    "prune": lambda ifc, data: ifc.prune(data),
    "calibrate": lambda ifc, data: ifc.calibrate(data),
    "ood_detector": lambda ifc, data: ifc.ood_detector(data),
}

RANDOM_ROWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: Rows(jitter),
    "python": lambda: Rows(flip),
    "numpy": lambda: Rows(noise),
    "loader": lambda: DataLoader(Rows(jitter), 8),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("form", RANDOM_ROWS)
def test_random_transforms_are_refused_before_the_model_runs(form: str, run: str) -> None:
    ifc = IFComp(Counting())
    if run != "fit":
        ifc.fit([(X, Y)])
    calls = ifc.model.calls
    with pytest.raises(DataError, match=r"differs when it is read a second time.*transforms of the evaluation"):
        RUNS[run](ifc, RANDOM_ROWS[form]())
    assert ifc.model.calls == calls


@pytest.mark.filterwarnings("ignore:40 held-out examples are few")
def test_random_transforms_are_refused_in_tables_of_ood_scores() -> None:
    gate = IFComp(Counting()).fit([(X, Y)]).ood_detector([X], score="energy")
    for run in (lambda: gate.table(Rows(jitter)), lambda: gate.table([X], ood=Rows(jitter))):
        with pytest.raises(DataError, match="differs when it is read a second time"):
            run()


def test_a_shuffled_loader_with_random_transforms_is_not_fitted() -> None:
    with pytest.raises(DataError, match="transformed at random"):
        IFComp(Counting()).fit(DataLoader(Rows(jitter), 8, shuffle=True))


@pytest.mark.parametrize(
    "data",
    [Batches(lambda: (jitter(X[:20]), Y[:20])), Batches(relabelled), DataLoader(Stream(), 8)],
    ids=["inputs", "labels", "iterable_dataset"],
)
def test_a_first_batch_that_changes_is_refused_where_the_order_matters(data: Any, tmp_path: Any) -> None:
    fitted = IFComp(Counting()).fit([(X, Y)])
    with Checkpoint(tmp_path / "fit") as fit, Checkpoint(tmp_path / "score") as score:
        for run in (
            lambda: IFComp(Counting()).audit(data),
            lambda: IFComp(Counting()).fit(data, checkpoint=fit),
            lambda: fitted.score(data, checkpoint=score),
        ):
            with pytest.raises(DataError, match="The first batch of the data differs"):
                run()


def test_batches_in_another_order_are_fitted() -> None:
    """The curvature does not depend on the order, so shuffled data is accepted."""
    orders = iter([torch.arange(20), torch.arange(20).flip(0)])

    def batch() -> tuple[Tensor, Tensor]:
        order = next(orders)
        return X[order], Y[order]

    assert IFComp(Counting()).fit(Batches(batch)).factors is not None


def test_data_that_differs_between_the_passes_is_refused() -> None:
    """A value, or a label, of the last batch; the check of a few examples before the fit does not see it."""
    for change in (lambda x, y: (x + 1e-6, y), lambda x, y: (x, (y + 1) % 3)):
        reads = iter(range(9))

        def batches(change: Any = change, reads: Any = reads) -> Any:
            first, last = (X[:10], Y[:10]), (X[10:], Y[10:])
            return iter([first, change(*last) if next(reads) > 0 else last])

        class Changing:
            __iter__ = staticmethod(batches)

        with pytest.raises(DataError, match="second pass differ from those of the first"):
            IFComp(Counting()).fit(Changing())


@pytest.mark.parametrize("make", [lambda: Rows(Tensor.clone), lambda: DataLoader(Rows(Tensor.numpy), 8)])
def test_equal_data_is_accepted(make: Callable[[], Any]) -> None:
    assert len(IFComp(Counting()).fit(make()).score(make())) == 40


def test_missing_values_are_equal() -> None:
    def with_missing(x: Tensor) -> Tensor:
        return x.where(x > -1e9, torch.nan)

    assert len(IFComp(Counting()).fit([X]).score(Rows(with_missing))) == 40


def test_random_states_are_restored() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seeds: list[Callable[[int], object]] = [random.seed, np.random.seed, torch.manual_seed]
    found = []
    for refused in (False, True):
        for seed in seeds:
            seed(0)
        if refused:
            with pytest.raises(DataError, match="transformed at random"):
                IFComp(Counting()).score(Rows(lambda x: noise(jitter(flip(x)))))
        else:
            Counting()  # the same draws of its weights
        found.append(draws())
    assert found[0] == found[1]


def test_explain_refuses_an_iterator() -> None:
    ifc = IFComp(Counting()).fit([(X, Y)])
    with pytest.raises(DataError, match="explain reads the data once for each group of queries, but an iterator"):
        ifc.explain(X[:1], Y[:1], iter([(X, Y)]))
