"""Label audits for cleanlab: the frame of `CleanLearning`, and an issue type of Datalab.

Importing this module registers the issue type. In cleanlab *smaller* scores are worse, so the order is reversed: label
quality is ``exp(-label complexity)``, between 0 (certainly wrong) and 1. This is the pNML probability of the given
label if the suggested label is the only alternative.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pandas as pd

from ifcomp.errors import DataError, SettingError
from ifcomp.optional import requires_package
from ifcomp.tasks.mislabel import LabelAudit

with requires_package("cleanlab with Datalab", "cleanlab"):
    from cleanlab.datalab.datalab import Datalab
    from cleanlab.datalab.internal.issue_manager import IssueManager
    from cleanlab.datalab.internal.issue_manager_factory import register

#: Name of the issue type. It must not contain the name of another type, because Datalab selects columns by substring.
ISSUE_NAME = "ifcomp_annotation"


def label_issues(audit: LabelAudit) -> pd.DataFrame:
    """Convert an audit to the frame of ``CleanLearning.find_label_issues``, which ``CleanLearning.fit`` accepts.

    Returns:
        One row per example in the order of the data: ``is_label_issue``, ``label_quality`` (0 to 1, *smaller* = more
        suspicious), ``given_label``, ``predicted_label`` (most probable class of the model).

    Raises:
        DataError: If the audit does not cover a whole data set.
    """
    frame = audit.frame.sort_values("index", ignore_index=True)
    if not np.array_equal(frame["index"], np.arange(len(frame))):
        raise DataError("The audit must contain every example of the data once. Give the result of audit_labels.")
    differs = frame["suggested_probability"] > frame["label_probability"]
    return pd.DataFrame(
        {
            "is_label_issue": frame["is_suspect"],
            "label_quality": np.exp(-frame["label_complexity"]),
            "given_label": frame["label"],
            "predicted_label": frame["suggested_label"].where(differs, frame["label"]),
        }
    )


@register
class AnnotationIssueManager(IssueManager):  # type: ignore[misc]  # cleanlab has no type information
    """Issue type of Datalab for labels of large label complexity.

    Example:
        >>> lab = Datalab({"x": images, "y": labels}, label_name="y")
        >>> lab.find_issues(issue_types={"ifcomp_annotation": {"audit": audit_labels(table)}})
        >>> lab.report()
    """

    issue_name: ClassVar[str] = ISSUE_NAME
    description: ClassVar[str] = (
        "Examples whose given label has a large label complexity under a trained model, relative to\n"
        "    the suggested label. The score is exp(-complexity); smaller = more suspicious.\n"
        "    No cross-validation is needed.\n    "
    )
    verbosity_levels: ClassVar[dict[int, list[str]]] = {0: ["noise_rate", "threshold"], 1: [], 2: [], 3: []}

    def __init__(self, datalab: Datalab, audit: LabelAudit | None = None, **_: Any) -> None:
        """Check that the audit belongs to the data of Datalab.

        Args:
            datalab: The calling Datalab.
            audit: Result of `ifcomp.tasks.mislabel.audit_labels` for the same data in the same order.
        """
        super().__init__(datalab)
        if not isinstance(audit, LabelAudit):
            raise SettingError(
                f"The issue type '{ISSUE_NAME}' needs a LabelAudit, but got {type(audit).__name__}. Give "
                f"issue_types={{'{ISSUE_NAME}': {{'audit': audit_labels(table)}}}}."
            )
        self._issues = label_issues(audit)
        self._names = _class_names(datalab, self._issues["given_label"])
        self._audit = audit

    def find_issues(self, **_: Any) -> None:
        """Set ``issues``, ``summary`` and ``info`` for Datalab."""
        self.issues = pd.DataFrame(
            {
                f"is_{ISSUE_NAME}_issue": self._issues["is_label_issue"],
                self.issue_score_key: self._issues["label_quality"],
                f"{ISSUE_NAME}_given": self._named("given_label"),
                f"{ISSUE_NAME}_predicted": self._named("predicted_label"),
            }
        )
        self.summary = self.make_summary(1 - self._audit.noise_rate)
        self.info = self.collect_info()

    def _named(self, column: str) -> list[Any]:
        return [self._names.get(index, index) for index in self._issues[column]]

    def collect_info(self) -> dict[str, Any]:
        """Return noise rate, threshold in nats, mean label quality and labels."""
        return {
            "noise_rate": self._audit.noise_rate,
            "threshold": self._audit.threshold,
            "average_label_quality": float(self._issues["label_quality"].mean()),
            "given_label": self._issues["given_label"].tolist(),
            "predicted_label": self._issues["predicted_label"].tolist(),
        }


def _class_names(datalab: Datalab, given_labels: pd.Series[Any]) -> dict[int, Any]:
    """Return the class names of Datalab by class index of the audit; empty if both use the same labels.

    Raises:
        DataError: If the audit belongs to other data.
    """
    if len(given_labels) != len(datalab.data):
        raise DataError(f"The audit is of {len(given_labels)} examples, but Datalab has {len(datalab.data)}.")
    names = dict(enumerate(datalab.class_names))
    if not datalab.has_labels or [names[index] for index in datalab.labels] == given_labels.tolist():
        return {}
    if not np.array_equal(datalab.labels, given_labels):
        raise DataError(
            "The audit has other labels than Datalab. Score the same data in the same order, with classes numbered "
            f"as in {names}."
        )
    return names
