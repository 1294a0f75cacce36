"""Learning rates against the schedulers of torch."""

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, OneCycleLR

from experiments.recipes import PAPER, PAPER_SWA, QUICK, Recipe
from ifcomp.errors import SettingError


def _rates(scheduler: LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def _optimizer(rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], rate)


def test_paper_schedule_is_multi_step() -> None:
    expected = _rates(MultiStepLR(_optimizer(0.1), [60, 120, 180], 0.2), 200)
    for steps_per_epoch in (1, 7):
        actual = [PAPER.learning_rate(step, steps_per_epoch) for step in range(200 * steps_per_epoch)]
        assert actual[::steps_per_epoch] == pytest.approx(expected, rel=1e-12)
        assert actual[steps_per_epoch - 1 :: steps_per_epoch] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("steps_per_epoch", [3, 50])
def test_one_cycle_agrees_with_torch(steps_per_epoch: int) -> None:
    steps = QUICK.epochs * steps_per_epoch
    scheduler = OneCycleLR(_optimizer(QUICK.rate), QUICK.rate, total_steps=steps, cycle_momentum=False)
    actual = [QUICK.learning_rate(step, steps_per_epoch) for step in range(steps)]
    assert actual[:-1] == pytest.approx(_rates(scheduler, steps - 1), rel=1e-9)
    assert actual[-1] == pytest.approx(QUICK.rate / 25 / 1e4)


def test_settings_of_the_paper() -> None:
    assert (PAPER.epochs, PAPER.momentum, PAPER.weight_decay, PAPER.augment) == (200, 0.9, 5e-4, True)
    assert [epoch for epoch in range(1, 201) if PAPER.keeps(epoch)] == list(range(20, 201, 20))
    assert PAPER_SWA.total_epochs == 300
    assert [PAPER_SWA.learning_rate(10 * epoch, 10) for epoch in (0, 159, 160, 299)] == pytest.approx(
        [0.1, 0.004, 0.01, 0.01]
    )
    assert [epoch for epoch in range(150, 171) if PAPER_SWA.keeps(epoch)] == list(range(160, 171))


def test_weights_of_the_last_epoch_are_always_stored() -> None:
    assert [epoch for epoch in range(1, 6) if Recipe("steps", 5, 0.1, checkpoint_every=2).keeps(epoch)] == [2, 4, 5]


def test_stretched_for_pruned_data() -> None:
    stretched = PAPER.stretched(1 / (1 - 0.5))
    assert (stretched.epochs, stretched.milestones) == (400, (120, 240, 360))
    assert PAPER.stretched(1.0) == PAPER


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(SettingError, match="one-cycle"):
        Recipe("cosine", 10, 0.1)
    with pytest.raises(SettingError, match="epochs must be at least 1"):
        Recipe("steps", 0, 0.1)
