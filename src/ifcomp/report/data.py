"""The content of a report: plain data, checked before anything is rendered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ifcomp.errors import DataError, LabelError, SettingError
from ifcomp.layers.coverage import Coverage
from ifcomp.report.examples import LayerNeighbours, OODExample, Preview, TrainingExample

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

#: Command that carries out the decisions of a report, for data without a name.
APPLY_COMMAND = "ifcomp apply decisions.csv --data DATA --out FILE"

#: Columns that ``audit.frame`` must have.
INTEGER_COLUMNS = ("index", "label", "suggested")
NUMBER_COLUMNS = ("score", "p_label", "p_suggested")
AUDIT_COLUMNS = (*INTEGER_COLUMNS, *NUMBER_COLUMNS, "is_suspect")

#: Columns of numbers that ``audit.frame`` may have.
OPTIONAL_COLUMNS = ("label_complexity",)


class Audit(Protocol):
    """A label audit, such as `ifcomp.tasks.audit.LabelAudit`. Scores are in nats; larger = more suspicious.

    Attributes:
        frame: One row per example, with the columns of `AUDIT_COLUMNS`.
        ranked: The same rows, most suspicious first.
        headline: Summary of the audit.
        noise_rate: Estimated share of wrong labels.
        weights: One row per member of the pool: layer, predictor, weight, support and echo.
        settings: Settings of the audit.
        descriptions: Meaning, direction and unit of the columns.
    """

    @property
    def frame(self) -> pd.DataFrame: ...
    @property
    def ranked(self) -> pd.DataFrame: ...
    @property
    def headline(self) -> str: ...
    @property
    def noise_rate(self) -> float: ...
    @property
    def weights(self) -> pd.DataFrame: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def descriptions(self) -> Mapping[str, str]: ...


class Curve(Protocol):
    """A reliability curve: mean confidence, accuracy and number of examples per bin, [bins] each, and the ECE."""

    @property
    def confidence(self) -> ArrayLike: ...
    @property
    def accuracy(self) -> ArrayLike: ...
    @property
    def count(self) -> ArrayLike: ...
    @property
    def ece(self) -> float: ...


@dataclass(frozen=True)
class ReliabilityPair:
    """Reliability curves of the same examples before and after calibration."""

    before: Curve
    after: Curve
    before_name: str = "before"
    after_name: str = "after"


@dataclass(frozen=True)
class OODScores:
    """Scores of an OOD detector; larger = more surprising.

    Attributes:
        held_out: Scores [N] of the held-out inputs of the detector.
        new: Scores of new inputs by name of the data, each [M].
        threshold: Inputs with a larger score are flagged.
        title: Name of the score.
        examples: The most surprising flagged inputs.
    """

    held_out: ArrayLike
    new: Mapping[str, ArrayLike]
    threshold: float
    title: str = "score"
    examples: Sequence[OODExample] = ()

    @property
    def groups(self) -> dict[str, Floats]:
        """All scores as arrays by name, those of the held-out inputs first."""
        groups = {"held-out inputs": self.held_out, **self.new}
        return {name: np.asarray(values, dtype=np.float64) for name, values in groups.items()}


@dataclass(frozen=True)
class ReportData:
    """The content of a report, built by `collect`. Parts that are None are left out."""

    title: str
    audit: Audit | None
    calibration: ReliabilityPair | None
    ood: OODScores | None
    explanations: Mapping[int, tuple[TrainingExample, ...]]
    neighbours: Mapping[int, tuple[LayerNeighbours, ...]]
    previews: Mapping[int, Preview]
    class_names: tuple[str, ...] | None
    provenance: Mapping[str, Any] | None
    coverage: Coverage | None
    max_previews: int
    predictions: Integers | None
    apply_command: str


def collect(
    *,
    title: str,
    audit: Audit | None = None,
    calibration: ReliabilityPair | None = None,
    ood: OODScores | None = None,
    explanations: Mapping[int, Iterable[TrainingExample | tuple[Any, ...]]] | None = None,
    neighbours: Mapping[int, Iterable[LayerNeighbours]] | None = None,
    previews: Mapping[int, Preview] | None = None,
    class_names: Sequence[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    coverage: Coverage | None = None,
    max_previews: int = 200,
    predictions: ArrayLike | None = None,
    apply_command: str | None = None,
) -> ReportData:
    """Check the parts of a report. The arguments are those of `build_report`.

    Raises:
        SettingError: If there is nothing to report, or a setting is invalid.
        DataError: If a part is invalid; names the part.
    """
    if audit is None and calibration is None and ood is None and coverage is None:
        raise SettingError("There is nothing to report: give audit, calibration, ood or coverage.")
    if max_previews < 0:
        raise SettingError(f"max_previews must be at least 0, but is {max_previews}.")
    explained = {
        int(suspect): tuple(_as_training_example(suspect, example) for example in examples)
        for suspect, examples in (explanations or {}).items()
    }
    near = {int(suspect): tuple(layers) for suspect, layers in (neighbours or {}).items()}
    names = None if class_names is None else tuple(map(str, class_names))
    if audit is not None:
        _check_audit(audit.frame)
        _check_labels([*audit.frame["label"], *audit.frame["suggested"], *_example_labels(explained, near)], names)
    predicted = _check_predictions(predictions, audit, names)
    if calibration is not None:
        _check_curve("before", calibration.before)
        _check_curve("after", calibration.after)
    if ood is not None:
        _check_groups(ood.groups)
        _check_labels([*_gallery_labels(ood.examples)], names)
    return ReportData(
        title,
        audit,
        calibration,
        ood,
        explained,
        near,
        previews or {},
        names,
        provenance,
        coverage,
        max_previews,
        predicted,
        apply_command or APPLY_COMMAND,
    )


def _as_training_example(suspect: int, example: TrainingExample | tuple[Any, ...]) -> TrainingExample:
    if isinstance(example, TrainingExample):
        return example
    if len(example) not in (3, 4):
        raise DataError(
            f"An explanation of example {suspect} has {len(example)} entries. "
            "It must be (index, influence, label) or (index, influence, label, preview)."
        )
    return TrainingExample(*example)


def _check_audit(frame: pd.DataFrame) -> None:
    missing = [name for name in AUDIT_COLUMNS if name not in frame.columns]
    if missing:
        raise DataError(f"audit.frame lacks the columns {', '.join(missing)}. It must have {', '.join(AUDIT_COLUMNS)}.")
    if frame.empty:
        raise DataError("audit.frame has no rows.")
    not_integer = [name for name in INTEGER_COLUMNS if frame[name].dtype.kind not in "iu"]
    if not_integer:
        raise DataError(f"The columns {', '.join(not_integer)} of audit.frame must be integers.")


def _example_labels(
    explained: Mapping[int, tuple[TrainingExample, ...]], near: Mapping[int, tuple[LayerNeighbours, ...]]
) -> Iterator[int]:
    yield from (example.label for examples in explained.values() for example in examples)
    for layer in (layer for layers in near.values() for layer in layers):
        yield from (example.label for example in layer.examples)
        yield from layer.labels


def _gallery_labels(examples: Iterable[OODExample]) -> Iterator[int]:
    yield from (example.prediction for example in examples)
    yield from (near.label for example in examples for near in example.nearest)


def _check_predictions(
    predictions: ArrayLike | None, audit: Audit | None, names: tuple[str, ...] | None
) -> Integers | None:
    if predictions is None or audit is None:
        return None
    found = np.asarray(predictions)
    if found.shape != (len(audit.frame),) or found.dtype.kind not in "iu":
        raise DataError(
            f"predictions must be one class per example of the audit, {len(audit.frame):,} integers, but have shape "
            f"{list(found.shape)} and dtype {found.dtype}."
        )
    _check_labels(found.tolist(), names)
    return found.astype(np.int64)


def _check_labels(labels: Sequence[int], names: tuple[str, ...] | None) -> None:
    if min(labels, default=0) < 0:
        raise LabelError(f"Labels must be at least 0, but one is {min(labels)}.")
    if names is not None and max(labels, default=0) >= len(names):
        raise LabelError(f"There are {len(names)} class names, but label {max(labels)} occurs.")


def _check_curve(name: str, curve: Curve) -> None:
    shapes = {np.shape(values) for values in (curve.confidence, curve.accuracy, curve.count)}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise DataError(
            f"confidence, accuracy and count of the curve '{name}' must have one shape [bins], "
            f"but have {sorted(shapes)}."
        )
    if not np.sum(curve.count) > 0:
        raise DataError(f"The curve '{name}' has no examples.")


def _check_groups(groups: Mapping[str, Floats]) -> None:
    for name, values in groups.items():
        if values.ndim != 1 or not values.size or not np.isfinite(values).all():
            raise DataError(
                f"The scores of '{name}' must be finite numbers of shape [N] with N > 0, "
                f"but have shape {list(values.shape)}."
            )
