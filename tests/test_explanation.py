"""Effects of training examples on a label, against dense gradients and against leave-one-out training."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.testing import assert_close

from cases import LAYER_CASES, MODEL_CASES, Case
from comparison import as_type, basis_arguments, fitted, labelled, library_block, oracle_blocks
from ifcomp import IFComp
from ifcomp.data.batches import as_batch
from ifcomp.errors import DataError, LabelError, NonFiniteError, SettingError
from ifcomp.explanation import explain
from oracles import (
    block_jacobian,
    ekfac_inverse,
    example_jacobians,
    example_logits,
    label_gradients,
    label_probabilities,
)

TRAIN, QUERIES = 6, 3


def dense_effects(ifc: IFComp, case: Case, queries: object, train: object, y: Tensor, labels: Tensor) -> Tensor:
    """``g_q^T (G + delta)^-1 g_i / n`` from explicit gradients and explicit inverses, [Q, N]."""
    total = torch.zeros(len(y), len(labels), dtype=torch.float64)
    sides = []
    for inputs, targets in ((queries, y), (train, labels)):
        p = label_probabilities(example_logits(ifc.model, inputs), ifc.beta)
        sides.append((example_jacobians(ifc.model, inputs), p, targets))
    for block in oracle_blocks(case):
        library = library_block(ifc, block)
        moments = ifc.factors.blocks[library.name].second_moments.double()
        rows = []
        for jacobians, p, targets in sides:
            gradients = label_gradients(block_jacobian(jacobians, block), p).flatten(2)
            rows.append(gradients[torch.arange(len(targets)), targets])
        inverse = ekfac_inverse(moments, 1e-3, **basis_arguments(ifc, library))
        total += rows[0] @ inverse @ rows[1].T
    return total / ifc.factors.count


@pytest.mark.parametrize("case", [*LAYER_CASES, *MODEL_CASES], ids=str)
def test_effects_equal_dense_gradients(case: Case) -> None:
    ifc = fitted(case)
    ifc.damping = 1e-3
    train, queries = as_type(case.sample(TRAIN), torch.float64), as_type(case.sample(QUERIES, 9), torch.float64)
    labels, y = torch.arange(TRAIN) % case.num_classes, torch.arange(QUERIES) % case.num_classes
    expected = dense_effects(ifc, case, queries, train, y, labels)
    frame = ifc.explain(queries, y, [labelled(train, labels)], k=TRAIN).frame
    actual = torch.full_like(expected, torch.nan)
    actual[frame["query"].to_list(), frame["index"].to_list()] = torch.tensor(
        frame["effect"].to_list(), dtype=torch.float64
    )
    assert_close(actual, expected, rtol=1e-8, atol=1e-12 * float(expected.abs().max()))
    assert (frame["label"].to_numpy() == labels.numpy()[frame["index"]]).all()
    assert ((frame["effect"] > 0) == (frame["role"] == "supports")).all()


def regression() -> tuple[np.ndarray, np.ndarray, float]:
    """Return inputs, labels sampled from a linear model, and a small ridge."""
    generator = np.random.default_rng(0)
    x, ridge = generator.normal(size=(60, 3)), 1e-2
    y = np.argmax(x @ generator.normal(size=(3, 3)) + generator.gumbel(size=(60, 3)), 1)
    return x, y, ridge


def solve(x: np.ndarray, y: np.ndarray, ridge: float, count: int) -> np.ndarray:
    """Weights [3, 3] of the minimum of (sum of losses) / count + ridge/2 |W|^2."""

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        logits = x @ flat.reshape(3, 3).T
        logits -= logits.max(1, keepdims=True)
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        residual = p - np.eye(3)[y]
        loss = -np.log(p[np.arange(len(y)), y]).sum() / count + ridge / 2 * flat @ flat
        return loss, (residual.T @ x / count).ravel() + ridge * flat

    return minimize(objective, np.zeros(9), jac=True, method="BFGS", options={"gtol": 1e-11}).x.reshape(3, 3)


def test_effects_predict_leave_one_out_training() -> None:
    x, y, ridge = regression()
    weights = solve(x, y, ridge, len(x))
    model = nn.Linear(3, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor(weights))
    ifc = IFComp(model, fisher="exact", damping=ridge).fit([torch.tensor(x)])
    frame = ifc.explain(torch.tensor(x[:4]), torch.tensor(y[:4]), [(torch.tensor(x), torch.tensor(y))], k=60).frame

    def codelength(weights: np.ndarray, query: int) -> float:
        logits = x[query] @ weights.T
        return float(np.log(np.exp(logits).sum()) - logits[y[query]])

    true = [
        codelength(solve(np.delete(x, row.index_, 0), np.delete(y, row.index_), ridge, len(x)), row.query)
        - codelength(weights, row.query)
        for row in frame.rename(columns={"index": "index_"}).itertuples()
    ]
    assert (
        np.corrcoef(true, frame["effect"])[0, 1] > 0.9
    )  # the Kronecker eigenbasis only approximates that of the Fisher
    strong = frame["effect"].abs() > 0.1 * frame["effect"].abs().max()
    assert strong.sum() > 50
    assert (np.sign(true) == np.sign(frame["effect"]))[strong].mean() > 0.95


def fitted_on_random_data() -> tuple[IFComp, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    return IFComp(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))).fit([(x, y)]), x, y


def test_a_query_is_left_out_by_its_position() -> None:
    ifc, x, y = fitted_on_random_data()
    with_itself = ifc.explain(x[5:7], y[5:7], [(x, y)], k=40).frame
    itself = with_itself[(with_itself["index"] - with_itself["query"]) == 5]
    assert list(itself["role"]) == ["supports", "supports"]
    without = ifc.explain(x[5:7], y[5:7], [(x, y)], k=40, positions=[5, 6])
    assert not ((without.frame["index"] - without.frame["query"]) == 5).any()
    assert len(without.frame) == 2 * 39


def test_batches_and_groups_of_queries_do_not_matter() -> None:
    ifc, x, y = fitted_on_random_data()
    whole = ifc.explain(x[:5], y[:5], [(x, y)], k=4).frame
    query, batches = as_batch(x[:5], labels=y[:5]), [(x[i : i + 7], y[i : i + 7]) for i in range(0, 40, 7)]
    parts = explain(ifc._evaluation(query, None), query, batches, 4, None, False, query_bytes=500).frame
    assert (whole.drop(columns="effect") == parts.drop(columns="effect")).all(axis=None)
    assert_close(torch.tensor(parts["effect"].to_list()), torch.tensor(whole["effect"].to_list()), rtol=1e-4, atol=0)


@pytest.mark.parametrize("side", ["query", "training data"])
def test_an_overflow_is_an_error_and_not_a_missing_row(side: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    ifc = IFComp(model, damping=1e-12).fit([(x, y)], progress=False)
    far = 1e38 * x[:1]
    near, wrong = (x, y), (far, model(far).argmin(1))
    query, train = (wrong, near) if side == "query" else (near, wrong)
    with pytest.raises(NonFiniteError, match=r"influence of example \d of the batch overflowed"):
        ifc.explain(*query, [train], k=3)


def test_strongest_come_first_and_every_column_is_described() -> None:
    ifc, x, y = fitted_on_random_data()
    explanation = ifc.explain(x[:2], y[:2], [(x, y)], k=3)
    for _, rows in explanation.frame.groupby(["query", "role"]):
        assert list(rows["rank"]) == [1, 2, 3]
        assert rows["effect"].abs().is_monotonic_decreasing
    assert set(explanation.descriptions) == set(explanation.frame.columns)
    assert len(explanation.of(1)) == 6


def test_bad_requests_are_refused() -> None:
    ifc, x, y = fitted_on_random_data()
    with pytest.raises(SettingError, match="at least 1"):
        ifc.explain(x, y, [(x, y)], k=0)
    with pytest.raises(DataError, match="1 positions for 2 queries"):
        ifc.explain(x[:2], y[:2], [(x, y)], positions=[1])
    with pytest.raises(LabelError, match="labels are needed"):
        ifc.explain(x[:2], y[:2], [x])
    with pytest.raises(DataError, match="list"):
        ifc.explain(x[:2], y[:2], (x, y, y))
