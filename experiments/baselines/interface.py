"""The interface of predictive baselines, and the checks and seeds that they share."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from ifcomp.errors import SettingError


class Predictive(Protocol):
    """A distribution over the labels of every input; `IFComp` implements it too."""

    def predict_proba(self, x: Any) -> Tensor:
        """Return probabilities [B, K] in float64; each row sums to 1.

        Args:
            x: Inputs [B, ...], or a dict of keyword inputs.
        """
        ...


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of the independent draw number ``index``."""
    return int(np.random.SeedSequence((seed % 2**64, index)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def check_count(name: str, value: int) -> None:
    """Raise SettingError unless the value is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(f"{name} must be an integer of at least 1, but is {value!r}.")


def check_not_negative(name: str, value: float) -> None:
    """Raise SettingError unless the value is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise SettingError(f"{name} must be a finite number of at least 0, but is {value!r}.")


def check_positive(name: str, value: float) -> None:
    """Raise SettingError unless the value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise SettingError(f"{name} must be a finite number above 0, but is {value!r}.")
