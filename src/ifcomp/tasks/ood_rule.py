"""`OODRule`: the plain data of an OOD detector."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ifcomp.errors import SettingError
from ifcomp.tasks.metrics import checked_scores
from ifcomp.tasks.ood import Floats, check_members, join_scores, ood_threshold

#: Settings of `OODRule.settings` that identify model and fit.
IDENTITY = ("beta", "model", "fit", "training_examples", "damping")

#: Version of the stored form, and names of its tables.
SCHEMA = 2
STORED_TABLES = ("weights", "held_out", "settings")


@dataclass(frozen=True, eq=False)
class OODRule:
    """Members of a score, their weights and values on held-out data, and the threshold.

    Attributes:
        weights: Weights of the joined scores by name.
        held_out: Scores [N] of the held-out examples by member, in the order of the data.
        tpr: Share of the held-out examples to accept.
        settings: Settings of fit and detector.
    """

    weights: Mapping[str, float]
    held_out: Mapping[str, Floats]
    tpr: float
    settings: Mapping[str, Any]

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the joined scores."""
        return tuple(self.weights)

    @cached_property
    def held_out_scores(self) -> Floats:
        """Joined scores of the held-out examples, [N]; each is compared with the others."""
        return join_scores(self.held_out, None, self.weights)

    @cached_property
    def threshold(self) -> float:
        """The smallest score that accepts at least the share ``tpr`` of the held-out examples."""
        return ood_threshold(self.held_out_scores, self.tpr)

    @property
    def title(self) -> str:
        """The members of the score, as text."""
        return " + ".join(self.members)

    @property
    def size(self) -> int:
        """Number of held-out examples N."""
        return len(self.held_out[self.members[0]])

    def join(self, values: Mapping[str, ArrayLike]) -> Floats:
        """Return the score [B] of examples from their member scores; larger = more surprising. See `join_scores`."""
        return join_scores(values, self.held_out, self.weights)

    def check_fit(self, expected: Mapping[str, Any]) -> None:
        """Raise SettingError if settings of model and fit are not the expected ones; names the differences."""
        pairs = {name: (self.settings.get(name), expected[name]) for name in IDENTITY}
        differences = [f"{name} {ours!r}, not {value!r}" for name, (ours, value) in pairs.items() if ours != value]
        if differences:
            raise SettingError(
                f"The detector belongs to another model or fit: {', '.join(differences)}. Call ood_detector(held_out)."
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads."""
        values = {name: self.held_out[name].tolist() for name in self.members}
        return {
            "schema": SCHEMA,
            "weights": dict(self.weights),
            "held_out": values,
            "tpr": self.tpr,
            "settings": dict(self.settings),
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Check and restore the result of `to_json`.

        Raises:
            ValueError, TypeError, KeyError: If the data is damaged.
        """
        if not isinstance(data, dict) or not all(isinstance(data[name], dict) for name in STORED_TABLES):
            raise TypeError(f"the detector is not a table of {', '.join(STORED_TABLES)}")
        if data["schema"] != SCHEMA:
            raise ValueError(f"it has schema {data['schema']}, this version reads {SCHEMA}")
        members = check_members(list(data["held_out"]))
        tpr = _checked_share("tpr", data["tpr"])
        weights = {name: _checked_share(f"the weight of {name}", data["weights"][name]) for name in members}
        held_out = {name: _checked_values(data["held_out"][name]) for name in members}
        if len({len(values) for values in held_out.values()}) != 1:
            raise ValueError("the members of the detector have different numbers of held-out scores")
        return cls(weights, held_out, tpr, data["settings"])


def _checked_share(name: str, value: Any) -> float:
    """Return a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def _checked_values(values: Sequence[Any]) -> Floats:
    """Return finite held-out scores."""
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        raise TypeError("the held-out scores of the detector are not numbers")
    scores = checked_scores("held-out scores", np.array(values, dtype=np.float64))
    if not all(map(math.isfinite, scores)):
        raise ValueError("the held-out scores of the detector are not finite")
    return scores
