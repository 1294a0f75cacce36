"""`Calibration`: temperature and alpha of predictions, cross-validated figures, and the rule of prediction sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd

from ifcomp.errors import SettingError
from ifcomp.tables import TableResult
from ifcomp.tasks.calibration import ReliabilityCurve, draw_reliability
from ifcomp.tasks.prediction_sets import SetRule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Version of the plain data of a calibration in files.
SCHEMA = 1

#: Forms of the predictive distribution, from the simplest to the calibrated one.
SOFTMAX, TEMPERATURE, CALIBRATED = FORMS = ("softmax", "temperature", "calibrated")

#: Columns of `Calibration.frame`.
COLUMNS = ("form", "temperature", "alpha", "accuracy", "nll", "ece", "brier", "is_used")

#: Description of every column of `Calibration.frame`.
DESCRIPTIONS = {
    "form": "softmax of the model; softmax at a temperature; the same with alpha",
    "temperature": "T in softmax(f / T), chosen on all tuning examples",
    "alpha": "weight of an example relative to one training example, chosen on all tuning examples",
    "accuracy": "share of correct predictions, cross-validated; larger is better",
    "nll": "mean -log p of the label in nats, cross-validated; smaller is better",
    "ece": "expected calibration error, cross-validated; smaller is better",
    "brier": "mean squared distance to the one-hot label, cross-validated; smaller is better",
    "is_used": "whether predictions use this form: a simpler one unless the cross-validated NLL is clearly smaller",
}


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(TableResult):
    """Result of a calibration.

    Attributes:
        alpha: Weight of an example relative to one training example; 0 if it does not improve the NLL.
        temperature: T in ``softmax(f / T)``; 1 keeps the softmax.
        frame: One row per form of the distribution; see `DESCRIPTIONS`.
        curves: Cross-validated reliability curves by form.
        set_rule: Regularisation and conformal scores of prediction sets.
        settings: Settings of fit and calibration.
    """

    alpha: float
    temperature: float
    frame: pd.DataFrame
    curves: Mapping[str, ReliabilityCurve]
    set_rule: SetRule
    settings: Mapping[str, Any]

    @property
    def form(self) -> str:
        """The form that predictions use: "softmax", "temperature" or "calibrated"."""
        return str(self.frame["form"][self.frame["is_used"].argmax()])

    @property
    def has_gain(self) -> bool:
        """Whether the cross-validated NLL is better than that of the softmax by more than its standard error."""
        return self.form != SOFTMAX

    @property
    def headline(self) -> str:
        """Summary of the calibration."""
        softmax, used = self.frame.iloc[0], self.frame.iloc[int(self.frame["is_used"].argmax())]
        examples = f"{self.settings['tuning_examples']:,} held-out examples"
        if softmax["accuracy"] == 1:
            return (
                f"No gain: keep the softmax. The model predicts all {examples} correctly, so overconfidence cannot be "
                "measured; give more or harder data, or shifted data."
            )
        if not self.has_gain:
            others = self.frame["nll"][1:].min()
            return (
                f"No gain: keep the softmax. Its cross-validated NLL on {examples} is {softmax['nll']:.4g} nats, with "
                f"calibration {others:.4g}, which is not better by more than chance."
            )
        text = (
            f"Temperature {self.temperature:.3g} and alpha {self.alpha:.3g}: NLL {softmax['nll']:.4g} -> "
            f"{used['nll']:.4g} nats, ECE {softmax['ece']:.3f} -> {used['ece']:.3f}, accuracy {used['accuracy']:.1%}, "
            f"cross-validated on {examples}."
        )
        reason = " Alpha is 0, because it does not improve the NLL by more than chance."
        return text + (reason if self.form == TEMPERATURE else "")

    def check_fit(self, expected: Mapping[str, Any]) -> None:
        """Raise SettingError if settings of model and fit are not the expected ones; names the differences."""
        pairs = {name: (self.settings.get(name), value) for name, value in expected.items()}
        differences = [f"{name} {ours!r}, not {value!r}" for name, (ours, value) in pairs.items() if ours != value]
        if differences:
            raise SettingError(
                f"The calibration belongs to another model or fit: {', '.join(differences)}. Call calibrate(held_out)."
            )

    def check_form(self, damping: str, keep_argmax: bool) -> None:
        """Raise SettingError if alpha was chosen for another damping or form of the distribution."""
        if damping != self.settings["damping"]:
            raise SettingError(
                f"The calibration is for damping {self.settings['damping']}, but this call has {damping}. Leave "
                "damping= out, calibrate a predictor with that damping, or give alpha=."
            )
        if not keep_argmax:
            raise SettingError(
                "The calibration is for the form that keeps the argmax. Leave keep_argmax=False out, or give alpha=."
            )

    def plot(self) -> Figure:
        """Draw cross-validated reliability curves. Curves below the diagonal are overconfident."""
        return draw_reliability(self.curves)

    @property
    def answer(self) -> str:
        """Temperature, alpha and their effect, or "no gain"."""
        if not self.has_gain:
            return f"no gain: keep the softmax, NLL {self.frame['nll'][0]:.4g}"
        before, after = self.frame.iloc[0], self.frame.iloc[int(self.frame["is_used"].argmax())]
        return (
            f"temperature {self.temperature:.3g}, alpha {self.alpha:.3g}, NLL {before['nll']:.4g} -> "
            f"{after['nll']:.4g}, ECE {before['ece']:.3f} -> {after['ece']:.3f}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads."""
        curves = {
            form: [values.tolist() for values in (curve.confidence, curve.accuracy, curve.count)]
            for form, curve in self.curves.items()
        }
        rule = self.set_rule
        return {
            "schema": SCHEMA,
            "alpha": self.alpha,
            "temperature": self.temperature,
            "rows": self.frame.to_numpy(dtype=object).tolist(),
            "curves": curves,
            "scores": rule.scores.tolist(),
            "penalty": rule.penalty,
            "free_ranks": rule.free_ranks,
            "settings": dict(self.settings),
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Check and restore the result of `to_json`.

        Raises:
            ValueError, TypeError, KeyError: If the data is damaged.
        """
        if not isinstance(data, dict):
            raise TypeError(f"the calibration is a {type(data).__name__}")
        if data["schema"] != SCHEMA:
            raise ValueError(f"it has schema {data['schema']}, this version reads {SCHEMA}")
        frame = _checked_frame(data["rows"])
        used = frame.iloc[int(frame["is_used"].argmax())]
        alpha, temperature = (_number(data, name) for name in ("alpha", "temperature"))
        if (alpha, temperature) != (used["alpha"], used["temperature"]) or temperature == 0:
            raise ValueError("alpha and temperature of the calibration are not those of its table")
        curves = {form: _checked_curve(data["curves"][form]) for form in FORMS}
        if not isinstance(data["settings"], dict) or not isinstance(data["settings"].get("tuning_examples"), int):
            raise TypeError("the settings of the calibration are incomplete")
        return cls(alpha, temperature, frame, curves, _checked_rule(data), data["settings"])


def _number(data: Mapping[str, Any], name: str) -> float:
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def _checked_frame(rows: Any) -> pd.DataFrame:
    if not isinstance(rows, list) or [row[0] for row in rows] != list(FORMS):
        raise ValueError("the table of the calibration does not have one row per form")
    for row in rows:
        values = dict(zip(COLUMNS, row, strict=True))
        if not isinstance(values.pop("is_used"), bool):
            raise TypeError("the table of the calibration has entries of another type")
        for name in COLUMNS[1:-1]:
            if values[name] != math.inf or name != "nll":  # the NLL is infinite if a label has probability 0
                _number(values, name)
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(COLUMNS[1:-1], float))
    if frame["is_used"].sum() != 1:
        raise ValueError("the table of the calibration does not name one form")
    return frame


def _checked_curve(parts: Any) -> ReliabilityCurve:
    confidence, accuracy = (np.array(part, dtype=np.float64) for part in parts[:2])
    count = np.array(parts[2], dtype=np.int64)
    is_valid = confidence.ndim == 1 and confidence.size > 0 and confidence.shape == accuracy.shape == count.shape
    shares = np.concatenate([confidence, accuracy]) if is_valid else np.array([np.nan])
    if not (np.isfinite(shares).all() and (shares >= 0).all() and (shares <= 1 + 1e-6).all() and (count > 0).all()):
        raise ValueError("a reliability curve of the calibration is invalid")
    return ReliabilityCurve(confidence, accuracy, count)


def _checked_rule(data: Mapping[str, Any]) -> SetRule:
    scores, free_ranks = np.array(data["scores"], dtype=np.float64), data["free_ranks"]
    if scores.ndim != 1 or not scores.size or not np.isfinite(scores).all():
        raise ValueError("the conformal scores are not finite numbers")
    if (np.diff(scores) < 0).any() or scores[0] < 0:
        raise ValueError("the conformal scores are negative or not sorted")
    if isinstance(free_ranks, bool) or not isinstance(free_ranks, int) or free_ranks < 1:
        raise ValueError(f"free_ranks is {free_ranks!r}")
    return SetRule(scores, _number(data, "penalty"), free_ranks)
