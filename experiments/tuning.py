"""Selection of beta and alpha on held-out data by refitting at every beta, for comparison with `IFComp.calibrate`.

All betas are fitted in the same two passes. Each beta then needs one influence pass over the held-out data; the search
over alpha reuses these arrays. Codelengths are in nats. Smaller NLL, ECE and Brier score are better; larger accuracy is
better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ifcomp import IFComp
from ifcomp.curvature.factors import Damping
from ifcomp.predictor import DEFAULT_DAMPING
from ifcomp.state import fit_together
from ifcomp.tasks.calibration import pnml_grid
from ifcomp.tasks.simple_scores import fit_temperature

Objective = Literal["nll", "ece"]

#: Default alphas: 0 and a logarithmic grid with three values per decade. The best alpha depends on the number of
#: parameters and on the damping, so the grid is wide.
ALPHAS: tuple[float, ...] = (0.0, *(float(f"{alpha:.2g}") for alpha in np.logspace(-6, 2, 25)))

#: The default betas are 1 and these multiples of the fitted inverse temperature. pNML flattens the distribution, so the
#: best beta is larger than the fitted one: 1.2 to 1.3 times for three networks on digits with shifted validation data.
BETA_MULTIPLES = (1.0, 1.25, 1.6)

#: Largest allowed loss of held-out accuracy with ``objective="ece"``, relative to the model.
ACCURACY_TOLERANCE = 0.0


@dataclass(frozen=True, eq=False)
class Tuned:
    """Fitted predictor and the best settings on held-out data.

    Attributes:
        predictor: Predictor fitted at ``beta``, with the damping of the search.
        beta: Selected inverse temperature.
        alpha: Selected weight of an example relative to one training example.
        keep_argmax: Whether the selection was restricted to the form that keeps the predicted class.
        frame: One row per combination: ``beta``, ``alpha``, ``keep_argmax``, ``nll``, ``ece``, ``accuracy``, ``brier``,
            and ``allowed``, which marks the candidates of the selection. The first row is the model itself.
        chosen: Index of the selected row.
        inverse_temperature: Inverse temperature of plain temperature scaling with the smallest held-out NLL.
    """

    predictor: IFComp
    beta: float
    alpha: float
    keep_argmax: bool
    frame: pd.DataFrame
    chosen: int
    inverse_temperature: float

    @property
    def nll(self) -> float:
        """Held-out NLL of the selected settings in nats. With ``objective="nll"`` it is at most ``base_nll``."""
        return float(self.frame["nll"][self.chosen])

    @property
    def base_nll(self) -> float:
        """Held-out NLL of the model itself in nats."""
        return float(self.frame["nll"][0])

    @property
    def base_ece(self) -> float:
        """Held-out ECE of the model itself."""
        return float(self.frame["ece"][0])

    @property
    def base_accuracy(self) -> float:
        """Held-out accuracy of the model itself."""
        return float(self.frame["accuracy"][0])

    def predict_proba(self, x: Any) -> Tensor:
        """Return the pNML distribution of inputs with the selected settings, [B, K]."""
        return self.predictor.predict_proba(x, self.alpha, keep_argmax=self.keep_argmax)


def fit_grid(
    model: nn.Module, betas: Sequence[float], data: Any, *, progress: bool | None = None, **settings: Any
) -> list[IFComp]:
    """Fit one predictor per beta in the same two passes over the data.

    Args:
        model: Classifier.
        betas: Inverse temperatures.
        data: Training data, as for `IFComp.fit`.
        progress: Show a progress bar; None shows it on terminals.
        **settings: Settings of `IFComp`. The default of ``fisher`` is "exact" here, so that betas do not differ by
            their label samples.
    """
    predictors = [IFComp(model, beta, **{"fisher": "exact", **settings}) for beta in betas]
    fit_together(predictors, data, progress=progress)
    return predictors


def tune(
    model: nn.Module,
    train: Any,
    validation: Iterable[tuple[Tensor, Tensor]],
    *,
    betas: Sequence[float] | None = None,
    alphas: Sequence[float] = ALPHAS,
    damping: Damping = DEFAULT_DAMPING,
    objective: Objective = "nll",
    keep_argmax: bool = False,
    shifted: Iterable[tuple[Tensor, Tensor]] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Tuned:
    """Select the beta and alpha whose pNML distribution (eq. pnml_dist) is best on held-out data.

    The model itself (``beta=1``, ``alpha=0``) is always a candidate. The cost per beta is one fit and one influence
    pass over the held-out data.

    Args:
        model: Classifier in eval mode.
        train: Training data of the model.
        validation: Held-out batches ``(x, y)``.
        betas: Inverse temperatures; 1 is added. None uses `BETA_MULTIPLES` of the fitted inverse temperature.
        alphas: Weights to try; 0 is added.
        damping: Damping of all predictors.
        objective: "nll" selects the smallest held-out NLL. "ece" selects the smallest ECE among settings that keep the
            held-out accuracy of the model (`ACCURACY_TOLERANCE`), because inaccurate predictions can have a small ECE.
        keep_argmax: Select among the distributions that keep the predicted class. The frame contains both forms.
        shifted: Additional held-out batches, shifted as test data may be. They are pooled with ``validation``.
        progress: Show progress bars; None shows them on terminals.
        **settings: Settings of `IFComp`, as in `fit_grid`.
    """
    held_out = [*validation, *shifted]
    with torch.no_grad():
        logits = torch.cat([model(x).double() for x, _ in held_out])
    labels = torch.cat([y for _, y in held_out])
    inverse = 1 / fit_temperature(logits, labels)
    betas = _grid(betas or [float(f"{inverse * multiple:.3g}") for multiple in BETA_MULTIPLES], 1.0)
    predictors = fit_grid(model, betas, train, progress=progress, damping=damping, **settings)
    grids = []
    for predictor in predictors:
        assert predictor.factors is not None
        influence = torch.cat([predictor.influence(x) for x, _ in held_out])
        probability = torch.softmax(predictor.beta * logits, 1)
        grid = pnml_grid(probability, influence, labels, predictor.factors.count, _grid(alphas, 0.0))
        grid.insert(0, "beta", predictor.beta)
        grids.append(grid)
    frame = pd.concat(grids, ignore_index=True)
    frame["allowed"] = frame["keep_argmax"] == keep_argmax
    if objective == "ece":
        frame["allowed"] &= frame["accuracy"] >= frame["accuracy"][0] - ACCURACY_TOLERANCE
    chosen = int(frame.loc[frame["allowed"], objective].idxmin())
    beta, alpha = float(frame["beta"][chosen]), float(frame["alpha"][chosen])
    return Tuned(predictors[betas.index(beta)], beta, alpha, keep_argmax, frame, chosen, inverse)


def _grid(values: Sequence[float], first: float) -> list[float]:
    """Return the distinct values with ``first`` at the front."""
    return list(dict.fromkeys([first, *map(float, values)]))
