"""Hindsight training without proximal terms memorises every label."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ifcomp.errors import LabelError, SettingError
from ifcomp.oracle import hindsight, refit, unrestricted_refit

CLASSES = 3


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, CLASSES)
        ).eval()


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(33, 6, generator=torch.Generator().manual_seed(1))
    return x[:32], x[:32, :CLASSES].argmax(1)


TRAIN = data()
X = torch.randn(2, 6, generator=torch.Generator().manual_seed(2))


def trained(fitted: nn.Module) -> nn.Module:
    fitted.train()
    optimizer = torch.optim.Adam(fitted.parameters(), 0.01)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(fitted(TRAIN[0]), TRAIN[1]).backward()
            optimizer.step()
    optimizer.zero_grad()
    return fitted.eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained(network())


def test_every_label_is_memorised_unless_hindsight_is_restricted() -> None:
    """Without dropout and batch normalisation, whose noise prevents memorisation."""
    parts = network()
    model = trained(nn.Sequential(parts[0], nn.ReLU(), parts[-1]))
    free = unrestricted_refit(model, [TRAIN], X[:1], epochs=60, learning_rate=0.05, batch_size=8)
    assert free.base.min() < 0.01
    assert free.probability.min() > 0.95
    assert free.parametric_complexity.min() > math.log(0.95 * CLASSES)
    assert not free.converged.any()
    assert free.criterion.isnan().all()
    assert (free.iterations == 60).all()
    restricted = hindsight(model, [TRAIN], X[:1], lam=100.0)
    assert restricted.parametric_complexity.max() < 0.6 * math.log(CLASSES)
    torch.testing.assert_close(free.base, restricted.base)


def test_the_example_is_one_more_training_example() -> None:
    """One step on one batch of all data is a gradient step on the mean loss of n + 1 examples."""
    linear = nn.Linear(6, CLASSES).double()
    x, rate = X[:1].double(), 0.3
    inputs, labels = torch.cat([TRAIN[0].double(), x]), torch.cat([TRAIN[1], torch.tensor([2])])
    residual = torch.softmax(linear(inputs), 1) - nn.functional.one_hot(labels, CLASSES)
    move = 1.9 * rate / 33  # Nesterov momentum of 0.9 makes the first step 1.9 times as long
    logits = linear(x) - move * (residual.T @ inputs @ x.T + residual.sum(0)[:, None]).T
    train = (TRAIN[0].double(), TRAIN[1])
    result = unrestricted_refit(linear, [train], x, epochs=1, learning_rate=rate, batch_size=100, labels=[2])
    torch.testing.assert_close(result.log_probability[0, 2], torch.log_softmax(logits, 1)[0, 2].detach())
    assert result.log_probability[0, :2].isnan().all()


def test_runs_are_reproducible_and_do_not_modify_model_or_generator(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    runs = [unrestricted_refit(model, [TRAIN], X, epochs=2, batch_size=8, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(runs[0].log_probability, runs[1].log_probability)
    assert not torch.equal(runs[0].log_probability, runs[2].log_probability)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert all(value.grad is None for value in model.parameters())


def test_pairs_are_stored(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"batch_size": 8, "results": tmp_path / "pairs.jsonl"}
    first = unrestricted_refit(model, [TRAIN], X, epochs=2, **options)
    hindsight(model, [TRAIN], X, lam=10.0, results=options["results"])
    monkeypatch.setattr(refit, "_train", lambda *args: pytest.fail("trained again"))
    again = unrestricted_refit(model, [TRAIN], X, epochs=2, **options)
    assert torch.equal(first.log_probability, again.log_probability)
    assert again.criterion.isnan().all()
    with pytest.raises(pytest.fail.Exception):
        unrestricted_refit(model, [TRAIN], X, epochs=3, **options)


def test_unusable_data_and_settings_are_refused(model: nn.Module) -> None:
    with pytest.raises(LabelError, match="labels are needed"):
        unrestricted_refit(model, [TRAIN[0]], X, epochs=1)
    for wrong in ({"epochs": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"weight_decay": -1.0}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            unrestricted_refit(model, [TRAIN], X, **{"epochs": 1, **wrong})
