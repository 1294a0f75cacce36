"""`IFCompClassifier`: a scikit-learn classifier that predicts with the pNML distribution.

It trains a small network or uses a trained one, and works in pipelines, cross-validation, searches and calibration.
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
from ifcomp.errors import LabelError, NotFittedError, SettingError
from ifcomp.predictor import DEFAULT_DAMPING, IFComp
from ifcomp.scores import ScoreTable
from ifcomp.tasks.audit import LabelAudit

#: Batch size of fits and scores. Results do not depend on it.
_BATCH_SIZE = 1024


def multilayer_perceptron(features: int, classes: int) -> nn.Module:
    """Build the default network of `IFCompClassifier`: two hidden layers of 64 units with ReLU."""
    return nn.Sequential(*(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, classes))


class IFCompClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no type information
    """A neural network whose probabilities are the pNML distribution (eq. pnml_dist).

    Larger complexity and OOD score = more surprising; both are in nats.

    Example:
        >>> model = make_pipeline(SimpleImputer(), IFCompClassifier()).fit(X, y)
        >>> model.predict_proba(X_new)
        >>> model[-1].fit_ood(model[:-1].transform(X_held_out)).ood_score(model[:-1].transform(X_new))

    Attributes:
        classes_: Labels in the order of the columns of `predict_proba`.
        network_: Trained network; in float64 if trained by `fit`.
        ifc_: Fitted `IFComp`. Its inputs are standardised if the network was trained by `fit`.
        scaler_: Scaler of the features; None if a trained network was given.
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
        alpha: float | None = None,
        damping: Damping | None = None,
        fisher: FisherKind = "exact",
        keep_argmax: bool = True,
        random_state: int | np.random.RandomState | None = 0,
        verbose: bool = False,
    ) -> None:
        """Store the settings; `fit` checks them.

        Args:
            module: Function that builds a network from the numbers of features and classes; None is
                `multilayer_perceptron`. Or a trained network with logits in the order of the sorted labels: it is not
                trained further, and its inputs are not standardised.
            epochs: Number of training epochs.
            lr: Learning rate of AdamW.
            weight_decay: Weight decay of AdamW.
            batch_size: Largest number of examples per training step.
            beta: Inverse temperature of curvature and probabilities.
            alpha: Weight of an example relative to one training example in `predict_proba`; 0 gives the probabilities
                of the network at beta. None is the default of `IFComp.predict_proba`, and the calibrated alpha after
                `calibrate`. Held-out NLL (3 folds, default settings) at 0 and at None: iris 0.092 and 0.092, wine 0.071
                and 0.072, breast cancer 0.245 and 0.209, digits 0.291 and 0.230. Call `calibrate`, or search alpha on a
                wide grid by ``neg_log_loss``.
            damping: Damping of the curvature; None is the default of `IFComp`.
            fisher: Labels of the Fisher: "exact", "sampled" or "empirical".
            keep_argmax: Spread the added probability evenly over classes, so that `predict` keeps the argmax. False is
                the form of the paper.
            random_state: Seed of the initial weights, the order of the data and the sampled labels.
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
            y: Labels [N]: numbers, strings or booleans.
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
            self.network_ = self._train_network(torch.from_numpy(self.scaler_.transform(features)), labels, seed)
        damping = DEFAULT_DAMPING if self.damping is None else self.damping
        ifc = IFComp(self.network_, self.beta, fisher=self.fisher, seed=seed, damping=damping)
        factors = ifc.fit(_batches(self._inputs(features), labels), progress=self.verbose).factors
        if factors is not None and factors.num_classes != len(self.classes_):
            raise LabelError(
                f"The network has {factors.num_classes} logits, but y has {len(self.classes_)} classes. "
                "Give examples of exactly the classes of the network."
            )
        self.ifc_ = ifc
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """Return the pNML distribution over `classes_`, [N, K]; calibrated after `calibrate`, unless alpha is given."""
        inputs = self._validated_inputs(X)
        parts = [
            self.ifc_.predict_proba(part, self.alpha, keep_argmax=self.keep_argmax, damping=self.damping)
            for part in inputs.split(_BATCH_SIZE)
        ]
        return torch.cat(parts).cpu().numpy()

    def calibrate(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803
        """Choose temperature and alpha on held-out data, and the size of prediction sets; see `IFComp.calibrate`.

        `predict_proba` uses them if ``alpha`` is None.

        Args:
            X: Features [N, D] of examples that the network was not trained on.
            y: Their labels [N].
        """
        inputs = self._validated_inputs(X)
        labels = torch.tensor(self._codes(np.asarray(y), len(inputs)))
        self.ifc_.calibrate(_batches(inputs, labels), progress=self.verbose)
        return self

    def predict_set(self, X: ArrayLike, coverage: float = 0.95) -> NDArray[np.bool_]:  # noqa: N803
        """Return prediction sets over `classes_`, [N, K] booleans; see `IFComp.predict_set`. Needs `calibrate`."""
        parts = [self.ifc_.predict_set(part, coverage) for part in self._validated_inputs(X).split(_BATCH_SIZE)]
        return torch.cat(parts).cpu().numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """Return the most probable label, [N]."""
        indices = self.predict_proba(X).argmax(1)
        return np.asarray(self.classes_[indices])

    def complexity(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """Return the parametric complexity ``log(1 + E[IF] / n)`` in nats, [N]; larger = more surprising."""
        return self.table(X).column("parametric_complexity")

    def fit_ood(self, X: ArrayLike, tpr: float = 0.95) -> Self:  # noqa: N803
        """Build the OOD detector of `ood_score` from held-out features; see `IFComp.ood_detector`.

        Args:
            X: Features [N, D] of in-distribution examples that the network was not trained on.
            tpr: Share of them to accept.
        """
        self.ifc_.ood_detector(_batches(self._validated_inputs(X), None), tpr, progress=self.verbose)
        return self

    def ood_score(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """Return the score of the OOD detector in nats, [N]; larger = more surprising.

        ``self.ifc_.detector.threshold`` accepts the share ``tpr`` of held-out examples. Needs `fit_ood`.
        """
        inputs = self._validated_inputs(X)
        detector = self.ifc_.detector
        if detector is None:
            raise NotFittedError("OOD scores need held-out data: call fit_ood(X_held_out) first.")
        return torch.cat([detector.score(part) for part in inputs.split(_BATCH_SIZE)]).numpy()

    def table(self, X: ArrayLike, y: ArrayLike | None = None) -> ScoreTable:  # noqa: N803
        """Return all scores, one row per example, for the functions of `ifcomp.tasks`.

        Args:
            X: Features [N, D].
            y: Training labels [N], or None. Labels in the table are positions in `classes_`.
        """
        inputs = self._validated_inputs(X)
        labels = None if y is None else torch.tensor(self._codes(np.asarray(y), len(inputs)))
        return self.ifc_.score(_batches(inputs, labels), damping=self.damping, progress=self.verbose)

    def audit(self, X: ArrayLike, y: ArrayLike) -> LabelAudit:  # noqa: N803
        """Find wrong labels by `IFComp.audit`.

        Args:
            X: Features [N, D].
            y: Labels [N]. In the result, ``label`` and ``suggested`` are positions in `classes_`; ``label_name`` and
                ``suggested_name`` are the labels as texts.
        """
        inputs = self._validated_inputs(X)
        labels = torch.tensor(self._codes(np.asarray(y), len(inputs)))
        audit = self.ifc_.audit(_batches(inputs, labels), progress=self.verbose)
        return audit.with_names([str(label) for label in self.classes_])

    def _check_settings(self) -> None:
        FitSettings(self.beta, self.fisher)
        if self.damping is not None:
            check_damping(self.damping)
        for name in ("lr", "weight_decay", *(() if self.alpha is None else ("alpha",))):
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

    def _train_network(self, inputs: Tensor, labels: Tensor, seed: int) -> nn.Module:
        """Build a network and train it on standardised features [N, D] in float64."""
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            make = multilayer_perceptron if self.module is None else self.module
            network = make(inputs.shape[1], len(self.classes_)).double().train()
            optimizer = torch.optim.AdamW(network.parameters(), self.lr, weight_decay=self.weight_decay)
            steps = math.ceil(len(inputs) / self.batch_size)  # equal sizes avoid a last step with a single example
            for _ in range(self.epochs):
                for rows in torch.randperm(len(inputs)).tensor_split(steps):
                    optimizer.zero_grad()
                    F.cross_entropy(network(inputs[rows]), labels[rows]).backward()
                    optimizer.step()
        return network.eval()

    def _validated_inputs(self, X: ArrayLike) -> Tensor:  # noqa: N803
        check_is_fitted(self)
        return self._inputs(validate_data(self, X, dtype=np.float64, reset=False))

    def _inputs(self, features: NDArray[np.float64]) -> Tensor:
        """Return the inputs of the network, standardised if it was trained by `fit`, in the dtype of the network."""
        values = features if self.scaler_ is None else self.scaler_.transform(features)
        return torch.tensor(values, dtype=next(self.network_.parameters()).dtype)

    def _codes(self, y: NDArray[Any], size: int) -> NDArray[np.int64]:
        """Return the positions of labels in `classes_`."""
        if y.shape != (size,):
            raise LabelError(f"There are {size} examples, but the labels have shape {y.shape}.")
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise LabelError(f"y has labels that fit did not see: {unknown[:5]}. The known labels are {self.classes_}.")
        return np.searchsorted(self.classes_, y).astype(np.int64)


def _batches(inputs: Tensor, labels: Tensor | None) -> list[tuple[Tensor, ...]]:
    columns = [inputs] if labels is None else [inputs, labels]
    return list(zip(*(column.split(_BATCH_SIZE) for column in columns), strict=True))
