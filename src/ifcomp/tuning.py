"""Selection of beta and alpha on held-out data.

All betas are fitted in the same two passes. Each beta then needs one influence pass over the held-out data; the search
over alpha reuses these arrays. Codelengths are in nats. Smaller NLL, ECE and Brier score are better; larger accuracy
and AUROC are better.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ifcomp.curvature.factors import Damping, check_number
from ifcomp.data.batches import as_batch, as_batches
from ifcomp.data.checks import check_label_form, check_labels, check_reiterable
from ifcomp.data.forms import Data, DataRequest, as_data
from ifcomp.errors import EmptyDataError, SettingError
from ifcomp.layers.forward import evaluating, run_model
from ifcomp.layers.wrappers import unwrapped
from ifcomp.predictor import DEFAULT_DAMPING, IFComp
from ifcomp.progress import track
from ifcomp.state import fit_together
from ifcomp.tasks.calibration import pnml_grid
from ifcomp.tasks.ood import OOD_DAMPING, ood_metrics
from ifcomp.tasks.simple_scores import fit_temperature

Objective = Literal["nll", "ece"]

#: Default alphas: 0 and a logarithmic grid with three values per decade. The best alpha depends on the number of
#: parameters and on the damping, so the grid is wide.
ALPHAS: tuple[float, ...] = (0.0, *(float(f"{alpha:.2g}") for alpha in np.logspace(-6, 2, 25)))

#: The default betas are 1 and these multiples of the fitted inverse temperature. pNML flattens the distribution, so the
#: best beta is larger than the fitted one: 1.2 to 1.3 times for three networks on digits with shifted validation data.
BETA_MULTIPLES = (1.0, 1.25, 1.6)

#: Default betas for out-of-distribution detection. Small values suit wide networks.
OOD_BETAS = (0.001, 0.1, 0.3, 0.66, 1.0, 2.0)

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


@dataclass(frozen=True, eq=False)
class OODChoice:
    """Fitted predictor and the best beta for out-of-distribution detection.

    Attributes:
        predictor: Predictor fitted at ``beta``, with the damping of the search.
        beta: Selected inverse temperature.
        rule: Selection rule: "auroc" with out-of-distribution validation data, "codelength" without.
        frame: Values behind the selection. For "auroc" one row per ``beta`` with the fields of `OODMetrics`; for
            "codelength" the frame of `Tuned`.
    """

    predictor: IFComp
    beta: float
    rule: Literal["auroc", "codelength"]
    frame: pd.DataFrame


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
    validation: Any,
    *,
    betas: Sequence[float] | None = None,
    alphas: Sequence[float] = ALPHAS,
    damping: Damping = DEFAULT_DAMPING,
    objective: Objective = "nll",
    keep_argmax: bool = False,
    shifted: Any = None,
    progress: bool | None = None,
    **settings: Any,
) -> Tuned:
    """Select the beta and alpha whose pNML distribution (eq. pnml_dist) is best on held-out data.

    The model itself (``beta=1``, ``alpha=0``) is always a candidate. The cost per beta is one fit and one influence
    pass over the held-out data.

    Args:
        model: Classifier.
        train: Training data of the model.
        validation: Held-out data with labels.
        betas: Inverse temperatures; 1 is added. None uses `BETA_MULTIPLES` of the fitted inverse temperature.
        alphas: Weights to try; 0 is added.
        damping: Damping of all predictors.
        objective: "nll" selects the smallest held-out NLL. "ece" selects the smallest ECE among settings that keep the
            held-out accuracy of the model (`ACCURACY_TOLERANCE`), because inaccurate predictions can have a small ECE.
        keep_argmax: Select among the distributions that keep the predicted class. The frame contains both forms.
        shifted: Additional held-out data with labels, shifted as test data may be. It is pooled with ``validation``.
        progress: Show progress bars; None shows them on terminals.
        **settings: Settings of `IFComp`, as in `fit_grid`.
    """
    if objective not in ("nll", "ece"):
        raise SettingError(f"objective must be 'nll' or 'ece', but is {objective!r}.")
    alphas = _checked_grid("alphas", alphas, 0.0)
    betas = None if betas is None else _checked_grid("betas", betas, 1.0)
    parts = [validation] if shifted is None else [validation, shifted]
    IFComp(model, damping=damping, **settings)  # validates the settings before the first pass
    train, held_out = _read(model, train, parts, settings)
    logits, labels = _logits_and_labels(model, held_out, progress)
    inverse = 1 / fit_temperature(logits, labels)
    betas = betas or _checked_grid("betas", [float(f"{inverse * multiple:.3g}") for multiple in BETA_MULTIPLES], 1.0)
    predictors = fit_grid(model, betas, train, progress=progress, damping=damping, **settings)
    grids = []
    for predictor in predictors:
        assert predictor.factors is not None
        influence = torch.cat([predictor.influence(batch).cpu() for batch in _batches(held_out, "influence", progress)])
        probability = torch.softmax(predictor.beta * logits, 1)
        grid = pnml_grid(probability, influence, labels, predictor.factors.count, alphas)
        grid.insert(0, "beta", predictor.beta)
        grids.append(grid)
    frame = pd.concat(grids, ignore_index=True)
    frame["allowed"] = frame["keep_argmax"] == keep_argmax
    if objective == "ece":
        frame["allowed"] &= frame["accuracy"] >= frame["accuracy"][0] - ACCURACY_TOLERANCE
    chosen = int(frame.loc[frame["allowed"], objective].idxmin())
    beta, alpha = float(frame["beta"][chosen]), float(frame["alpha"][chosen])
    return Tuned(predictors[betas.index(beta)], beta, alpha, keep_argmax, frame, chosen, inverse)


def choose_ood_beta(
    model: nn.Module,
    train: Any,
    in_validation: Any,
    out_validation: Any = None,
    betas: Sequence[float] | None = None,
    damping: Damping = OOD_DAMPING,
    *,
    probes: int | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> OODChoice:
    """Select the beta whose bounded complexity best separates in-distribution from OOD inputs, by AUROC.

    Args:
        model: Classifier.
        train: Training data of the model.
        in_validation: Held-out in-distribution data. Its labels are used only without ``out_validation``.
        out_validation: OOD inputs, of other kinds than those of the test data; labels are ignored. None selects beta by
            held-out codelength instead.
        betas: Inverse temperatures. None uses `OOD_BETAS`, or the default of `tune` without ``out_validation``.
        damping: Damping of all predictors.
        probes: Score with parametric complexity, estimated from this number of probes, instead of bounded complexity.
        progress: Show progress bars; None shows them on terminals.
        **settings: Settings of `IFComp`, as in `fit_grid`.
    """
    if out_validation is None:
        tuned = tune(
            model,
            train,
            in_validation,
            betas=betas,
            damping=damping,
            objective="nll",
            progress=progress,
            **settings,
        )
        return OODChoice(tuned.predictor, tuned.beta, "codelength", tuned.frame)
    betas = _checked_grid("betas", OOD_BETAS if betas is None else betas)
    train, (in_validation, out_validation) = _read(model, train, [in_validation, out_validation], settings)
    _check_reiterable([in_validation, out_validation])
    predictors = fit_grid(model, betas, train, progress=progress, damping=damping, **settings)
    rows = []

    def complexity(predictor: IFComp, x: Any) -> Tensor:
        return predictor.bounded_complexity(x) if probes is None else predictor.parametric_complexity(x, probes=probes)

    for predictor in predictors:
        inside, outside = (
            torch.cat([complexity(predictor, batch).cpu() for batch in _batches([data], "complexity", progress)])
            for data in (in_validation, out_validation)
        )
        rows.append({"beta": predictor.beta, **vars(ood_metrics(inside, outside))})
    frame = pd.DataFrame(rows)
    best = int(np.argmax(frame["auroc"]))
    return OODChoice(predictors[best], betas[best], "auroc", frame)


def _checked_grid(name: str, values: Sequence[float], first: float | None = None) -> list[float]:
    """Return the distinct values with ``first`` at the front; raise SettingError for a negative or invalid number."""
    for value in values:
        check_number(f"Each of {name}", value)
    grid = list(dict.fromkeys([*([] if first is None else [first]), *map(float, values)]))
    if not grid:
        raise SettingError(f"{name} must have at least one value, but is empty.")
    return grid


def _read(
    model: nn.Module, train: Any, parts: Sequence[Any], settings: Mapping[str, Any]
) -> tuple[Data, list[Iterable[Any]]]:
    """Return the training data, and the batches of held-out parts. Tables have the columns of the training data."""
    request = DataRequest(unwrapped(model), settings.get("collate_fn"))
    data = as_data(train, request)
    request = replace(request, columns=data.columns)
    return data, [as_data(part, request).batches for part in parts]


def _check_reiterable(parts: Iterable[Iterable[Any]]) -> None:
    for data in parts:
        check_reiterable(data, "Held-out data is read once per beta")


def _batches(parts: Iterable[Iterable[Any]], description: str, progress: bool | None) -> Iterator[Any]:
    """Yield the non-empty batches of all parts."""
    for data in parts:
        yield from (batch for batch in track(data, description, progress) if as_batch(batch).size)


def _logits_and_labels(
    model: nn.Module, parts: Sequence[Iterable[Any]], progress: bool | None
) -> tuple[Tensor, Tensor]:
    """Return the logits [N, K] in float64 and the labels [N] of all parts."""
    _check_reiterable(parts)
    all_logits, all_labels = [], []
    device = next(model.parameters()).device
    for batch in as_batches(_batches(parts, "logits", progress)):
        check_label_form(batch)
        with torch.no_grad(), evaluating(model):
            logits = run_model(model, batch.to(device)).cpu().double()
        all_logits.append(logits)
        all_labels.append(check_labels(batch, logits.shape[1]).cpu())
    if not all_logits:
        raise EmptyDataError("Tuning needs at least one held-out example, but the data is empty.")
    return torch.cat(all_logits), torch.cat(all_labels)
