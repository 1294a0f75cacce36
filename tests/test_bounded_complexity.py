"""Bounded and capped complexity against the proximal objective, root finders and their limits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize
from torch import Tensor, nn

from ifcomp import IFComp
from ifcomp.complexity import (
    BOUNDED_ADDED_PROBABILITY,
    bounded_complexity,
    capped_complexity,
    expected_influence,
    hindsight_log_odds,
    hindsight_probabilities,
    parametric_complexity,
)
from ifcomp.errors import DataError, SettingError
from ifcomp.tasks.ood import OOD_DAMPING, ood_metrics


def influences(probability: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """``(p - e_y)^T M (p - e_y)`` of every label, [K]."""
    residuals = probability - np.eye(len(probability))
    return np.einsum("yi,ij,yj->y", residuals, kernel, residuals)


def proximal_optimum(logits: np.ndarray, kernel: np.ndarray, label: int, weight: float) -> float:
    """Probability of the label at the minimum of ``-weight log p_y + d^T M^-1 d / 2`` over moves d of the logits."""
    inverse = np.linalg.inv(kernel)

    def objective(move: np.ndarray) -> float:
        moved = logits + move
        return float(weight * (np.logaddexp.reduce(moved) - moved[label]) + move @ inverse @ move / 2)

    optimum = minimize(objective, np.zeros(len(logits)), method="BFGS", options={"gtol": 1e-9})
    moved = logits + optimum.x
    return float(np.exp(moved[label] - np.logaddexp.reduce(moved)))


def hindsight(logits: np.ndarray, kernel: np.ndarray, label: int, weight: float) -> float:
    """Hindsight probability of a label by the library."""
    probability = np.exp(logits - np.logaddexp.reduce(logits))
    others = np.logaddexp.reduce(np.delete(logits, label))
    log_odds = torch.tensor(logits[label] - others, dtype=torch.float64)
    influence = torch.tensor(influences(probability, kernel)[label], dtype=torch.float64)
    return float(torch.sigmoid(hindsight_log_odds(log_odds, influence, weight)))


@pytest.mark.parametrize("weight", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("margin", [-3.0, 0.2, 6.0])
def test_two_labels_equal_the_optimum_of_the_proximal_objective(margin: float, weight: float) -> None:
    logits, kernel = np.array([margin, 0.0]), np.array([[1.3, 0.4], [0.4, 0.7]])
    for label in (0, 1):
        expected = proximal_optimum(logits, kernel, label, weight)
        assert hindsight(logits, kernel, label, weight) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("weight", [0.1, 3.0])
def test_more_labels_equal_the_optimum_if_the_others_keep_their_proportions(weight: float) -> None:
    logits, kernel = np.array([-1.0, 0.7, 0.7, 0.7]), 2 * np.eye(4)
    assert hindsight(logits, kernel, 0, weight) == pytest.approx(proximal_optimum(logits, kernel, 0, weight), rel=1e-5)


@given(st.floats(-300, 300), st.floats(0, 1e8), st.floats(1e-8, 1e3))
def test_hindsight_log_odds_solve_their_equation(log_odds: float, influence: float, weight: float) -> None:
    odds_tensor, influence_tensor = (torch.tensor(value, dtype=torch.float64) for value in (log_odds, influence))
    actual = float(hindsight_log_odds(odds_tensor, influence_tensor, weight))
    rest = 1 / (1 + math.exp(log_odds))
    pull = weight * influence / rest**2

    def excess(value: float) -> float:
        return value - log_odds - pull / (1 + math.exp(min(value, 700)))

    top = max(log_odds, 0) + math.log1p(pull) + 1
    assert actual == pytest.approx(brentq(excess, log_odds - 1, top, xtol=1e-13), rel=1e-9, abs=1e-9)


def random_scores(size: int = 50, classes: int = 5, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Random log-probabilities and influences, [B, K]."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn((size, classes), generator=generator, dtype=torch.float64)
    return logits.log_softmax(1), 100 * torch.rand((size, classes), generator=generator, dtype=torch.float64)


def by_hand(log_probability: Tensor, influence: Tensor, weight: float) -> np.ndarray:
    """Complexity [B] from a root finder, label by label."""
    rows = []
    for logs, influences_of_row in zip(log_probability.tolist(), influence.tolist(), strict=True):
        total = 0.0
        for label, (log, label_influence) in enumerate(zip(logs, influences_of_row, strict=True)):
            rest = sum(math.exp(other) for index, other in enumerate(logs) if index != label)
            pull, odds = weight * label_influence / rest**2, log - math.log(rest)

            def excess(value: float, pull: float = pull, odds: float = odds) -> float:
                return value - odds - pull / (1 + math.exp(min(value, 700)))

            total += 1 / (1 + math.exp(-brentq(excess, odds - 1, odds + pull + 1, xtol=1e-12)))
        rows.append(math.log(total))
    return np.array(rows)


@pytest.mark.parametrize("mean_influence", [0.001, 0.1, 10.0])
def test_by_hand(mean_influence: float) -> None:
    scores = random_scores()
    expected = by_hand(*scores, BOUNDED_ADDED_PROBABILITY / mean_influence)
    np.testing.assert_allclose(bounded_complexity(*scores, mean_influence), expected, rtol=1e-8)


def test_added_probability_sets_alpha() -> None:
    scores = random_scores()
    np.testing.assert_allclose(bounded_complexity(*scores, 0.5, 0.02), by_hand(*scores, 0.04), rtol=1e-8)


def test_bounded_complexity_lies_between_0_and_log_k() -> None:
    log_probability, influence = random_scores()
    for mean_influence in (1e-4, 0.1, 10.0):
        weight = BOUNDED_ADDED_PROBABILITY / mean_influence
        actual = bounded_complexity(log_probability, influence, mean_influence)
        above = (log_probability + weight * influence).clamp_max(0).logsumexp(1)
        assert (actual > 0).all()
        assert (actual <= above + 1e-12).all()
        assert (above <= math.log(5) + 1e-12).all()
        assert (bounded_complexity(log_probability, 2 * influence, mean_influence) > actual).all()


def test_limits_of_alpha() -> None:
    log_probability, influence = random_scores()
    expected = BOUNDED_ADDED_PROBABILITY / 1e7 * expected_influence(log_probability.exp(), influence)
    torch.testing.assert_close(bounded_complexity(log_probability, influence, 1e7), expected, rtol=1e-4, atol=0)
    linear = hindsight_probabilities(log_probability.exp(), influence, 1, BOUNDED_ADDED_PROBABILITY / 1e7).sum(1).log()
    torch.testing.assert_close(bounded_complexity(log_probability, influence, 1e7), linear, rtol=1e-4, atol=1e-12)
    maximum = torch.full((50,), math.log(5), dtype=torch.float64)
    torch.testing.assert_close(bounded_complexity(log_probability, influence, 1e-12), maximum, rtol=1e-6, atol=0)
    uninfluenced = bounded_complexity(log_probability, torch.zeros_like(influence), 1.0)
    torch.testing.assert_close(uninfluenced, torch.zeros(50, dtype=torch.float64), rtol=0, atol=1e-15)


def test_labels_of_vanishing_probability_count_if_their_influence_is_large() -> None:
    """The probability of the second label underflows in the second row."""
    log_probability = torch.tensor([[40.0, 0.0], [3000.0, 0.0]], dtype=torch.float64).log_softmax(1)
    residual = -torch.expm1(log_probability)
    small, large = (bounded_complexity(log_probability, size * residual.square(), 1.0) for size in (1.0, 1e9))
    expected = BOUNDED_ADDED_PROBABILITY * math.exp(-40)  # E[IF] of the first: p (1-p)^2 + (1-p) p^2, nearly 1 - p
    assert float(small[0]) == pytest.approx(expected, rel=1e-2)
    assert float(small[1]) == 0
    assert (large > 0.99 * math.log(2)).all()
    assert large.isfinite().all()


def test_negative_influence_counts_as_zero() -> None:
    log_probability, influence = random_scores(scale=30.0)
    actual = bounded_complexity(log_probability, influence - 100.0001, 1.0)
    torch.testing.assert_close(actual, torch.zeros_like(actual), rtol=0, atol=1e-15)


def fitted(beta: float = 1.0) -> tuple[IFComp, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(200, 6)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return IFComp(model, beta=beta, fisher="exact", damping=OOD_DAMPING).fit([x]), torch.randn(200, 6)


def test_confident_predictions_of_badly_scaled_rows_are_detected() -> None:
    ifc, x = fitted()
    bounded, parametric = (
        ood_metrics(score(x), score(30 * x)).auroc for score in (ifc.bounded_complexity, ifc.parametric_complexity)
    )
    assert parametric < 0.1
    assert bounded > 0.9


@pytest.mark.parametrize("beta", [1.0, 0.2])
def test_predictor_gives_bounded_complexity(beta: float) -> None:
    ifc, x = fitted(beta)
    log_probability = (ifc.beta * ifc.model(x).double()).log_softmax(1).detach()
    assert ifc.factors is not None
    weight = BOUNDED_ADDED_PROBABILITY / ifc.factors.effective_parameters(OOD_DAMPING)
    expected = by_hand(log_probability, ifc.influence(x), weight)
    table = ifc.score(list(x.split(64)))
    np.testing.assert_allclose(ifc.bounded_complexity(x), expected, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(table.column("bounded_complexity"), expected, rtol=1e-5, atol=1e-12)
    other = ifc.bounded_complexity((x, torch.zeros(200, dtype=torch.int64)), damping=1.0)
    assert not np.allclose(other, expected)


def test_probes_do_not_give_bounded_complexity() -> None:
    ifc, x = fitted()
    with pytest.raises(DataError, match="Score without probes"):
        ifc.score([x], probes=1).column("bounded_complexity")


def test_capped_by_hand() -> None:
    p, influence = torch.tensor([[0.7, 0.2, 0.1]]).double(), torch.tensor([[2.0, 30.0, 50.0]]).double()
    # 0.7 (1 + 0.4) = 0.98; 0.2 (1 + 6) = 1.4, capped; 0.1 (1 + 10) = 1.1, capped
    assert float(capped_complexity(p, influence, 10, 2.0)) == pytest.approx(math.log(2.98), rel=1e-6)
    # 0.7 (1 + 0.02) + 0.2 (1 + 0.3) + 0.1 (1 + 0.5): none is capped
    assert float(capped_complexity(p, influence, 10, 0.1)) == pytest.approx(math.log(0.714 + 0.26 + 0.15), rel=1e-6)


def test_limits_and_order_of_capped() -> None:
    log_probability, influence = random_scores()
    p = log_probability.exp()
    expected = expected_influence(p, influence)
    torch.testing.assert_close(capped_complexity(p, influence, 10, 1e-9), expected * 1e-10, rtol=1e-6, atol=0)
    maximum = torch.full((50,), math.log(5), dtype=torch.float64)
    torch.testing.assert_close(capped_complexity(p, influence, 10, 1e15), maximum, rtol=1e-9, atol=0)
    before = torch.zeros(50, dtype=torch.float64)
    for alpha in (0.01, 0.1, 1.0, 10.0):
        actual, uncapped = capped_complexity(p, influence, 10, alpha), parametric_complexity(expected, 10, alpha)
        assert (actual <= uncapped + 1e-12).all()
        assert (actual >= before).all()
        before = actual
    assert (actual < uncapped - 0.1).any()


def test_capped_from_the_predictor() -> None:
    ifc, x = fitted()
    p, influence = ifc.model(x).double().softmax(1).detach(), ifc.influence(x)
    hindsight = np.minimum(p.numpy() * (1 + 0.5 / 200 * influence.numpy()), 1)
    assert (hindsight == 1).any()
    assert (hindsight < 1).any()
    expected = np.log(hindsight.sum(1))
    np.testing.assert_allclose(ifc.parametric_complexity(x, alpha=0.5, capped=True), expected, rtol=1e-5, atol=1e-12)
    table = ifc.score([x], alpha=0.5, capped=True)
    np.testing.assert_allclose(table.column("parametric_complexity"), expected, rtol=1e-5, atol=1e-12)
    assert table.settings["capped"] is True


@pytest.mark.parametrize("options", [{"probes": 1}, {"linearized": True}])
def test_capped_needs_every_label(options: dict[str, int]) -> None:
    ifc, x = fitted()
    for call in (ifc.parametric_complexity, lambda inputs, **options: ifc.score([inputs], **options)):
        with pytest.raises(SettingError, match="capped=True needs the hindsight probability of every label"):
            call(x, capped=True, **options)
