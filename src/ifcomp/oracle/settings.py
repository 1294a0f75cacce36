"""Settings of the proximal objective and of its convergence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ifcomp.errors import SettingError


@dataclass(frozen=True)
class Settings:
    """Weights of the objective and convergence settings; see `hindsight`."""

    beta: float
    lam: float
    alpha: float
    tolerance: float
    max_iterations: int

    def __post_init__(self) -> None:
        """Raise SettingError for invalid settings."""
        for name in ("beta", "lam", "alpha", "tolerance"):
            check_positive(name, getattr(self, name))
        check_count("max_iterations", self.max_iterations)


def check_positive(name: str, value: float) -> None:
    """Raise SettingError unless the value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise SettingError(f"{name} must be a finite number above 0, but is {value!r}.")


def check_count(name: str, value: int) -> None:
    """Raise SettingError unless the value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(f"{name} must be a whole number of at least 1, but is {value!r}.")
