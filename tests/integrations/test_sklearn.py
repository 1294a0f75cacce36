"""`IFCompClassifier` in the checks and tools of scikit-learn, and against explicit formulas."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from ifcomp import IFComp
from ifcomp.errors import IfcompError, LabelError, NotCalibratedError, NotFittedError, SettingError
from ifcomp.integrations.sklearn import IFCompClassifier

X, Y = load_iris(return_X_y=True)
FAST = {"epochs": 10, "lr": 0.03}


@parametrize_with_checks([IFCompClassifier(**FAST)])
def test_estimator_checks(estimator: IFCompClassifier, check: Any) -> None:
    check(estimator)


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def logits_of(model: IFCompClassifier, features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logits of features standardised by hand."""
    standard = (features - X.mean(0)) / X.std(0)
    return model.network_(torch.tensor(standard)).detach().numpy()


@pytest.mark.parametrize(("beta", "alpha"), [(1.0, 0.0), (1.0, 5.0), (0.5, 5.0)])
def test_probabilities_are_pnml(beta: float, alpha: float) -> None:
    model = IFCompClassifier(beta=beta, alpha=alpha, damping=1e-3, keep_argmax=False, **FAST).fit(X, Y)
    p = softmax(beta * logits_of(model, X[::7]))
    influence = model.ifc_.influence(torch.tensor((X[::7] - X.mean(0)) / X.std(0)), damping=1e-3).numpy()
    hindsight = p * (1 + alpha / len(X) * influence)
    np.testing.assert_allclose(model.predict_proba(X[::7]), hindsight / hindsight.sum(1, keepdims=True), rtol=1e-9)


def test_keep_argmax_keeps_the_predicted_class() -> None:
    model = IFCompClassifier(alpha=1e4, damping=1e-6, **FAST).fit(X, Y)
    assert np.array_equal(model.predict(X), logits_of(model, X).argmax(1))
    model.set_params(keep_argmax=False)
    assert not np.array_equal(model.predict(X), logits_of(model, X).argmax(1))


def test_complexity_is_larger_between_the_classes() -> None:
    model = IFCompClassifier(damping=0.0, epochs=30).fit(X, Y)
    between = (X[:50] + X[100:]) / 2  # halfway from the first class to the last
    assert np.median(model.complexity(between)) > 2 * model.complexity(X).mean()
    expected = model.ifc_.influence(torch.tensor((between - X.mean(0)) / X.std(0)), damping=0.0).numpy()
    mean = (softmax(logits_of(model, between)) * expected).sum(1)
    np.testing.assert_allclose(model.complexity(between), np.log1p(mean / len(X)), rtol=1e-9)


@pytest.mark.filterwarnings("ignore:.* held-out examples are few")
def test_ood_scores() -> None:
    train = np.arange(len(X)) % 2 == 0
    model = IFCompClassifier(epochs=30).fit(X[train], Y[train])
    with pytest.raises(NotFittedError, match="fit_ood"):
        model.ood_score(X)
    assert model.fit_ood(X[~train], tpr=0.9) is model
    inside, outside = model.ood_score(X[~train]), model.ood_score(-5 * X)
    assert 0.9 <= (inside <= model.ifc_.detector.threshold).mean() <= 0.95  # each was compared with the others before
    assert np.median(outside) > model.ifc_.detector.threshold
    scaled = torch.tensor((X - X[train].mean(0)) / X[train].std(0))
    np.testing.assert_allclose(model.ood_score(X), model.ifc_.detector.score(scaled).numpy())


@pytest.mark.parametrize("names", [["setosa", "versicolor", "virginica"], [-1, 5, 30], [0.0, 1.0, 7.0]], ids=str)
def test_labels_of_any_type(names: list[Any]) -> None:
    labels = np.array(names)[Y]
    named, plain = IFCompClassifier(**FAST).fit(X, labels), IFCompClassifier(**FAST).fit(X, Y)
    assert np.array_equal(named.classes_, names)
    assert np.array_equal(named.predict(X), np.array(names)[plain.predict(X)])
    assert np.array_equal(named.table(X, labels).frame, plain.table(X, Y).frame)


@pytest.mark.filterwarnings("ignore:The audit relies on only . of 7 predictors")
def test_the_audit_finds_a_wrong_label() -> None:
    labels = np.array(["setosa", "versicolor", "virginica"], dtype=object)[Y]
    labels[7] = "virginica"
    model = IFCompClassifier(epochs=30).fit(X, labels)
    first = model.audit(X, labels).suspects.iloc[0]
    assert (first["index"], model.classes_[first["label"]]) == (7, "virginica")
    assert model.classes_[first["suggested"]] == "setosa"
    assert (first["label_name"], first["suggested_name"]) == ("virginica", "setosa")


