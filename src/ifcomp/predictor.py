"""`IFComp`: the public object. It validates, delegates and keeps state."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, Self

import pandas as pd
import torch
from torch import Tensor, nn

from ifcomp._version import __version__
from ifcomp.curvature.compatibility import check_factors, recorder_of_factors
from ifcomp.curvature.factors import (
    Damping,
    Factors,
    FisherKind,
    FitSettings,
    Relative,
    check_damping,
    check_number,
)
from ifcomp.curvature.health import with_health
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import (
    check_audit_order,
    check_label_form,
    check_labelled,
    check_labels,
    check_not_shuffled,
    check_reiterable,
    warn_if_shuffled,
)
from ifcomp.data.forms import Data, DataRequest, as_data, as_inputs, check_repeatable
from ifcomp.data.loaders import explain_dead_workers
from ifcomp.data.selection import select_examples
from ifcomp.detection import FEW_HELD_OUT, MIN_HELD_OUT, MemberScorer, OODDetector
from ifcomp.distributed import gather_rows, process_info, shard_batches
from ifcomp.errors import (
    DataError,
    EmptyDataError,
    IfcompWarning,
    ModelError,
    NotCalibratedError,
    NotFittedError,
    SettingError,
    StorageError,
)
from ifcomp.evidence.collection import collect_evidence
from ifcomp.evidence.features import FeatureReader, all_trainable
from ifcomp.explanation import Explanation, explain
from ifcomp.fitting import fit_factors
from ifcomp.io import factor_files
from ifcomp.io.checkpoints import Checkpoint
from ifcomp.io.fingerprints import check_fingerprint, fingerprint, short_digest, tensor_checksums
from ifcomp.io.resumable import NO_CHECKPOINT
from ifcomp.layers.coverage import Coverage
from ifcomp.layers.inventory import take_inventory
from ifcomp.layers.layout import Layout
from ifcomp.layers.recorder import Recorder, working_dtype
from ifcomp.layers.registry import Selection, Sua
from ifcomp.layers.threads import exclusive
from ifcomp.layers.verification import verified_recorder
from ifcomp.layers.wrappers import unwrapped
from ifcomp.memory import as_bytes
from ifcomp.precision import double_device
from ifcomp.prediction import DEFAULT_ADDED_PROBABILITY, alpha_of_added_probability, distributions
from ifcomp.progress import known_length, track
from ifcomp.scores import ScoreTable
from ifcomp.scoring import (
    ROW_BYTES,
    ROWS,
    Evaluation,
    ScoreOptions,
    build_evaluation,
    evaluate,
    label_influence,
    logit_kernel,
    score_columns,
    score_key,
)
from ifcomp.tasks.audit import AUDIT_DAMPING, EXAMPLES_PER_SIDE, MAX_EXPLAINED, LabelAudit, audit_evidence
from ifcomp.tasks.calibration_result import Calibration
from ifcomp.tasks.ood import OOD_DAMPING, check_members, ood_threshold
from ifcomp.tasks.ood_rule import OODRule

#: Safe on small and large networks; OOD detection prefers far smaller values.
DEFAULT_DAMPING = Relative(0.1)


class IFComp:
    """Boltzmann influence, pNML distribution and stochastic complexity of a trained classifier.

    Larger scores are more surprising and more suspicious. Codelengths are in nats. Tensors are returned in float64: on
    the model's device if the model is in float64, otherwise on the CPU, because a device may lack float64.

    Example:
        >>> ifc = IFComp(model).fit(train_loader)
        >>> ifc.calibrate(held_out_loader)            # temperature and alpha of predictions
        >>> ifc.predict_proba(x)                      # calibrated distribution, [B, K]
        >>> ifc.predict_set(x, coverage=0.95)         # prediction sets, [B, K] booleans
        >>> gate = ifc.ood_detector(held_out_loader)  # detector of inputs unlike the training data
        >>> gate.predict(x)                           # [B] booleans
        >>> ifc.stochastic_complexity(x, y)           # suspicion of labels, [B], nats
        >>> ifc.parametric_complexity(x)              # unfamiliarity of inputs, [B], nats
        >>> ifc.bounded_complexity(x)                 # the same between 0 and log K
    """

    def __init__(
        self,
        model: nn.Module,
        beta: float = 1.0,
        *,
        layers: str | list[str] | tuple[str, ...] | None = None,
        damping: Damping = DEFAULT_DAMPING,
        sua: Sua = "auto",
        fisher: FisherKind = "sampled",
        label_samples: int = 1,
        seed: int = 0,
        skip_uncovered: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Inspect the model's layers. The model is not modified.

        Args:
            model: Returns logits [B, K], or an object with ``.logits``. Wrappers of ``torch.compile``, ``DataParallel``
                and ``DistributedDataParallel`` are removed.
            beta: Inverse temperature; 1 is the ordinary influence function, 0 the limit of a uniform distribution.
            layers: None covers all layers; ``"last"`` the last weight layer; or names and shell-style patterns.
            damping: Added to the curvature before it is inverted. Larger damping keeps the hindsight model closer to
                the trained model. A float is absolute in beta-free units (the paper's delta over beta squared);
                ``Relative(0.1)`` is a multiple of each layer's mean. Every scoring call can override it.
            sua: Share one input basis over the offsets of a convolution kernel: True, False, or "auto" for wide layers.
            fisher: "sampled" labels from the model, "exact" expectation over all labels, or "empirical" labels of
                the data.
            label_samples: Number of labels drawn per example and pass.
            seed: Seed of the label samples and probes.
            skip_uncovered: Leave out parameters that cannot be covered instead of raising.
            collate_fn: Builds a batch from a list of examples of a Dataset, such as ``DataCollatorWithPadding`` of
                transformers. None stacks the examples. A DataLoader has its own. It is not saved; set the attribute
                after `load`.
        """
        if not isinstance(model, nn.Module):
            raise ModelError(f"The model must be an nn.Module, but is a {type(model).__name__}.")
        self.model = model = unwrapped(model)
        self.settings = FitSettings(beta, fisher, label_samples, seed)
        self.damping = check_damping(damping)
        self.collate_fn = collate_fn
        self.factors: Factors | None = None
        self._columns: tuple[str, ...] | None = None
        self._selection = Selection(tuple(layers) if isinstance(layers, list) else layers, sua, skip_uncovered)
        with exclusive(model):
            self._inventory = take_inventory(model, self._selection)
        self._inventory.select(self._selection.layers)  # raises if a pattern matches nothing
        self._recorder: Recorder | None = None
        self._fingerprint: dict[str, str] = {}
        self._layouts: Mapping[str, Layout] = {}
        self._checksums: list[tuple[int, int, complex]] = []
        self._evaluated: Evaluation | None = None
        self._calibration: Calibration | None = None
        self._scorer: MemberScorer | None = None
        self._detector: OODDetector | None = None

    @property
    def beta(self) -> float:
        """Inverse temperature."""
        return self.settings.beta

    @property
    def coverage(self) -> Coverage:
        """The treatment of each parameter. After `fit` it includes the health of every layer (`FittedCoverage`)."""
        if self._recorder is not None:
            coverage = self._recorder.inventory.coverage
        elif self.factors is not None:
            coverage = self._inventory.demote_to(self.factors.blocks).keep(self.factors.blocks).coverage
        else:
            coverage = self._inventory.keep(self._inventory.select(self._selection.layers)).coverage
        return coverage if self.factors is None else with_health(coverage, self.factors, self.damping)

    def fit(
        self,
        data: Any,
        *,
        max_memory: int | str | None = None,
        checkpoint: Checkpoint | None = None,
        progress: bool | None = None,
    ) -> Self:
        """Estimate the curvature in two passes over the training data.

        Args:
            data: DataLoader, Dataset, arrays ``(X, y)`` or ``X``, table of pandas, data set of Hugging Face, or any
                re-iterable of batches ``(x, y)``, ``(x,)``, ``x`` or dicts. Only the empirical Fisher uses labels;
                labels are validated in any case.
            max_memory: Memory limit of tensors beside model and data, in bytes or as ``"8GB"``. Results are the same up
                to rounding. None uses microbatches of moderate size and requires only that the factors fit in memory.
            checkpoint: Saves the accumulators from time to time. After a kill the same call resumes and gives the same
                bits. The data must come in the same order each time.
            progress: Show a progress bar; None shows it on terminals.

        Raises:
            MemoryLimitError: If the limit is too small. The message names the required size and the largest layers.
            CheckpointError: If the checkpoint belongs to other work. The message names the differences.
        """
        fit_together([self], data, max_memory=max_memory, checkpoint=checkpoint, progress=progress)
        return self

    def influence(self, x: Any, *, damping: Damping | None = None) -> Tensor:
        """Influence ``IF_beta(x, y)`` of every label (eq. bif), [B, K]. Cost: 1 + 2K forward passes."""
        batch = self._batch(x)
        evaluation = self._evaluation(batch, damping)
        return torch.cat(list(evaluate(evaluation, [batch], evaluation.factors.num_classes, label_influence)))

    def logit_kernel(self, x: Any, *, damping: Damping | None = None) -> Tensor:
        """``M(x) = J (G + damping)^-1 J^T`` in beta-free units, [B, K, K].

        ``IF_beta(x, y) = (p - e_y)^T M (p - e_y)``, and ``M / n`` is the logit covariance of the linearised Laplace
        approximation.
        """
        batch = self._batch(x)
        evaluation = self._evaluation(batch, damping)
        return torch.cat(list(evaluate(evaluation, [batch], 1, logit_kernel, work="logit kernel")))

    def predict_proba(
        self, x: Any, alpha: float | None = None, *, keep_argmax: bool = True, damping: Damping | None = None
    ) -> Tensor:
        """The pNML distribution, [B, K]; calibrated after `calibrate`.

        The default form ``(p + c/K) / (1 + c)`` with ``c = alpha/n E[IF]`` never changes the predicted class and needs
        E[IF] only: all labels up to 32 classes, two probes beyond. Cost: 1 + 2K or 5 forward passes.

        Args:
            x: Inputs.
            alpha: Weight of the example relative to a training example, with ``p = softmax(beta f)``; 0 returns p. None
                uses alpha and temperature of `calibrate`. Before `calibrate` it is the alpha for which the training
                mean of ``alpha/n E[IF]`` is 0.01. The paper uses 0.15.
            keep_argmax: False returns the paper's ``p_y (1 + alpha/n IF_y) / (1 + c)`` (eq. pnml_dist), which can
                change the predicted class. Cost: 1 + 2K forward passes.
            damping: Overrides the damping of the predictor.

        Raises:
            SettingError: If ``alpha`` is None and the calibration has another damping or form.
        """
        if alpha is not None:
            check_number("alpha", alpha)
        batch = self._batch(x)
        evaluation = self._evaluation(batch, damping)
        inverse_temperature = evaluation.beta
        if alpha is None and self._calibration is not None:
            self._calibration.check_form(repr(evaluation.damping), keep_argmax)
            alpha, inverse_temperature = self._calibration.alpha, 1 / self._calibration.temperature
        elif alpha is None:
            alpha = alpha_of_added_probability(evaluation, DEFAULT_ADDED_PROBABILITY)
        return distributions(evaluation, [batch], alpha, inverse_temperature, keep_argmax)

    @explain_dead_workers()
    def calibrate(self, held_out: Any, shifted: Any = None, *, progress: bool | None = None) -> Calibration:
        """Choose temperature and alpha on held-out data; `predict_proba` and `predict_set` use them from then on.

        A random half of the held-out data chooses the temperature T by the NLL of ``softmax(f / T)``, then alpha by the
        NLL of the distribution that keeps the argmax. Figures are cross-validated within this half. The softmax is kept
        unless the NLL is better by more than its standard error. The other half gives the conformal scores of
        `predict_set`. The fitted factors are kept: E[IF] at T uses the logit kernel of the fit, whose Fisher is that at
        ``beta``, not at ``1/T``. This is an approximation. Cost: one forward pass and E[IF] per held-out example.

        Args:
            held_out: Labelled data that the model was not trained on, iterated over twice in the same order. At least
                40 examples, better 200 or more.
            shifted: Labelled held-out data under the shift that is expected later. It joins the half that chooses
                temperature and alpha, not the other one.
            progress: Show progress bars; None shows them on terminals.

        Raises:
            DataError: If there are too few examples, or the data differs between the two passes.
            LabelError: If labels are missing or outside 0 ... K-1.
        """
        from ifcomp.calibrating import calibrate, first_held_out  # imports scipy, which is slow

        parts = [self._data(data) for data in (held_out, shifted) if data is not None]
        factors, first = self._fitted, first_held_out(parts)
        evaluation = self._evaluation(first, None)
        settings = {**self._fit_identity(factors), "damping": repr(self.damping), "version": __version__}
        seed = self.settings.seed
        self._calibration = calibrate(evaluation, self.model, parts, settings, seed=seed, progress=progress)
        return self._calibration

    @property
    def calibration(self) -> Calibration | None:
        """The latest result of `calibrate`, also after `load`; None before. `fit` removes it.

        A calibration can be assigned if it was made with the same model, fit and damping.
        """
        return self._calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        if calibration is not None:
            calibration.check_fit({**self._fit_identity(self._fitted), "damping": repr(self.damping)})
        self._calibration = calibration

    def predict_set(self, x: Any, coverage: float = 0.95) -> Tensor:
        """Prediction sets by split conformal prediction, [B, K] booleans; never empty.

        A set contains the true label with probability of at least ``coverage``, on average over held-out and new data,
        if both come from the same distribution. Under shift this is not guaranteed. The score is that of regularised
        adaptive prediction sets without random numbers (`ifcomp.tasks.prediction_sets`), on the distribution of
        `calibrate`.

        Args:
            x: Inputs.
            coverage: Between 0 and 1.

        Raises:
            NotCalibratedError: Before `calibrate`.
        """
        if self._fitted is not None and self._calibration is None:
            raise NotCalibratedError("Prediction sets need held-out data: call calibrate(held_out) first.")
        assert self._calibration is not None
        rule = self._calibration.set_rule
        if rule.threshold(coverage) == math.inf:
            warnings.warn(
                f"Coverage {coverage:g} needs more than {len(rule.scores)} conformal examples, so every set has all "
                "labels. Give more data to calibrate, or choose a smaller coverage.",
                IfcompWarning,
                stacklevel=2,
            )
        probability = self.predict_proba(x)
        return torch.from_numpy(rule.sets(probability.cpu().numpy(), coverage)).to(probability.device)

    @explain_dead_workers()
    def ood_detector(
        self,
        held_out: Any,
        tpr: float = 0.95,
        score: str | Sequence[str] | None = None,
        *,
        progress: bool | None = None,
    ) -> OODDetector:
        """Build a detector of inputs that are unlike the training data, from held-out in-distribution data.

        The score joins its members without a parameter: ``log mean_m(1 / p_m)`` in nats, where p is the smoothed share
        of held-out inputs with a larger value (`ifcomp.tasks.ood.join_scores`). Larger = more surprising. Members are
        bounded complexity ("complexity"), the energy of the logits ("energy"), and the distance to the 50th nearest
        penultimate features of a sample of up to 20,000 training examples that `fit` keeps ("neighbours"). Complexity
        is computed with the damping ``Relative(1e-4)``. Cost: 1 + 2K forward passes per example; one without
        complexity.

        Args:
            held_out: Inputs that the model was not trained on, as for `fit`; labels are not used. At least 20 examples,
                better 200 or more.
            tpr: Share of the held-out inputs to accept, in (0, 1].
            score: Name of one member, whose score is used alone in its own unit, or several names. None is the default:
                all three. With a warning, it leaves out neighbours if the logits are not the output of a linear layer,
                and complexity for more than 32 classes.
            progress: Show a progress bar; None shows it on terminals.

        Raises:
            NotFittedError: Before `fit`, or if the factors have no reference set for neighbours.
            ModelError: If ``score`` names neighbours and the model has no penultimate features.
            DataError: If there are too few held-out examples.
        """
        members, factors = check_members(score), self._fitted
        ood_threshold([0.0], tpr)  # checks tpr before any work is done
        first, batches = _unlabelled(self._data(held_out), "ood_detector", progress)
        scorer = self._member_scorer(first)
        left_out = scorer.missing(members, score is None)
        for name, reason in left_out.items():
            warnings.warn(f"The score leaves out {name}: {reason}.", IfcompWarning, stacklevel=3)
        members = tuple(name for name in members if name not in left_out)
        frame = scorer.score_data(batches, members)
        if len(frame) < MIN_HELD_OUT:
            raise DataError(f"A detector needs at least {MIN_HELD_OUT} held-out examples, but got {len(frame)}.")
        if len(frame) < FEW_HELD_OUT:
            message = (
                f"{len(frame)} held-out examples are few: the threshold is uncertain. Give {FEW_HELD_OUT} or more."
            )
            warnings.warn(message, IfcompWarning, stacklevel=3)
        settings = {
            **self._detector_identity(factors),
            "held_out_examples": len(frame),
            "tpr": tpr,
            "members": list(members),
            "left_out": left_out,
            "neighbours": scorer.neighbour_count if "neighbours" in members else None,
            "reference_examples": len(scorer.reference) if "neighbours" in members else None,
            "version": __version__,
        }
        rule = OODRule(members, {name: frame[name].to_numpy(copy=True) for name in members}, float(tpr), settings)
        self._detector = OODDetector(rule, self._read_members)
        return self._detector

    @property
    def detector(self) -> OODDetector | None:
        """The latest result of `ood_detector`, also after `load`; None before. `fit` removes it."""
        return self._detector

    def _read_members(self, rule: OODRule, data: Any, *, is_data: bool, progress: bool | None = None) -> pd.DataFrame:
        """Member scores for a detector, one row per example.

        Args:
            rule: Rule of the detector. It must belong to this model and fit.
            data: Inputs of a call, or data.
            is_data: Whether ``data`` is data. Its rows have the names of the examples, if they are known.
            progress: Show a progress bar; None shows it on terminals.
        """
        rule.check_fit(self._detector_identity(self._fitted))
        if not is_data:
            batch = replace(self._batch(data), labels=None)
            return self._member_scorer(batch).score([batch], rule.members)
        known = self._data(data)
        warn_if_shuffled(known.batches)
        first, batches = _unlabelled(known, "table", progress)
        frame = self._member_scorer(first).score_data(batches, rule.members)
        names = None if known.example_names is None else known.example_names()
        return frame if len(names or ()) != len(frame) else frame.assign(name=names)

    def _member_scorer(self, first: Batch) -> MemberScorer:
        """The scorer of this fit. ``first`` verifies a model whose factors were loaded."""
        with exclusive(self.model):
            kept, factors = self._scorer, self._fitted
            if kept is None or kept.evaluation.factors is not factors or kept.evaluation.recorder is not self._recorder:
                self._scorer = kept = MemberScorer(self._evaluation(first, OOD_DAMPING))
            return kept

    def _detector_identity(self, factors: Factors) -> dict[str, Any]:
        """Settings that identify model, fit and damping of a detector, as plain JSON."""
        return {**self._fit_identity(factors), "damping": repr(OOD_DAMPING)}

    def parametric_complexity(
        self,
        x: Any,
        *,
        alpha: float = 1.0,
        linearized: bool = False,
        capped: bool = False,
        probes: int | None = None,
        damping: Damping | None = None,
    ) -> Tensor:
        """Unfamiliarity of inputs: ``log(1 + alpha/n E[IF])`` in nats, [B]. Larger is more unfamiliar.

        Args:
            x: Inputs.
            alpha: Weight of the example relative to a training example.
            linearized: The paper's ``alpha/n E[IF]`` (eq. ifcomp_par); the order of inputs is the same.
            capped: Cap every hindsight probability ``p (1 + alpha/n IF)`` at 1, so that the log of their sum is at most
                log K. Alpha then changes the order; choose it on known OOD inputs.
            probes: Estimate E[IF] from this number of random directions instead of all labels. Cost: 1 + 2 probes
                forward passes.
            damping: Overrides the damping of the predictor.
        """
        batch = replace(self._batch(x), labels=None)
        options = ScoreOptions(alpha=alpha, linearized=linearized, probes=probes, capped=capped)
        return self._column("parametric_complexity", batch, options, damping)

    def bounded_complexity(self, x: Any, *, damping: Damping | None = None) -> Tensor:
        """Parametric complexity with hindsight probabilities below 1: between 0 and log K nats, [B].

        It is also large for confident predictions far from the training data, and alpha follows from the training data
        (`ifcomp.complexity.bounded_complexity`). `ood_detector` joins it with other scores.

        Args:
            x: Inputs.
            damping: Overrides the damping of the predictor.
        """
        return self._column("bounded_complexity", replace(self._batch(x), labels=None), ScoreOptions(), damping)

    def stochastic_complexity(
        self,
        x: Any,
        y: Any,
        *,
        seen: bool = True,
        alpha: float = 1.0,
        linearized: bool = False,
        damping: Damping | None = None,
    ) -> Tensor:
        """Suspicion of labels: error plus parametric complexity (eq. ifcomp_full) in nats, [B].

        Args:
            x: Inputs.
            y: Labels [B].
            seen: Whether the model was trained on these labels. If not, the error is the hindsight codelength.
            alpha: Weight of the example relative to a training example.
            linearized: Use the paper's first-order parametric complexity.
            damping: Overrides the damping of the predictor.
        """
        batch, options = self._batch(x, y), ScoreOptions(seen, alpha, linearized)
        check_labels(batch, self._fitted.num_classes)
        return self._column("stochastic_complexity", batch, options, damping)

    @explain_dead_workers()
    def score(
        self,
        data: Any,
        *,
        seen: bool = True,
        alpha: float = 1.0,
        linearized: bool = False,
        capped: bool = False,
        probes: int | None = None,
        damping: Damping | None = None,
        max_memory: int | str | None = None,
        checkpoint: Checkpoint | None = None,
        progress: bool | None = None,
    ) -> ScoreTable:
        """Score a data set: one row per example, in order, with label columns if the data has labels.

        Args:
            data: As for `fit`. It is read once, so an iterator of batches is accepted.
            seen: Whether the model was trained on these labels.
            alpha: Weight of the example relative to a training example.
            linearized: Use first-order parametric complexity.
            capped: As for `parametric_complexity`.
            probes: As for `parametric_complexity`. Columns that need single labels are left out; two or more probes add
                the standard error of the estimate.
            damping: Overrides the damping of the predictor.
            max_memory: As for `fit`.
            checkpoint: As for `fit`; it saves rows.
            progress: Show a progress bar; None shows it on terminals.

        Raises:
            MemoryLimitError: If ``max_memory`` is too small. The message names the required size.
            CheckpointError: If the checkpoint belongs to other work. The message names the differences.
        """
        options, limit = ScoreOptions(seen, alpha, linearized, probes, capped), as_bytes(max_memory)
        data = self._data(data)
        (warn_if_shuffled if checkpoint is None else check_not_shuffled)(data.batches)
        check_repeatable(data, in_order=checkpoint is not None)
        progress = progress if process_info().rank == 0 else False
        batches = as_batches(track(data.batches, "scoring", progress))
        first = next(batches, None)
        if first is None:
            raise EmptyDataError("score needs at least one example, but the data is empty.")
        check_label_form(first)
        evaluation = self._evaluation(first, damping).with_limit(limit)
        rows = (known_length(data.batches) or 1) * first.size
        with ExitStack() as stack:
            work = NO_CHECKPOINT
            if checkpoint is not None:
                key = {
                    "model": short_digest(self._fingerprint),
                    **score_key(evaluation, options),
                    "version": __version__,
                }
                work = stack.enter_context(checkpoint.resume(key, [ROWS], rows * ROW_BYTES))
                evaluation.microbatches.peaks = work.settings.setdefault("peaks", {})
            shard = shard_batches(work.remaining_batches(itertools.chain([first], batches)))
            columns = score_columns(evaluation, shard, options, work)
        frame = gather_rows(pd.DataFrame({name: value.numpy() for name, value in columns.items()}))
        settings = {
            **asdict(options),
            "beta": self.beta,
            "damping": repr(evaluation.damping),
            "training_examples": evaluation.factors.count,
            "version": __version__,
        }
        return ScoreTable(frame, settings)

    @explain_dead_workers()
    def audit(
        self,
        data: Any,
        *,
        reference: Any = None,
        max_memory: int | str | None = None,
        progress: bool | None = None,
    ) -> LabelAudit:
        """Find wrong labels from the evidence of all layers. No fit is needed.

        Two predictors per layer predict the label of every example from the other examples: votes of nearest neighbours
        and ridge regression. Layers that have memorised the labels get little weight in the pool of these predictors.
        Cost: two forward passes per example, matrix products and a search for neighbours; no backward pass. Together
        this is the time of about 3 forward passes on a ResNet-18 and of 5 on a ResNet-20.

        After `fit` the table also has label complexity, which adds the cost of about seven forward passes. If the data
        has as many examples as that of the fit, `LabelAudit.influential` lists the training examples that support and
        contradict the labels of the first suspects, at the cost of `explain`.

        Args:
            data: Labelled data as for `fit`, iterated over twice in the same order. The model may have been trained on
                it or not. File names, texts and class names that the data knows are columns of the table.
            reference: Labelled data on which the predictors are fitted instead, for instance with trusted labels.
            max_memory: Memory limit of the tensors of a forward pass, in bytes or as ``"8GB"``. Features and
                distributions of more than 1 GiB are in temporary files.
            progress: Show progress bars; None shows them on terminals.

        Raises:
            LabelError: If labels are missing or outside 0 ... K-1.
            LengthChangedError: If the data cannot be iterated over twice.
            DataError: If the data is shuffled, or differs between the two passes.

        Example:
            >>> audit = IFComp(model).audit(train_loader)
            >>> print(audit.headline)
            >>> audit.suspects.head()
        """
        if reference is not None and reference is data:
            raise SettingError(
                "The reference is the audited data itself, so no example would be left out. Leave reference= out."
            )
        limit, data = as_bytes(max_memory), self._data(data)
        first, base = _first_of_audit(data, "data"), None
        if reference is not None:
            base = self._data(reference)
            _first_of_audit(base, "reference")
        with exclusive(self.model), all_trainable(self.model):
            inventory = take_inventory(self.model, Selection(skip_uncovered=True))
            reader = FeatureReader(verified_recorder(self.model, inventory, first), first, limit)
            trusted = None if base is None else base.batches
            evidence = collect_evidence(reader, data.batches, trusted, seed=self.settings.seed, progress=progress)
        settings = {"seed": self.settings.seed, "has_reference": base is not None, "version": __version__}
        audit = audit_evidence(evidence, settings, seed=self.settings.seed)
        if self.factors is not None:
            probes = min(2, self.factors.num_classes)
            table = self.score(data, damping=AUDIT_DAMPING, probes=probes, max_memory=max_memory, progress=progress)
            audit.frame["label_complexity"] = table.column("label_complexity")
            if self.factors.count == len(audit.frame) and process_info().world_size == 1:
                audit = replace(audit, influential=self._explain_suspects(audit, data, progress))
        return _with_known_names(audit, data)

    def _explain_suspects(self, audit: LabelAudit, data: Data, progress: bool | None) -> pd.DataFrame | None:
        """Return `LabelAudit.influential`; None without suspects, or if their inputs have different shapes."""
        suspects = audit.suspects["index"].head(MAX_EXPLAINED).tolist()
        if not suspects:
            return None
        try:
            x, y = select_examples(data.batches, suspects)
        except DataError as error:
            warnings.warn(f"The audit lists no influential examples: {error}", IfcompWarning, stacklevel=4)
            return None
        explanation = self.explain(
            x, y, data, k=EXAMPLES_PER_SIDE, positions=suspects, damping=AUDIT_DAMPING, progress=progress
        )
        frame = explanation.frame
        frame.insert(0, "suspect", [suspects[query] for query in frame["query"]])
        return frame.drop(columns="query")

    def explain(
        self,
        x: Any,
        y: Any,
        train: Any,
        *,
        k: int = 5,
        positions: Sequence[int] | None = None,
        damping: Damping | None = None,
        progress: bool | None = None,
    ) -> Explanation:
        """Find the training examples that most support and most contradict given labels.

        The effect of training example i on (x, y) is ``g_y^T (G + damping)^-1 g_i / n``: the first-order increase of
        the codelength of y in nats if the model had been trained without i. Positive effects support the label,
        negative effects contradict it. The cost is one pass over the training data; memory does not grow with its size.

        Args:
            x: Inputs of the examples to explain.
            y: Their labels [B].
            train: The training data with labels, as for `fit`.
            k: Number of supporting and of contradicting examples per query.
            positions: Position of each query in the training data, to leave it out.
            damping: Overrides the damping of the predictor.
            progress: Show a progress bar; None shows it on terminals.
        """
        batch = self._batch(x, y)
        check_labels(batch, self._fitted.num_classes)
        train = self._data(train)
        check_reiterable(train.batches, "explain reads the data once for each group of queries")
        check_repeatable(train, in_order=False)
        return explain(self._evaluation(batch, damping), batch, train.batches, k, positions, progress)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write factors, settings, `calibration` and `detector` to one safetensors file, atomically."""
        relative = isinstance(self.damping, Relative)
        options = {
            "selection": asdict(self._selection),
            "damping": self.damping.multiple if isinstance(self.damping, Relative) else self.damping,
            "relative_damping": relative,
            "layouts": {name: layout.value for name, layout in self._layouts.items()},
            "columns": None if self._columns is None else list(self._columns),
        }
        results = {} if self._calibration is None else {"calibration": self._calibration.to_json()}
        if self._detector is not None:
            results["detector"] = self._detector.rule.to_json()
        saved = factor_files.SavedFactors(self._fitted, self._fingerprint, options, __version__, results)
        factor_files.save(path, saved)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> Self:
        """Read a file that `save` wrote, for the same model.

        Raises:
            StorageError: If the file cannot be read.
            FingerprintError: If it belongs to another model. The message names the differences.
        """
        stored, model = factor_files.load(path), unwrapped(model)
        check_fingerprint(stored.fingerprint, model, f"The factors in '{path}'")
        options, settings = stored.options, stored.factors.settings
        try:
            value = options["damping"]
            loaded = cls(
                model,
                **asdict(settings),
                damping=Relative(value) if options["relative_damping"] else value,
                **options["selection"],
            )
            layouts = {name: Layout(value) for name, value in options["layouts"].items()}
            columns = options.get("columns")
            loaded._columns = None if columns is None else tuple(map(str, columns))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StorageError(
                f"Cannot read factors from '{path}': its settings are damaged ({error!r}). Fit again."
            ) from error
        advice = "Is the file damaged, or was the model's code changed? Fit again."
        loaded._receive(stored.factors, dict(stored.fingerprint), layouts, f"The factors in '{path}'", advice)
        loaded._restore(stored.results, path)
        return loaded

    @classmethod
    def from_factors(
        cls,
        model: nn.Module,
        factors: Factors,
        *,
        partial: bool = False,
        damping: Damping = DEFAULT_DAMPING,
        sua: Sua = "auto",
    ) -> Self:
        """Build a fitted predictor from factors of another source.

        Args:
            model: The classifier that the factors belong to; only their shapes can be checked.
            factors: Second moments and eigenbases of its blocks.
            partial: Accept factors that leave out trainable parameters.
            damping: As for the constructor.
            sua: The value that the factors were fitted with.

        Raises:
            FingerprintError: If factors are missing, unknown, or of another shape or dtype. The message lists them.
        """
        layers, model = None, unwrapped(model)
        if partial:
            known = factors.blocks.keys()
            complete = take_inventory(model, Selection(sua=sua, skip_uncovered=True)).blocks
            layers = [block.name for block in complete if not known.isdisjoint((block.name, *block.parameters))] or None
        made = cls(model, **asdict(factors.settings), layers=layers, damping=damping, sua=sua, skip_uncovered=partial)
        advice = "Give the model and sua= of the fit; partial=True accepts missing parameters."
        made._receive(factors, fingerprint(model), {}, "The given factors", advice)
        return made

    def _restore(self, results: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
        """Restore calibration and detector from a file."""
        name = ""
        try:
            if (name := "calibration") in results:
                self.calibration = Calibration.from_json(results[name])
            if (name := "detector") in results:
                rule = OODRule.from_json(results[name])
                rule.check_fit(self._detector_identity(self._fitted))
                self._detector = OODDetector(rule, self._read_members)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, DataError) as error:
            verb = {"calibration": "calibrate", "detector": "call ood_detector"}[name]
            raise StorageError(
                f"Cannot read the {name} in '{path}': it is damaged ({error}). Fit and {verb} again."
            ) from error

    def _data(self, data: Any) -> Data:
        """Turn any form of data into batches. A table has the columns of the fit."""
        return as_data(data, self._request)

    def _batch(self, x: Any, y: Any = None) -> Batch:
        """Convert the inputs of a call, and labels."""
        return as_inputs(x, y, self._request)

    @property
    def _request(self) -> DataRequest:
        return DataRequest(self.model, self.collate_fn, self._columns)

    def _fit_identity(self, factors: Factors) -> dict[str, Any]:
        """Settings that identify model and fit, as plain JSON."""
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

    def _column(self, name: str, batch: Batch, options: ScoreOptions, damping: Damping | None) -> Tensor:
        evaluation = self._evaluation(batch, damping)
        device = double_device(evaluation.recorder.device, evaluation.recorder.dtype)
        return score_columns(evaluation, [batch], options)[name].to(device, torch.float64)

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
    predictors: Sequence[IFComp],
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
    recorder, fits = fit_factors(
        lead.model,
        inventory,
        lead._selection,
        [predictor.settings for predictor in predictors],
        data.batches,
        fingerprint=short_digest(digests),
        limit=as_bytes(max_memory),
        checkpoint=checkpoint,
        progress=progress,
    )
    with exclusive(lead.model):
        for predictor, factors in zip(predictors, fits, strict=True):
            predictor._inventory, predictor._recorder, predictor._columns = inventory, recorder, data.columns
            predictor._adopt(factors, digests, recorder.layouts)
            predictor._calibration = predictor._scorer = predictor._detector = None


def _unlabelled(data: Data, verb: str, progress: bool | None) -> tuple[Batch, Iterator[Batch]]:
    """Return the first batch of data, and all batches, without labels."""
    progress = progress if process_info().rank == 0 else False
    batches = (replace(batch, labels=None) for batch in as_batches(track(data.batches, "OOD scores", progress)))
    first = next(batches, None)
    if first is None:
        raise EmptyDataError(f"{verb} needs at least one example, but the data is empty.")
    return first, itertools.chain([first], batches)


def _first_of_audit(data: Data, name: str) -> Batch:
    """Check the data or reference of an audit and return its first batch."""
    check_audit_order(data.batches)
    check_repeatable(data, in_order=True)
    first = next(as_batches(data.batches), None)
    if first is None:
        raise EmptyDataError(f"audit needs at least one example, but the {name} is empty.")
    check_labelled(first)
    return first


def _with_known_names(audit: LabelAudit, data: Data) -> LabelAudit:
    """Add the names of classes and examples that the data knows, if there is one per class and one per example."""
    classes = data.class_names if len(data.class_names or ()) == audit.pred_probs.shape[1] else None
    names = None if data.example_names is None else data.example_names()
    return audit.with_names(classes, names if len(names or ()) == len(audit.frame) else None)
