"""Choose beta and alpha on held-out data: one fit and one influence pass for each beta, everything else from arrays.

Codelengths are in nats. Of NLL, ECE and Brier score smaller is better; of accuracy and AUROC larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ifcomp.curvature.factors import Damping, check_number
from ifcomp.data.batches import as_batch, as_batches
from ifcomp.data.checks import check_data, check_labels
from ifcomp.errors import DataError, EmptyDataError, SettingError
from ifcomp.layers.forward import evaluating, run_model
from ifcomp.predictor import DEFAULT_DAMPING, IFComp, fit_together
from ifcomp.progress import track
from ifcomp.tasks.calibration import fitted_inverse_temperature, pnml_grid
from ifcomp.tasks.ood import OOD_DAMPING, ood_metrics

Objective = Literal["nll", "ece"]

#: A wide logarithmic grid, three to a decade: the scale of alpha depends on the number of parameters and on damping.
ALPHAS: tuple[float, ...] = (0.0, *(float(f"{alpha:.2g}") for alpha in np.logspace(-6, 2, 25)))

#: The default betas are 1 and these multiples of the fitted inverse temperature. pNML adds doubt, so the best beta lies
#: above the fitted one: at 1.2 to 1.3 times it for three networks on digits with shifted validation data, never below.
BETA_MULTIPLES = (1.0, 1.25, 1.6)

#: For out-of-distribution detection: from nearly the uniform limit, which suits wide networks, to a confident one.
OOD_BETAS = (0.001, 0.1, 0.3, 0.66, 1.0, 2.0)

#: How far held-out accuracy may fall below the model's own where accuracy is held: not by a single example.
ACCURACY_TOLERANCE = 0.0


@dataclass(frozen=True, eq=False)
class Tuned:
    """A fitted predictor with the settings that were best on held-out data.

    Attributes:
        predictor: Fitted at ``beta``, with the damping of the search.
        beta: Inverse temperature.
        alpha: Weight of an example beside a training example.
        keep_argmax: Whether the variant that never changes the predicted class was asked for.
        frame: Every combination: ``beta``, ``alpha``, ``keep_argmax``, ``nll``, ``ece``, ``accuracy``, ``brier``, and
            ``allowed``, whether it could have been chosen. The first row is the model itself.
        chosen: The row of the frame that was chosen.
        inverse_temperature: That of plain temperature scaling with the smallest held-out NLL.
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
        """Held-out NLL of the chosen settings in nats: with the objective "nll" never above ``base_nll``."""
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
        """The pNML distribution of inputs with the chosen settings, [B, K]."""
        return self.predictor.predict_proba(x, self.alpha, keep_argmax=self.keep_argmax)


@dataclass(frozen=True, eq=False)
class OODChoice:
    """A fitted predictor with the beta that was best for out-of-distribution detection.

    Attributes:
        predictor: Fitted at ``beta``, with the damping of the search.
        beta: Inverse temperature.
        rule: "auroc" on out-of-distribution validation data; "codelength" where there was none.
        frame: What it was chosen by: for each ``beta`` the fields of `OODMetrics`, or the frame of `Tuned`.
    """

    predictor: IFComp
    beta: float
    rule: Literal["auroc", "codelength"]
    frame: pd.DataFrame


def fit_grid(
    model: nn.Module, betas: Sequence[float], data: Iterable[Any], *, progress: bool | None = None, **settings: Any
) -> list[IFComp]:
    """A predictor for each beta, fitted on the same data in the same two passes.

    Args:
        model: The classifier.
        betas: Inverse temperatures.
        data: Training data, as for `IFComp.fit`.
        progress: Show a progress bar; None shows it on terminals.
        **settings: Of `IFComp`. Here ``fisher`` is "exact" unless said otherwise: differences between betas should not
            be those between label samples.
    """
    predictors = [IFComp(model, beta, **{"fisher": "exact", **settings}) for beta in betas]
    fit_together(predictors, data, progress=progress)
    return predictors