def test_classifier_in_pipelines_searches_and_calibration() -> None:
    pipeline = make_pipeline(MinMaxScaler(), IFCompClassifier(epochs=30, lr=0.01))
    assert cross_val_score(pipeline, X, Y, cv=3).mean() > 0.9
    search = GridSearchCV(pipeline, {"ifcompclassifier__alpha": np.logspace(-4, 2, 3)}, cv=3, scoring="neg_log_loss")
    search.fit(X, Y)
    assert search.best_params_["ifcompclassifier__alpha"] < 1
    calibrated = CalibratedClassifierCV(IFCompClassifier(epochs=30, lr=0.01), cv=3).fit(X, Y)
    assert calibrated.score(X, Y) > 0.9


def test_calibration_and_prediction_sets() -> None:
    images, labels = load_digits(return_X_y=True)
    names = np.array([f"digit {label}" for label in labels])
    model = IFCompClassifier(epochs=20, damping=0.01).fit(images[::3], names[::3])
    with pytest.raises(NotCalibratedError):
        model.predict_set(images[:5])
    assert model.calibrate(images[1::3], names[1::3]) is model
    new, truth = images[2::3], labels[2::3]
    inputs = torch.tensor((new - images[::3].mean(0)) / np.where(images[::3].std(0) > 0, images[::3].std(0), 1))
    np.testing.assert_allclose(model.predict_proba(new), model.ifc_.predict_proba(inputs), rtol=1e-9)
    sets = model.predict_set(new, coverage=0.9)
    assert sets.shape == (len(new), 10)
    assert sets[np.arange(len(new)), truth].mean() > 0.87
    model.set_params(alpha=0.0)
    logits = model.network_(inputs).detach().numpy()
    np.testing.assert_allclose(model.predict_proba(new), softmax(logits), rtol=1e-9)


def digits_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        image = nn.Unflatten(1, (1, 8, 8))
        return nn.Sequential(image, nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def test_a_trained_network_is_used_as_it_is() -> None:
    images, labels = load_digits(return_X_y=True)
    images, labels, network = images[:200], labels[:200], digits_network()
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    model = IFCompClassifier(network, damping=0.01).fit(images, labels)
    assert model.network_ is network
    assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())
    inputs = torch.tensor(images, dtype=torch.float32)
    ifc = IFComp(network, fisher="exact").fit([(inputs, torch.tensor(labels))])
    expected = ifc.predict_proba(inputs[:9], damping=0.01).numpy()
    np.testing.assert_allclose(model.predict_proba(images[:9]), expected, rtol=1e-5)
    with pytest.raises(LabelError, match="10 logits, but y has 4 classes"):
        IFCompClassifier(network).fit(images[labels < 4], labels[labels < 4])


def test_a_custom_network_is_trained() -> None:
    def make(features: int, classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, classes))

    model = IFCompClassifier(make, epochs=30, batch_size=len(X) - 1).fit(X, Y)  # a last batch of one example would fail
    assert isinstance(model.network_[1], nn.BatchNorm1d)
    assert model.score(X, Y) > 0.9


def test_the_result_depends_only_on_the_seed() -> None:
    torch.manual_seed(1)
    first = IFCompClassifier(random_state=3, **FAST).fit(X, Y).predict_proba(X)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    second = IFCompClassifier(random_state=3, **FAST).fit(X, Y).predict_proba(X)
    other = IFCompClassifier(random_state=4, **FAST).fit(X, Y).predict_proba(X)
    assert np.array_equal(first, second)
    assert not np.allclose(first, other)
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        *(({"epochs": 0}, "epochs"), ({"epochs": 1.5}, "epochs"), ({"batch_size": True}, "batch_size")),
        *(({"lr": -1.0}, "lr"), ({"alpha": float("nan")}, "alpha"), ({"beta": -1.0}, "beta")),
        *(({"damping": -1.0}, "damping"), ({"fisher": "none"}, "fisher"), ({"module": 3}, "module")),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingError, match=name):
        IFCompClassifier(**settings).fit(X, Y)


def test_wrong_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="one class only"):
        IFCompClassifier().fit(X, np.zeros(len(X)))
    model = IFCompClassifier(**FAST).fit(X, Y)
    with pytest.raises(LabelError, match=r"did not see: \[9\]"):
        model.table(X, np.full(len(X), 9))
    with pytest.raises(IfcompError, match="150 examples"):
        model.table(X, Y[:3])
