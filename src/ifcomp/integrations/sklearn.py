"""A classifier for scikit-learn: trains a small network, or takes a trained one, and predicts with pNML.

It goes where classifiers go: pipelines, cross-validation, searches, calibration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn import functional as F

from ifcomp.curvature.factors import Damping, FisherKind, FitSettings, check_damping, check_number
from ifcomp.errors import LabelError, SettingError
from ifcomp.predictor import IFComp
from ifcomp.scores import ScoreTable

#: Examples that go through the network together when it is scored; the result does not depend on it.
_SCORED_AT_ONCE = 1024


def multilayer_perceptron(features: int, classes: int) -> nn.Module:
    """Two hidden layers of 64 units with ReLU: what `IFCompClassifier` trains if it is given nothing else."""
    return nn.Sequential(*(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, classes))


class IFCompClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no type information
    """A neural network whose probabilities are the pNML distribution (eq. pnml_dist).

    Larger complexity and surprise = more surprising; complexity is in nats.

    Example:
        >>> model = make_pipeline(SimpleImputer(), IFCompClassifier()).fit(X, y)
        >>> model.predict_proba(X_new)
        >>> model[-1].surprise(model[:-1].transform(X_new))    # 1 = like a training example

    Attributes:
        classes_: The labels, in the order of the columns of `predict_proba`.
        network_: The trained network, in float64 unless it was given.
        ifc_: The fitted `IFComp`; its inputs are standardised if the network was trained here.
        scaler_: Standardises features, or None for a network that was given.
        n_features_in_: Number of features.
    """

    def __init__(
        self,
        module: Callable[[int, int], nn.Module] | nn.Module | None = None,
        *,
        epochs: int = 100,
        lr: float = 3e-3,
        weight_decay: float = 1e-4,
        batch_size: int = 64,
        beta: float = 1.0,
        alpha: float = 1e-4,
        damping: Damping | None = None,
        fisher: FisherKind = "exact",
        keep_argmax: bool = False,
        random_state: int | np.random.RandomState | None = 0,
        verbose: bool = False,
    ) -> None:
        """Keep the settings; they are checked by `fit`.

        Args:
            module: Makes a network from the number of features and of classes; None is `multilayer_perceptron`. Or a
                trained network, whose logits are in the order of the sorted labels: it is not trained further, and
                gets the features as they are.
            epochs: Passes over the data in training.
            lr: Learning rate of Adam.
            weight_decay: Decoupled weight decay (AdamW).
            batch_size: Most examples in a training step.
            beta: Inverse temperature of curvature and probabilities.
            alpha: Weight of an example beside a training example in `predict_proba`; 0 gives the network's own
                probabilities at beta. Search it on a wide grid by ``neg_log_loss``, such as ``np.logspace(-6, 0, 7)``:
                small data sets and large networks want little. Held-out NLL (3 folds, default settings) at 0 and at
                1e-4: iris 0.145 and 0.145, wine 0.045 and 0.047, breast cancer 0.269 and 0.199, digits 0.100 and 0.085.
            damping: How far the hindsight model may move; None is the default of `IFComp`.
            fisher: Labels that the curvature is estimated with: "exact", "sampled" or "empirical".
            keep_argmax: Spread the doubt evenly over classes, so that `predict` is the network's own class.
            random_state: Seed of initial weights, order of the data and sampled labels.
            verbose: Show progress bars of the curvature.
        """
        self.module = module
        self.epochs = epochs
        self.lr = lr
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.beta = beta
        self.alpha = alpha
        self.damping = damping
        self.fisher = fisher
        self.keep_argmax = keep_argmax
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803
        """Train the network, unless a trained one was given, and estimate its curvature.

        Args:
            X: Features [N, D].
            y: Labels [N] of any type that scikit-learn sorts: numbers, strings, booleans.
        """
        self._check_settings()
        features, targets = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(targets)
        self.classes_, codes = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class only, {self.classes_[0]!r}. Give examples of two classes or more.")
        seed = int(check_random_state(self.random_state).randint(2**31))
        labels = torch.tensor(codes, dtype=torch.long)
        if isinstance(self.module, nn.Module):
            self.scaler_, self.network_ = None, self.module
        else:
            self.scaler_ = StandardScaler().fit(features)
            self.network_ = self._trained(torch.from_numpy(self.scaler_.transform(features)), labels, seed)
        ifc = IFComp(self.network_, self.beta, fisher=self.fisher, seed=seed)
        factors = ifc.fit(_batches(self._inputs(features), labels), progress=self.verbose).factors
        if factors is not None and factors.num_classes != len(self.classes_):
            raise LabelError(
                f"The network has {factors.num_classes} logits, but y has {len(self.classes_)} classes. "
                "Give examples of every class that the network knows, and of no other."
            )
        self.ifc_ = ifc
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """The pNML distribution over `classes_`, [N, K]."""
        inputs = self._checked(X)
        parts = [
            self.ifc_.predict_proba(part, self.alpha, keep_argmax=self.keep_argmax, damping=self.damping)
            for part in inputs.split(_SCORED_AT_ONCE)
        ]
        return torch.cat(parts).cpu().numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """The most probable label of `predict_proba`, [N]."""
        indices = self.predict_proba(X).argmax(1)
        return np.asarray(self.classes_[indices])

    def complexity(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """Parametric complexity ``log(1 + E[IF] / n)`` in nats, [N]; larger = more surprising."""
        return self.table(X).column("parametric_complexity")

    def surprise(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """Expected influence over its mean on training data, [N]; 1 = like a training example, larger = stranger."""
        return self.table(X).column("surprise")

    def table(self, X: ArrayLike, y: ArrayLike | None = None) -> ScoreTable:  # noqa: N803
        """All scores, one row an example: what `ifcomp.tasks` works with, such as ``audit_labels``.

        Args:
            X: Features [N, D].
            y: Labels [N] that the network was trained on, or None. Labels in the table are positions in `classes_`.
        """
        inputs = self._checked(X)
        labels = None if y is None else torch.tensor(self._codes(np.asarray(y), len(inputs)))
        return self.ifc_.score(_batches(inputs, labels), damping=self.damping, progress=self.verbose)

    def _check_settings(self) -> None:
        FitSettings(self.beta, self.fisher)
        if self.damping is not None:
            check_damping(self.damping)
        for name in ("lr", "weight_decay", "alpha"):
            check_number(name, getattr(self, name))
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise SettingError(f"{name} must be a whole number of at least 1, but is {value!r}.")
        if self.module is not None and not callable(self.module):
            raise SettingError(
                "module must be a function (features, classes) -> nn.Module, a trained nn.Module, or None for a "
                f"multilayer perceptron, but is {self.module!r}."
            )

    def _trained(self, inputs: Tensor, labels: Tensor, seed: int) -> nn.Module:
        """A new network, trained on standardised features [N, D] in float64."""
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            make = multilayer_perceptron if self.module is None else self.module
            network = make(inputs.shape[1], len(self.classes_)).double().train()
            optimizer = torch.optim.AdamW(network.parameters(), self.lr, weight_decay=self.weight_decay)
            steps = math.ceil(len(inputs) / self.batch_size)  # of equal size: no step with a single example
            for _ in range(self.epochs):
                for rows in torch.randperm(len(inputs)).tensor_split(steps):
                    optimizer.zero_grad()
                    F.cross_entropy(network(inputs[rows]), labels[rows]).backward()
                    optimizer.step()
        return network.eval()

    def _checked(self, X: ArrayLike) -> Tensor:  # noqa: N803
        check_is_fitted(self)
        return self._inputs(validate_data(self, X, dtype=np.float64, reset=False))

    def _inputs(self, features: NDArray[np.float64]) -> Tensor:
        """What the network gets, in its own precision."""
        values = features if self.scaler_ is None else self.scaler_.transform(features)
        return torch.tensor(values, dtype=next(self.network_.parameters()).dtype)

    def _codes(self, y: NDArray[Any], size: int) -> NDArray[np.int64]:
        """Positions of labels in `classes_`."""
        if y.shape != (size,):
            raise LabelError(f"There are {size} examples, but the labels have shape {y.shape}.")
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise LabelError(f"y has labels that fit did not see: {unknown[:5]}. There are: {self.classes_}.")
        return np.searchsorted(self.classes_, y).astype(np.int64)


def _batches(inputs: Tensor, labels: Tensor | None) -> list[tuple[Tensor, ...]]:
    columns = [inputs] if labels is None else [inputs, labels]
    return list(zip(*(column.split(_SCORED_AT_ONCE) for column in columns), strict=True))
