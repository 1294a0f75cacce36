"""State of a predictor: the model, its settings, and the fit with its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ifcomp.curvature.compatibility import check_factors, recorder_of_factors
from ifcomp.curvature.factors import Damping, Factors, FitSettings, check_damping
from ifcomp.curvature.health import with_health
from ifcomp.data.batches import Batch
from ifcomp.data.checks import check_not_shuffled, check_reiterable
from ifcomp.data.forms import Data, DataRequest, as_data, as_inputs, check_repeatable
from ifcomp.distributed import SAME_WEIGHTS, check_equal
from ifcomp.errors import EmptyDataError, ModelError, NotFittedError, SettingError
from ifcomp.fitting import fit_factors
from ifcomp.io.checkpoints import Checkpoint
from ifcomp.io.fingerprints import check_fingerprint, fingerprint, short_digest, tensor_checksums
from ifcomp.layers.coverage import Coverage
from ifcomp.layers.inventory import Inventory, take_inventory
from ifcomp.layers.layout import Layout
from ifcomp.layers.model_checks import listed
from ifcomp.layers.recorder import Recorder, working_dtype
from ifcomp.layers.registry import Selection
from ifcomp.layers.threads import exclusive
from ifcomp.layers.wrappers import unwrapped
from ifcomp.memory import as_bytes
from ifcomp.scoring import Evaluation, build_evaluation
from ifcomp.tasks.calibration_result import Calibration
from ifcomp.tasks.ood import OOD_DAMPING
from ifcomp.tasks.ood_rule import OODRule


class FittedState:
    """A model with its settings and, after a fit, factors and calibration.

    It checks that the weights are those of the fit, keeps the recorder and the inverse curvature, and can be pickled.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: FitSettings,
        damping: Damping,
        selection: Selection,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        """Inspect the model's layers. The model is not modified."""
        if not isinstance(model, nn.Module):
            raise ModelError(f"The model must be an nn.Module, but is a {type(model).__name__}.")
        self.model = model = unwrapped(model)
        self.settings = settings
        self.damping = check_damping(damping)
        self.collate_fn = collate_fn
        self.factors: Factors | None = None
        self._columns: tuple[str, ...] | None = None
        self._selection = selection
        with exclusive(model):
            self._inventory: Inventory = take_inventory(model, selection)
        self._inventory.select(selection.layers)  # raises if a pattern matches nothing
        self._recorder: Recorder | None = None
        self._fingerprint: dict[str, str] = {}
        self._layouts: Mapping[str, Layout] = {}
        self._probe: dict[str, Any] | None = None
        self._checksums: list[tuple[int, int, complex]] = []
        self._evaluated: Evaluation | None = None
        self._calibration: Calibration | None = None
        self._ood_rule: OODRule | None = None

    @property
    def beta(self) -> float:
        """Inverse temperature."""
        return self.settings.beta

    @property
    def coverage(self) -> Coverage:
        """The treatment of each parameter. After `fit` it includes the health of every layer (`FittedCoverage`)."""
        coverage = self._treatment
        return coverage if self.factors is None else with_health(coverage, self.factors, self.damping)

    @property
    def _treatment(self) -> Coverage:
        if self._recorder is not None:
            return self._recorder.inventory.coverage
        if self.factors is not None:
            return self._inventory.demote_to(self.factors.blocks).keep(self.factors.blocks).coverage
        return self._inventory.keep(self._inventory.select(self._selection.layers)).coverage

    @property
    def training_accuracy(self) -> float | None:
        """Accuracy of the model on the data of the fit, also after `load`; None before `fit` and without labels."""
        return None if self.factors is None else self.factors.training_accuracy

    @property
    def calibration(self) -> Calibration | None:
        """The latest result of `calibrate`, also after `load`; None before. `fit` removes it.

        A calibration can be assigned if it was made with the same model, fit and damping.
        """
        return self._calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        if calibration is not None:
            calibration.check_fit(self._calibration_identity)
        self._calibration = calibration

    def __getstate__(self) -> dict[str, Any]:
        """State for `pickle` and `copy.deepcopy`: the model, settings and results, not the recorder of its layers."""
        return {
            **self.__dict__,
            "_inventory": None,
            "_recorder": None,
            "_evaluated": None,
            "_scorer": None,
            "_checksums": [],
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore the state and inspect the layers. The first result after it compares weights and fingerprint."""
        self.__dict__.update(state)
        with exclusive(self.model):
            self._inventory = take_inventory(self.model, self._selection)

    def _data(self, data: Any) -> Data:
        """Turn any form of data into batches. A table has the columns of the fit."""
        return as_data(data, self._request)

    def _batch(self, x: Any, y: Any = None) -> Batch:
        """Convert the inputs of a call, and labels."""
        return as_inputs(x, y, self._request)

    @property
    def _request(self) -> DataRequest:
        return DataRequest(self.model, self.collate_fn, self._columns)

    @property
    def _calibration_identity(self) -> dict[str, Any]:
        """Settings of model and fit on which a calibration depends, as plain JSON."""
        return {**self._fit_identity(), "damping": repr(self.damping)}

    @property
    def _detector_identity(self) -> dict[str, Any]:
        """Settings of model and fit on which a detector depends, as plain JSON."""
        return {**self._fit_identity(), "damping": repr(OOD_DAMPING)}

    def _fit_identity(self) -> dict[str, Any]:
        factors = self._fitted
        return {
            "beta": self.beta,
            "model": short_digest(self._fingerprint),
            "fit": factors.digest(),
            "training_examples": factors.count,
        }

    def _evaluation(self, first: Batch, damping: Damping | None) -> Evaluation:
        """The recorded model and its inverse curvature. ``first`` verifies a model whose factors were loaded."""
        with exclusive(self.model):  # factors and recorder of one fit
            factors = self._fitted
            damping = self.damping if damping is None else check_damping(damping)
            if first.size == 0:
                raise EmptyDataError("There is no example to score: the inputs are empty.")
            if self._recorder is None:
                self._recorder = recorder_of_factors(self.model, self._inventory, factors, first, self._layouts)
            kept = self._evaluated
            fits = kept is not None and kept.recorder is self._recorder
            if kept is None or not fits or (kept.factors, kept.damping) != (factors, damping):
                self._evaluated = kept = build_evaluation(self._recorder, factors, damping)
            return kept

    @property
    def _fitted(self) -> Factors:
        if self.factors is None:
            raise NotFittedError("Nothing is fitted yet: call fit(train_loader) first, or IFComp.load(path, model).")
        with exclusive(self.model):
            checksums = tensor_checksums(self.model)
            if checksums != self._checksums:
                check_fingerprint(self._fingerprint, self.model, "The fitted factors")
                if [place for place, *_ in checksums] == [place for place, *_ in self._checksums]:
                    self._checksums = checksums  # values were rewritten but did not change
                    return self.factors
                self._receive(self.factors, self._fingerprint, self._layouts, "The fitted factors", "Fit again.")
            return self.factors

    def _receive(
        self, factors: Factors, fingerprint: dict[str, str], layouts: Mapping[str, Layout], what: str, advice: str
    ) -> None:
        """Check and adopt factors that were not fitted by this object."""
        complete = self._selection.layers is None
        check_factors(factors, self._inventory, working_dtype(self.model), complete, what, advice)
        self._recorder = None
        self._adopt(factors.to(next(self.model.parameters()).device), fingerprint, layouts)

    def _adopt(self, factors: Factors, fingerprint: dict[str, str], layouts: Mapping[str, Layout]) -> None:
        self.factors, self._fingerprint, self._layouts, self._evaluated = factors, fingerprint, layouts, None
        self._checksums = tensor_checksums(self.model)


def fit_together(
    predictors: Sequence[FittedState],
    data: Any,
    *,
    max_memory: int | str | None = None,
    checkpoint: Checkpoint | None = None,
    progress: bool | None = None,
) -> None:
    """Fit predictors of one model that differ in beta, Fisher or seed, in the same two passes over the data.

    Forward passes and input covariances are shared, so a grid of betas costs little more than its backward passes.

    Args:
        predictors: Predictors of the same model, with the same layers and ``sua``.
        data: As for `IFComp.fit`.
        max_memory: As for `IFComp.fit`, for all of them together.
        checkpoint: As for `IFComp.fit`.
        progress: Show a progress bar; None shows it on terminals.
    """
    lead = predictors[0]
    if any(other.model is not lead.model or other._selection != lead._selection for other in predictors):
        raise SettingError("Predictors that are fitted together must have the same model, layers= and sua=.")
    data = as_data(data, DataRequest(lead.model, lead.collate_fn))
    check_reiterable(data.batches, "fit reads the data twice")
    if checkpoint is not None:
        check_not_shuffled(data.batches)
    check_repeatable(data, in_order=checkpoint is not None)
    with exclusive(lead.model):
        inventory = take_inventory(lead.model, lead._selection)  # parameters may have been frozen since
        digests = fingerprint(lead.model)
    settings = [predictor.settings for predictor in predictors]
    check_equal("The settings", (settings, lead._selection), "Give all processes the same arguments.")
    check_equal("The weights", short_digest(digests), SAME_WEIGHTS)
    recorder, fits, probe = fit_factors(
        lead.model,
        inventory,
        lead._selection,
        settings,
        data.batches,
        fingerprint=short_digest(digests),
        limit=as_bytes(max_memory),
        checkpoint=checkpoint,
        progress=progress,
    )
    with exclusive(lead.model):
        _check_weights(digests, lead.model)
        for predictor, factors in zip(predictors, fits, strict=True):
            predictor._inventory, predictor._recorder, predictor._columns = inventory, recorder, data.columns
            predictor._adopt(factors, digests, recorder.layouts)
            predictor._probe = probe
            predictor._calibration = predictor._ood_rule = None


def _check_weights(before: Mapping[str, str], model: nn.Module) -> None:
    """Raise ModelError if the weights changed during a fit. Other buffers may be caches that grow."""
    after, weights = fingerprint(model), model.state_dict()
    changed = [name for name in after.keys() & weights.keys() if before.get(name) != after[name]]
    if changed:
        raise ModelError(
            f"The weights changed during the fit: {listed(sorted(changed))}. The factors would belong to two models. "
            "Do not train the model, or run it in train mode, while its data is read."
        )
