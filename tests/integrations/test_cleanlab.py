"""Label audits in cleanlab: `CleanLearning` and Datalab."""

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from ifcomp import Relative, ScoreTable
from ifcomp.errors import DataError, SettingError
from ifcomp.integrations.sklearn import IFCompClassifier
from ifcomp.tasks.mislabel import LabelAudit, audit_labels

pytest.importorskip("cleanlab", reason="cleanlab is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")

from cleanlab import Datalab
from cleanlab.classification import CleanLearning

from ifcomp.integrations.cleanlab import ISSUE_NAME, label_issues

# A deprecated pandas argument of cleanlab.
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword")

X, TRUTH = load_iris(return_X_y=True)
WRONG = [3, 60, 140]
NAMES = np.array(["setosa", "versicolor", "virginica"])


@cache
def scored() -> tuple[NDArray[np.int64], NDArray[np.float64], ScoreTable]:
    """Return labels with three errors, the probabilities of a network trained on them, and its scores."""
    labels = TRUTH.copy()
    labels[WRONG] = (labels[WRONG] + 1) % 3
    model = IFCompClassifier(alpha=0, damping=Relative(1.0), epochs=40, lr=0.01).fit(X, labels)
    return labels, model.predict_proba(X), model.table(X, labels)


def audit() -> LabelAudit:
    return audit_labels(scored()[2], noise_rate=0.04)


def find(labels: Any, label_audit: LabelAudit | None = None, **issue_types: Any) -> Datalab:
    lab = Datalab({"y": labels}, label_name="y", verbosity=0)
    lab.find_issues(issue_types={ISSUE_NAME: {"audit": label_audit or audit()}, **issue_types}, pred_probs=scored()[1])
    return lab


def test_the_frame_by_hand() -> None:
    frame = pd.DataFrame(
        {
            "index": [2, 0, 1],
            "label": [0, 1, 2],
            "suggested_label": [1, 0, 1],
            "label_probability": [0.1, 0.6, 0.7],
            "suggested_probability": [0.8, 0.3, 0.2],
            "label_complexity": [np.log(20), np.log(2), 0.0],
            "is_suspect": [True, False, False],
        }
    )
    expected = pd.DataFrame(
        {
            "is_label_issue": [False, False, True],
            "label_quality": [0.5, 1.0, 0.05],
            "given_label": [1, 2, 0],
            "predicted_label": [1, 2, 1],
        }
    )
    pd.testing.assert_frame_equal(label_issues(LabelAudit(frame, np.log(20), 0.3, {})), expected, rtol=1e-12)
    with pytest.raises(DataError, match="every example"):
        label_issues(LabelAudit(frame.iloc[:2], np.log(20), 0.3, {}))


def test_quality_is_below_one_half_exactly_if_the_model_prefers_another_label() -> None:
    labels, probabilities, table = scored()
    issues = label_issues(audit())
    np.testing.assert_allclose(-np.log(issues["label_quality"]), table.column("label_complexity"), rtol=1e-9)
    assert np.array_equal(issues["label_quality"] < 0.5, probabilities.argmax(1) != labels)
    assert np.array_equal(issues["predicted_label"], probabilities.argmax(1))
    assert np.array_equal(issues["given_label"], labels)
    assert issues["label_quality"].between(0, 1).all()
    assert set(WRONG) <= set(np.flatnonzero(issues["is_label_issue"]))


def test_the_frame_has_the_format_of_cleanlab() -> None:
    labels, probabilities, _ = scored()
    reference = CleanLearning().find_label_issues(labels=labels, pred_probs=probabilities)
    issues = label_issues(audit())
    assert list(issues.columns) == list(reference.columns)
    assert issues.index.equals(reference.index)
    assert [dtype.kind for dtype in issues.dtypes] == [dtype.kind for dtype in reference.dtypes]


def test_clean_learning_trains_without_the_suspects() -> None:
    labels, _, _ = scored()
    issues = label_issues(audit())
    cleaned = CleanLearning(LogisticRegression(max_iter=500)).fit(X, labels, label_issues=issues)
    kept = ~issues["is_label_issue"].to_numpy()
    expected = LogisticRegression(max_iter=500).fit(X[kept], labels[kept])
    np.testing.assert_allclose(cleaned.clf.coef_, expected.coef_, rtol=1e-6)


def test_datalab_finds_and_reports_the_issues(capsys: pytest.CaptureFixture[str]) -> None:
    labels, _, _ = scored()
    lab, expected = find(labels), label_issues(audit())
    issues = lab.get_issues(ISSUE_NAME)
    assert np.array_equal(issues[f"is_{ISSUE_NAME}_issue"], expected["is_label_issue"])
    assert np.array_equal(issues[f"{ISSUE_NAME}_score"], expected["label_quality"])
    summary = lab.get_issue_summary(ISSUE_NAME).iloc[0]
    assert summary["num_issues"] == expected["is_label_issue"].sum() == 6
    assert summary["score"] == pytest.approx(0.96)
    capsys.readouterr()
    lab.report()
    text = capsys.readouterr().out
    assert f"{ISSUE_NAME} issues" in text
    assert "Number of examples with this issue: 6" in text
    assert "noise_rate: 0.04" in text
    assert f"\n{expected['label_quality'].idxmin()} " in text


def test_the_issue_type_coexists_with_label_issues_of_datalab() -> None:
    lab = find(scored()[0], label={})
    assert list(lab.get_issues("label").columns) == [
        *("is_label_issue", "label_score"),
        *("given_label", "predicted_label"),
    ]
    assert len(lab.get_issue_summary()) == 2


@pytest.mark.parametrize("names", [NAMES, NAMES.tolist(), np.array([0, 1, 2])], ids=["array", "list", "numbers"])
def test_classes_are_named_as_in_datalab(names: Any) -> None:
    labels, probabilities, _ = scored()
    issues = find([names[label] for label in labels]).get_issues(ISSUE_NAME)
    assert issues[f"{ISSUE_NAME}_given"].tolist() == [names[label] for label in labels]
    assert issues[f"{ISSUE_NAME}_predicted"].tolist() == [names[label] for label in probabilities.argmax(1)]


def test_class_numbers_may_have_gaps() -> None:
    labels, _, table = scored()
    gaps = table.frame.assign(label=2 * table.frame["label"], suggested_label=2 * table.frame["suggested_label"])
    lab = find(2 * labels, audit_labels(ScoreTable(gaps, table.settings), noise_rate=0.04))
    assert lab.get_issues(ISSUE_NAME)[f"{ISSUE_NAME}_given"].tolist() == (2 * labels).tolist()


def test_wrong_audits_are_refused() -> None:
    labels, _, _ = scored()
    lab = Datalab({"y": labels}, label_name="y", verbosity=0)
    with pytest.raises(SettingError, match="needs a LabelAudit, but got NoneType"):
        lab.find_issues(issue_types={ISSUE_NAME: {}})
    with pytest.raises(DataError, match="150 examples, but Datalab has 149"):
        find(labels[1:])
    with pytest.raises(DataError, match="other labels than Datalab"):
        find(TRUTH)


def test_data_without_labels_are_accepted() -> None:
    lab = Datalab({"x": list(range(150))}, verbosity=0)
    lab.find_issues(issue_types={ISSUE_NAME: {"audit": audit()}})
    assert lab.get_issues(ISSUE_NAME)[f"is_{ISSUE_NAME}_issue"].sum() == 6