def tune(
    model: nn.Module,
    train: Iterable[Any],
    validation: Iterable[Any],
    *,
    betas: Sequence[float] | None = None,
    alphas: Sequence[float] = ALPHAS,
    damping: Damping = DEFAULT_DAMPING,
    objective: Objective = "nll",
    keep_argmax: bool = False,
    shifted: Iterable[Any] | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Tuned:
    """The beta and alpha whose pNML distribution (eq. pnml_dist) is best on held-out data.

    ``beta=1`` with ``alpha=0``, the model itself, is always among the candidates. Cost: for each beta a fit, and an
    influence pass over the held-out data.

    Args:
        model: The classifier.
        train: The data it was trained on.
        validation: Held-out data with labels, which the model was not trained on.
        betas: Inverse temperatures; 1 is added. None takes `BETA_MULTIPLES` of the fitted one.
        alphas: Weights to try; 0 is added.
        damping: For all of them.
        objective: "nll" takes the smallest held-out NLL. "ece" takes the smallest ECE among settings with at least the
            model's held-out accuracy (`ACCURACY_TOLERANCE`), because bad predictions can make ECE small.
        keep_argmax: Choose from the variant that never changes the predicted class. The frame has both.
        shifted: More held-out data with labels, altered as test data may be; counts like ``validation``.
        progress: Show progress bars; None shows them on terminals.
        **settings: Of `IFComp`, as in `fit_grid`.
    """
    if objective not in ("nll", "ece"):
        raise SettingError(f"objective must be 'nll' or 'ece', but is {objective!r}.")
    alphas = _with("alphas", alphas, 0.0)
    betas = None if betas is None else _with("betas", betas, 1.0)
    held_out = [validation] if shifted is None else [validation, shifted]
    IFComp(model, damping=damping, **settings)  # refuses what cannot be used before anything is computed
    logits, labels = _logits_and_labels(model, held_out, progress)
    inverse = fitted_inverse_temperature(logits, labels)
    betas = betas or _with("betas", [float(f"{inverse * multiple:.3g}") for multiple in BETA_MULTIPLES], 1.0)
    predictors = fit_grid(model, betas, train, progress=progress, damping=damping, **settings)
    grids = []
    for predictor in predictors:
        assert predictor.factors is not None
        influence = torch.cat([predictor.influence(item).cpu() for item in _items(held_out, "influence", progress)])
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


def fit_auto(model: nn.Module, train: Iterable[Any], held_out: Iterable[Any], **settings: Any) -> Tuned:
    """The automatic rule: the beta and alpha with the shortest held-out pNML codelength, ``sum -log pNML(y|x)``.

    It needs no out-of-distribution data.

    Args:
        model: The classifier.
        train: The data it was trained on.
        held_out: Data with labels, which it was not trained on.
        **settings: Of `tune`, but for the objective.
    """
    return tune(model, train, held_out, **settings, objective="nll")


def choose_ood_beta(
    model: nn.Module,
    train: Iterable[Any],
    in_validation: Iterable[Any],
    out_validation: Iterable[Any] | None = None,
    betas: Sequence[float] | None = None,
    damping: Damping = OOD_DAMPING,
    *,
    probes: int | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> OODChoice:
    """The beta whose bounded complexity has the largest AUROC of out-of-distribution against other inputs.

    Args:
        model: The classifier.
        train: The data it was trained on.
        in_validation: Held-out data like it; labels are only used without ``out_validation``.
        out_validation: Inputs from elsewhere, of other kinds than those to be detected later; labels are not used.
            Without it the automatic rule (`fit_auto`) chooses.
        betas: Inverse temperatures; None takes `OOD_BETAS`, or for the automatic rule what `tune` takes.
        damping: For all of them.
        probes: Take parametric complexity instead, estimated from so many random directions.
        progress: Show progress bars; None shows them on terminals.
        **settings: Of `IFComp`, as in `fit_grid`.
    """
    if out_validation is None:
        tuned = fit_auto(model, train, in_validation, betas=betas, damping=damping, progress=progress, **settings)
        return OODChoice(tuned.predictor, tuned.beta, "codelength", tuned.frame)
    betas = _with("betas", OOD_BETAS if betas is None else betas)
    _check_reiterable([in_validation, out_validation])
    predictors = fit_grid(model, betas, train, progress=progress, damping=damping, **settings)
    rows = []

    def complexity(predictor: IFComp, x: Any) -> Tensor:
        return predictor.bounded_complexity(x) if probes is None else predictor.parametric_complexity(x, probes=probes)

    for predictor in predictors:
        inside, outside = (
            torch.cat([complexity(predictor, item).cpu() for item in items])
            for items in (_items([data], "complexity", progress) for data in (in_validation, out_validation))
        )
        rows.append({"beta": predictor.beta, **vars(ood_metrics(inside, outside))})
    frame = pd.DataFrame(rows)
    best = int(np.argmax(frame["auroc"]))
    return OODChoice(predictors[best], betas[best], "auroc", frame)


def _with(name: str, values: Sequence[float], first: float | None = None) -> list[float]:
    """The values without repetition, ``first`` at the front; an error if one is not a number of at least 0."""
    for value in values:
        check_number(f"Each of {name}", value)
    chosen = list(dict.fromkeys([*([] if first is None else [first]), *map(float, values)]))
    if not chosen:
        raise SettingError(f"{name} must have at least one value, but is empty.")
    return chosen


def _check_reiterable(parts: Iterable[Iterable[Any]]) -> None:
    for data in parts:
        check_data(data)
        if isinstance(data, Iterator):
            raise DataError(
                "Held-out data is used once for each beta, but is an iterator that is exhausted after one pass. "
                "Give a DataLoader, a list of batches, or an object whose __iter__ starts anew."
            )


def _items(parts: Iterable[Iterable[Any]], description: str, progress: bool | None) -> Iterator[Any]:
    """The batches of all parts that have examples, as they were given."""
    for data in parts:
        yield from (item for item in track(data, description, progress) if as_batch(item).size)


def _logits_and_labels(
    model: nn.Module, parts: Sequence[Iterable[Any]], progress: bool | None
) -> tuple[Tensor, Tensor]:
    """Logits [N, K] in float64 and labels [N] of all parts."""
    _check_reiterable(parts)
    found = []
    with torch.no_grad(), evaluating(model):
        device = next(model.parameters()).device
        for batch in as_batches(_items(parts, "logits", progress)):
            logits = run_model(model, batch.to(device)).double().cpu()
            found.append((logits, check_labels(batch, logits.shape[1])))
    if not found:
        raise EmptyDataError("Tuning needs at least one held-out example, but the data is empty.")
    return torch.cat([logits for logits, _ in found]), torch.cat([labels.cpu() for _, labels in found])
