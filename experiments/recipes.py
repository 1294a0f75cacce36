"""Training recipes: settings, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ifcomp.errors import SettingError

#: One-cycle schedule: share of warm-up steps, and initial and final learning rate relative to the peak.
WARM_UP, START, END = 0.3, 1 / 25, 1 / 25e4


@dataclass(frozen=True)
class Recipe:
    """SGD with Nesterov momentum on the cross-entropy.

    Attributes:
        schedule: "steps" divides the learning rate by ``divisor`` at every milestone. "one-cycle" warms up to the rate
            and anneals it to almost zero, both along a cosine.
        epochs: Number of epochs of the schedule.
        rate: Initial learning rate of "steps", peak of "one-cycle".
        milestones: Epochs after which the learning rate is divided.
        divisor: Divisor at the milestones.
        tail_epochs: Number of epochs at ``tail_rate`` after the schedule; their weights are samples for SWA and SWAG.
        tail_rate: Constant learning rate of the tail.
        batch_size: Examples per step.
        momentum: Nesterov momentum.
        weight_decay: L2 penalty on every parameter.
        augment: Whether images are shifted by up to four pixels and mirrored.
        checkpoint_every: Store the weights every this many epochs. Those of the tail and the last epoch are always
            stored.
        patience: Number of epochs without a better validation accuracy before early stopping; None never stops early.
        autocast: Whether forward passes run in bfloat16 autocast with channels last: about twice as fast on processors
            with bfloat16 instructions.
    """

    schedule: Literal["steps", "one-cycle"]
    epochs: int
    rate: float
    milestones: tuple[int, ...] = ()
    divisor: float = 5.0
    tail_epochs: int = 0
    tail_rate: float = 0.01
    batch_size: int = 128
    momentum: float = 0.9
    weight_decay: float = 5e-4
    augment: bool = False
    checkpoint_every: int = 20
    patience: int | None = None
    autocast: bool = False

    def __post_init__(self) -> None:
        """Raise SettingError for invalid settings."""
        if self.schedule not in ("steps", "one-cycle"):
            raise SettingError(f"schedule must be 'steps' or 'one-cycle', but is '{self.schedule}'.")
        for name in ("epochs", "batch_size", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, but is {getattr(self, name)}.")

    @property
    def total_epochs(self) -> int:
        """Number of epochs of schedule and tail."""
        return self.epochs + self.tail_epochs

    def keeps(self, epoch: int) -> bool:
        """Return whether the weights after ``epoch`` (counted from 1) are stored."""
        return epoch % self.checkpoint_every == 0 or epoch > self.epochs or epoch == self.total_epochs

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Return the learning rate of a step, counted from 0 over the whole training."""
        epoch = step // steps_per_epoch
        if epoch >= self.epochs:
            return self.tail_rate
        if self.schedule == "steps":
            return self.rate / self.divisor ** sum(epoch >= milestone for milestone in self.milestones)
        return _one_cycle(self.rate, step, self.epochs * steps_per_epoch)

    def stretched(self, factor: float) -> Recipe:
        """Return the recipe with ``factor`` times the epochs: equal steps for ``1 / factor`` of the data."""
        milestones = tuple(round(factor * milestone) for milestone in self.milestones)
        return replace(self, epochs=round(factor * self.epochs), milestones=milestones)


def _one_cycle(peak: float, step: int, steps: int) -> float:
    warm_up_end, last = WARM_UP * steps - 1, steps - 1
    if step <= warm_up_end:
        return _cosine(START * peak, peak, step / warm_up_end)
    return _cosine(peak, END * peak, (step - warm_up_end) / (last - warm_up_end))


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


#: Training of ResNet-18 on CIFAR-10 in the paper, with the checkpoints of TracIn.
PAPER = Recipe("steps", 200, 0.1, milestones=(60, 120, 180), augment=True)
#: Training for SWA, SWAG-D and ACNML in the paper.
PAPER_SWA = Recipe("steps", 160, 0.1, milestones=(60, 120, 160), tail_epochs=140, augment=True)
#: LeNet in a minute or two on one core, with at least 99 % accuracy on MNIST and 90 % on Fashion-MNIST.
QUICK = Recipe("one-cycle", 8, 0.05)
