"""How a network is trained: plain settings, and the learning rate as a function of the step alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ifcomp.errors import SettingError

#: One-cycle: the share of steps that warm up, and how far below the peak it starts and ends.
WARM_UP, START, END = 0.3, 1 / 25, 1 / 25e4


@dataclass(frozen=True)
class Recipe:
    """SGD with Nesterov momentum on the cross-entropy, and when to keep the weights.

    Attributes:
        schedule: "steps" divides the rate by ``divisor`` at every milestone; "one-cycle" warms up to the rate and
            anneals it to nearly zero, both along a cosine.
        epochs: Epochs of the schedule.
        rate: Learning rate, at the start or at the peak.
        milestones: Epochs after which the rate falls.
        divisor: By how much.
        tail_epochs: Epochs at ``tail_rate`` after the schedule; their weights are samples for SWA and SWAG.
        tail_rate: Constant learning rate of the tail.
        batch_size: Examples a step.
        momentum: Of Nesterov.
        weight_decay: L2 penalty, on every parameter.
        augment: Whether images are shifted by up to four pixels and mirrored.
        checkpoint_every: Keep the weights after so many epochs; those of the tail and of the last epoch are always
            kept.
        patience: Stop after so many epochs without a better validation accuracy; None never stops early.
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

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if self.schedule not in ("steps", "one-cycle"):
            raise SettingError(f"schedule must be 'steps' or 'one-cycle', but is '{self.schedule}'.")
        for name in ("epochs", "batch_size", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, but is {getattr(self, name)}.")

    @property
    def total_epochs(self) -> int:
        """Epochs of the schedule and the tail."""
        return self.epochs + self.tail_epochs

    def keeps(self, epoch: int) -> bool:
        """Whether the weights after ``epoch`` (counted from 1) are kept."""
        return epoch % self.checkpoint_every == 0 or epoch > self.epochs or epoch == self.total_epochs

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """The rate of a step, both counted from 0 over the whole training."""
        epoch = step // steps_per_epoch
        if epoch >= self.epochs:
            return self.tail_rate
        if self.schedule == "steps":
            return self.rate / self.divisor ** sum(epoch >= milestone for milestone in self.milestones)
        return _one_cycle(self.rate, step, self.epochs * steps_per_epoch)

    def stretched(self, factor: float) -> Recipe:
        """The same with ``factor`` times the epochs: as many steps for data of which only ``1 / factor`` is left."""
        milestones = tuple(round(factor * milestone) for milestone in self.milestones)
        return replace(self, epochs=round(factor * self.epochs), milestones=milestones)


def _one_cycle(peak: float, step: int, steps: int) -> float:
    turn, last = WARM_UP * steps - 1, steps - 1
    if step <= turn:
        return _cosine(START * peak, peak, step / turn)
    return _cosine(peak, END * peak, (step - turn) / (last - turn))


def _cosine(start: float, end: float, way: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * way)) / 2


#: The paper's training of ResNet-18 on CIFAR-10, with the checkpoints that TracIn uses.
PAPER = Recipe("steps", 200, 0.1, milestones=(60, 120, 180), augment=True)
#: The paper's base of SWA, SWAG-D and ACNML.
PAPER_SWA = Recipe("steps", 160, 0.1, milestones=(60, 120, 160), tail_epochs=140, augment=True)
#: A LeNet in a minute or two on one core: at least 99 % on MNIST and 90 % on Fashion-MNIST.
QUICK = Recipe("one-cycle", 8, 0.05)
