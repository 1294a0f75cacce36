"""Label audits for cleanlab: the frame that its tools take, and an issue type of its own in Datalab.

Importing this file registers the issue type. In cleanlab *small* scores are bad, so the audit's nats are turned round:
label quality is ``exp(-label complexity)``, from 0 (certainly wrong) to 1, the same order read backwards. It is the
pNML probability of the given label where the suggested one is the only other choice.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pandas as pd

from ifcomp.errors import DataError, SettingError
from ifcomp.integrations.optional import needs
from ifcomp.tasks.mislabel import LabelAudit

with needs("cleanlab with Datalab", "cleanlab"):
    from cleanlab.datalab.datalab import Datalab
    from cleanlab.datalab.internal.issue_manager import IssueManager
    from cleanlab.datalab.internal.issue_manager_factory import register

#: The issue type in Datalab. It must not hold the name of another: Datalab finds the columns of a type by its name.
ISSUE_NAME = "ifcomp_annotation"


def label_issues(audit: LabelAudit) -> pd.DataFrame:
    """An audit as the frame that ``CleanLearning.find_label_issues`` gives and ``CleanLearning.fit`` takes.

    Returns:
        One row an example in the order of the data: ``is_label_issue``, ``label_quality`` (0 to 1, *smaller* = more
        suspicious), ``given_label``, ``predicted_label`` (the model's most probable class).

    Raises:
        DataError: If the audit is not of a whole data set.
    """
    frame = audit.frame.sort_values("index", ignore_index=True)
    if not np.array_equal(frame["index"], np.arange(len(frame))):
        raise DataError("The audit does not hold every example of the data once. Give what audit_labels returned.")
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
    """Labels that a trained model finds costly to encode, as an issue type of Datalab.

    Example:
        >>> lab = Datalab({"x": images, "y": labels}, label_name="y")
        >>> lab.find_issues(issue_types={"ifcomp_annotation": {"audit": audit_labels(table)}})
        >>> lab.report()
    """

    issue_name: ClassVar[str] = ISSUE_NAME
    description: ClassVar[str] = (
        "Examples whose given label a trained model finds costly to encode beside another: label complexity\n"
        "    in nats. The score is exp(-complexity); smaller = more suspicious. No cross-validation is needed.\n    "
    )
    verbosity_levels: ClassVar[dict[int, list[str]]] = {0: ["noise_rate", "threshold"], 1: [], 2: [], 3: []}

    def __init__(self, datalab: Datalab, audit: LabelAudit | None = None, **_: Any) -> None:
        """Refuse what cannot be an audit of Datalab's data.

        Args:
            datalab: The Datalab that asks.
            audit: What `ifcomp.tasks.mislabel.audit_labels` returned for the same data in the same order.
        """
        super().__init__(datalab)
        if not isinstance(audit, LabelAudit):
            raise SettingError(
                f"The issue type '{ISSUE_NAME}' needs a LabelAudit, but got {type(audit).__name__}. Give "
                f"issue_types={{'{ISSUE_NAME}': {{'audit': audit_labels(table)}}}}."
            )
        self._found = label_issues(audit)
        self._names = _class_names(datalab, self._found["given_label"])
        self._audit = audit

    def find_issues(self, **_: Any) -> None:
        """Fill the frames that Datalab collects."""
        self.issues = pd.DataFrame(
            {
                f"is_{ISSUE_NAME}_issue": self._found["is_label_issue"],
                self.issue_score_key: self._found["label_quality"],
                f"{ISSUE_NAME}_given": self._named("given_label"),
                f"{ISSUE_NAME}_predicted": self._named("predicted_label"),
            }
        )
        self.summary = self.make_summary(1 - self._audit.noise_rate)
        self.info = self.collect_info()

    def _named(self, column: str) -> list[Any]:
        return [self._names.get(number, number) for number in self._found[column]]

    def collect_info(self) -> dict[str, Any]:
        """Noise rate, threshold in nats and mean label quality."""
        return {
            "noise_rate": self._audit.noise_rate,
            "threshold": self._audit.threshold,
            "average_label_quality": float(self._found["label_quality"].mean()),
            "given_label": self._found["given_label"].tolist(),
            "predicted_label": self._found["predicted_label"].tolist(),
        }


def _class_names(datalab: Datalab, given: pd.Series[Any]) -> dict[int, Any]:
    """What Datalab calls the class numbers of an audit; empty if the same.

    Raises:
        DataError: If the audit is of other data than Datalab's.
    """
    if len(given) != len(datalab.data):
        raise DataError(f"The audit is of {len(given)} examples, but Datalab has {len(datalab.data)}.")
    names = dict(enumerate(datalab.class_names))
    if not datalab.has_labels or [names[number] for number in datalab.labels] == given.tolist():
        return {}
    if not np.array_equal(datalab.labels, given):
        raise DataError(
            "The audit has other labels than Datalab. Score the same data in the same order, with classes numbered "
            f"as in {names}."
        )
    return names
