"""`LabelAudit.pred_probs` in cleanlab: filters, Datalab and CleanLearning take it as it is."""

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

from ifcomp import IFComp
from ifcomp.tasks.audit import LabelAudit

pytest.importorskip("cleanlab", reason="cleanlab is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")

from cleanlab import Datalab
from cleanlab.classification import CleanLearning
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores

# A deprecated pandas argument of cleanlab.
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword")

NUM_WRONG = 80
NAMES = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])


class Memorised(NamedTuple):
    """A network that has memorised its labels, and its audit."""

    inputs: NDArray[np.float64]
    labels: NDArray[np.int64]
    wrong: NDArray[np.bool_]
    in_sample: NDArray[np.float64]
    audit: LabelAudit


@cache
def memorised() -> Memorised:
    """Train on 800 digits, a tenth of them with wrong labels, until every label is predicted."""
    images, truth = load_digits(return_X_y=True)
    inputs, truth = images[:800] / 16, truth[:800]
    generator = np.random.default_rng(0)
    labels = truth.copy()
    flipped = generator.choice(800, NUM_WRONG, replace=False)
    labels[flipped] = (labels[flipped] + generator.integers(1, 10, NUM_WRONG)) % 10
    x, y = torch.tensor(inputs).float(), torch.tensor(labels)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(300):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        in_sample = model(x).double().softmax(1).numpy()
    assert (in_sample.argmax(1) == labels).mean() > 0.99
    return Memorised(inputs, labels, labels != truth, in_sample, IFComp(model).audit([(x, y)], progress=False))


def test_pooled_probabilities_are_distributions() -> None:
    pooled = memorised().audit.pred_probs
    assert pooled.shape == (800, 10)
    assert pooled.dtype == np.float64
    assert np.isfinite(pooled).all()
    assert pooled.min() >= 0
    np.testing.assert_allclose(pooled.sum(1), 1, rtol=1e-12)


def test_cleanlab_finds_planted_errors_that_are_memorised() -> None:
    case = memorised()
    issues = find_label_issues(case.labels, case.audit.pred_probs)
    assert (issues & case.wrong).sum() >= 0.5 * NUM_WRONG
    assert (issues & case.wrong).sum() >= 0.9 * issues.sum()
    missed = find_label_issues(case.labels, case.in_sample)
    assert (missed & case.wrong).sum() <= 0.1 * NUM_WRONG


def test_cleanlab_ranks_planted_errors_first() -> None:
    case = memorised()
    quality = get_label_quality_scores(case.labels, case.audit.pred_probs)
    assert case.wrong[quality.argsort()[:NUM_WRONG]].mean() >= 0.9


@pytest.mark.parametrize("names", [None, NAMES], ids=["numbers", "names"])
def test_datalab_finds_the_issues_of_the_filter(names: NDArray[np.str_] | None) -> None:
    case = memorised()
    labels = case.labels if names is None else NAMES.argsort().argsort()[case.labels]  # Datalab sorts names
    pooled = case.audit.pred_probs if names is None else case.audit.pred_probs[:, NAMES.argsort()]
    lab = Datalab({"y": case.labels if names is None else names[case.labels]}, label_name="y", verbosity=0)
    lab.find_issues(pred_probs=pooled, issue_types={"label": {}})
    issues = lab.get_issues("label")
    assert np.array_equal(issues["is_label_issue"], find_label_issues(labels, pooled))


def test_datalab_runs_all_its_checks_of_probabilities() -> None:
    case = memorised()
    lab = Datalab({"y": case.labels}, label_name="y", verbosity=0)
    lab.find_issues(pred_probs=case.audit.pred_probs)
    assert "label" in set(lab.get_issue_summary()["issue_type"])


def test_clean_learning_trains_without_the_issues() -> None:
    case = memorised()
    issues = CleanLearning().find_label_issues(labels=case.labels, pred_probs=case.audit.pred_probs)
    cleaned = CleanLearning(LogisticRegression(max_iter=500)).fit(case.inputs, case.labels, label_issues=issues)
    kept = ~issues["is_label_issue"].to_numpy()
    expected = LogisticRegression(max_iter=500).fit(case.inputs[kept], case.labels[kept])
    assert np.array_equal(cleaned.predict(case.inputs), expected.predict(case.inputs))


def test_rare_and_absent_classes_have_probabilities_too() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, 8, generator=generator) + 3 * nn.functional.one_hot(y, 8)
    y[7] = 4  # one example of class 4, none of classes 3 and 5
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
    pooled = IFComp(model).audit([(x, y)], progress=False).pred_probs
    assert np.isfinite(pooled).all()
    with pytest.warns(UserWarning, match="too few examples"):
        assert len(find_label_issues(y.numpy(), pooled, n_jobs=1)) == 60
