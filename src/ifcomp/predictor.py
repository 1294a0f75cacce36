"""`IFComp`: the public object. It validates, delegates and keeps state."""

from __future__ import annotations

import html
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ifcomp._version import __version__
from ifcomp.auditing import first_labelled, read_evidence, with_known_names
from ifcomp.bounded import SAMPLED_LABELS, evaluate_bounded
from ifcomp.curvature.factors import (
    Damping,
    Factors,
    FisherKind,
    FitSettings,
    Relative,
    check_number,
)
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import (
    check_label_form,
    check_labels,
    check_not_shuffled,
    check_reiterable,
    warn_if_shuffled,
)
from ifcomp.data.forms import Data, check_repeatable
from ifcomp.data.loaders import explain_dead_workers
from ifcomp.data.selection import select_examples
from ifcomp.detection import MemberScorer, OODDetector, build_rule
from ifcomp.distributed import gather_rows, process_info, same_batches, shard_batches
from ifcomp.errors import (
    CheckpointError,
    DataError,
    EmptyDataError,
    IfcompWarning,
    NotCalibratedError,
    SettingError,
)
from ifcomp.explanation import Explanation, explain
from ifcomp.io.checkpoints import Checkpoint
from ifcomp.io.fingerprints import fingerprint, short_digest
from ifcomp.io.resumable import NO_CHECKPOINT
from ifcomp.label_samples import sample_size
from ifcomp.layers.inventory import take_inventory
from ifcomp.layers.probe import check_probe
from ifcomp.layers.registry import MAX_OUTPUT_BASIS, Selection, Sua
from ifcomp.layers.threads import exclusive
from ifcomp.layers.wrappers import unwrapped
from ifcomp.memory import as_bytes
from ifcomp.precision import double_device
from ifcomp.prediction import DEFAULT_ADDED_PROBABILITY, alpha_of_added_probability, distributions
from ifcomp.progress import known_length, track
from ifcomp.scores import ScoreTable
from ifcomp.scoring import (
    ROW_BYTES,
    ROWS,
    ScoreOptions,
    evaluate,
    label_influence,
    logit_kernel,
    score_columns,
    score_key,
)
from ifcomp.state import FittedState, fit_together
from ifcomp.storage import load_state, save_state
from ifcomp.tasks.audit import AUDIT_DAMPING, EXAMPLES_PER_SIDE, MAX_EXPLAINED, LabelAudit, audit_evidence
from ifcomp.tasks.calibration_result import Calibration
from ifcomp.tasks.ood import OOD_DAMPING, check_members, ood_threshold
from ifcomp.tasks.ood_rule import OODRule
from ifcomp.tasks.pruning import PRUNING_DAMPING, check_fractions, keep_lists, warn_of_large_fractions

if TYPE_CHECKING:
    from ifcomp.report import OODScores, ReliabilityPair, ShowExamples
    from ifcomp.tasks.ood_table import OODTable

#: Safe on small and large networks; OOD detection prefers far smaller values.
DEFAULT_DAMPING = Relative(0.1)


class IFComp(FittedState):
    """Audit of a trained classifier: wrong labels, OOD inputs, calibrated predictions, pruning and explanations.

    `audit` needs the model only. Scores, detectors, calibration, pruning and explanations need the curvature of the
    training loss, which `fit` estimates.
    Larger scores are more surprising and more suspicious. Codelengths are in nats. Tensors are returned in float64: on
    the model's device if the model is in float64, otherwise on the CPU, because a device may lack float64.

    Example:
        The examples of all methods use a small classifier of digits, its 400 training examples (``train``, two of which
        have wrong labels) and 400 held-out examples (``held_out``).

        >>> ifc = IFComp(model).fit(train)
        >>> print(ifc)
        IFComp(Sequential, fitted on 400 examples, 10 classes, 100 % covered, beta 1)
        >>> x, y = held_out
        >>> ifc.stochastic_complexity(x, y).shape     # of labels, in nats
        torch.Size([400])
        >>> ifc.parametric_complexity(x).shape        # of inputs, in nats
        torch.Size([400])
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
        max_output_basis: int = MAX_OUTPUT_BASIS,
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
            max_output_basis: Largest number of classes for which the outputs of the last layer have an eigenbasis.
                Beyond it the basis is the identity, and the coverage names it: memory is then linear in the number of
                classes instead of quadratic.
            collate_fn: Builds a batch from a list of examples of a Dataset, such as ``DataCollatorWithPadding`` of
                transformers. None stacks the examples. A DataLoader has its own. It is not saved; set the attribute
                after `load`.
        """
        patterns = tuple(layers) if isinstance(layers, list) else layers
        chosen = Selection(patterns, sua, skip_uncovered, max_output_basis)
        super().__init__(model, FitSettings(beta, fisher, label_samples, seed), damping, chosen, collate_fn)
        self._scorer: MemberScorer | None = None

    def __repr__(self) -> str:
        factors = self.factors
        state = "not fitted"
        if factors is not None:
            state = f"fitted on {factors.count:,} examples, {factors.num_classes} classes"
        return f"IFComp({type(self.model).__name__}, {state}, {self._treatment.percent} covered, beta {self.beta:g})"

    def _repr_html_(self) -> str:
        lines = [repr(self)]
        if self.training_accuracy is not None:
            lines.append(f"training accuracy {self.training_accuracy:.1%}")
        lines += [] if self._calibration is None else [repr(self._calibration)]
        return "".join(f"<p>{html.escape(line)}</p>" for line in lines) + self.coverage._repr_html_()

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
            max_memory: Memory limit of all tensors other than model and data, in bytes or as ``"8GB"``. Results are
                equal up to rounding. None uses microbatches of moderate size and requires only that the factors fit in
                memory.
            checkpoint: Saves the accumulators from time to time. After a kill the same call resumes and gives the same
                bits. The data must come in the same order each time.
            progress: Show a progress bar; None shows it on terminals.

        Raises:
            MemoryLimitError: If the limit is too small. The message names the required size and the largest layers.
            CheckpointError: If the checkpoint belongs to other work. The message names the differences.

        Example:
            >>> ifc = IFComp(model).fit(train)
            >>> ifc.training_accuracy > 0.9
            True
            >>> ifc.coverage
            FittedCoverage(2,410 of 2,410 parameters covered, 100 %, 2 of 2 layers healthy)
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
        E[IF] only: all labels up to 32 classes; beyond, the predicted label and two sampled labels. Cost: 1 + 2K or 7
        forward passes.

        Args:
            x: Inputs.
            alpha: Weight of the example relative to a training example, with ``p = softmax(beta f)``; 0 returns p. None
                uses alpha and temperature of `calibrate`. Before `calibrate` it is the alpha for which the training
                mean of ``alpha/n E[IF]`` is 1e-4. The paper uses 0.15.
            keep_argmax: False returns the paper's ``p_y (1 + alpha/n IF_y) / (1 + c)`` (eq. pnml_dist), which can
                change the predicted class. Cost: 1 + 2K forward passes.
            damping: Overrides the damping of the predictor.

        Raises:
            SettingError: If ``alpha`` is None and the calibration has another damping or form.

        Example:
            >>> probability = ifc.predict_proba(x)
            >>> bool((probability.argmax(1) == model(x).argmax(1)).all())  # the predicted class is kept
            True
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

        On a random half of the held-out data the temperature T is chosen by the NLL of ``softmax(f / T)``, then alpha
        by the NLL of the distribution that keeps the argmax. Figures are cross-validated within this half. The softmax
        is kept unless the NLL is better by more than its standard error. The other half gives the conformal scores of
        `predict_set`. The fitted factors are kept: E[IF] at T uses the logit kernel of the fit, whose Fisher is that at
        ``beta``, not at ``1/T``. This is an approximation. Cost: one forward pass and E[IF] per held-out example.

        Args:
            held_out: Labelled data that the model was not trained on, iterated over twice in the same order. At least
                40 examples, better 200 or more.
            shifted: Labelled held-out data under the shift that is expected later. It is added to the half for
                temperature and alpha, not to the other one. Give altered versions of other examples than ``held_out``.
            progress: Show progress bars; None shows them on terminals.

        Raises:
            DataError: If there are too few examples, or the data differs between the two passes.
            LabelError: If labels are missing or outside 0 ... K-1.

        Example:
            >>> calibration = ifc.calibrate(held_out)
            >>> calibration.frame["form"].tolist()  # one row of cross-validated figures each
            ['softmax', 'temperature', 'calibrated']
            >>> ifc.calibration is calibration
            True
        """
        from ifcomp.calibrating import calibrate, first_held_out  # imports scipy, which is slow

        parts = [self._data(data) for data in (held_out, shifted) if data is not None]
        settings, first = {**self._calibration_identity, "version": __version__}, first_held_out(parts)
        evaluation = self._evaluation(first, None)
        self._check_code()
        seed = self.settings.seed
        self._calibration = calibrate(evaluation, self.model, parts, settings, seed=seed, progress=progress)
        return self._calibration

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

        Example:
            >>> calibration = ifc.calibrate(held_out)
            >>> sets = ifc.predict_set(x, coverage=0.9)
            >>> sets.shape, bool(sets.any(1).all())
            (torch.Size([400, 10]), True)
        """
        calibration = self._calibration if self._fitted else None
        if calibration is None:
            raise NotCalibratedError("Prediction sets need held-out data: call calibrate(held_out) first.")
        rule = calibration.set_rule
        rule.warn_if_too_few(coverage)
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

        The score joins its members without a parameter: ``log (sum_m w_m / p_m) / (sum_m w_m)`` in nats, where p is the
        smoothed share of held-out inputs with a larger value, with an exponential tail
        (`ifcomp.tasks.ood.join_scores`). Larger = more surprising. Members are bounded complexity ("complexity"), the
        energy of the logits ("energy"), and the distance to the 50th nearest penultimate features of a sample of up to
        20,000 training examples that `fit` keeps ("neighbours"). Complexity has a small weight w where it ranks the
        held-out inputs like max softmax (`ifcomp.tasks.ood.member_weights`), and is computed with the damping
        ``Relative(1e-4)``. Cost per example: 1 + 2K forward passes up to 32 classes and 35 beyond; one without
        complexity.

        Args:
            held_out: Inputs that the model was not trained on, as for `fit`; labels are not used. At least 20 examples,
                better 200 or more.
            tpr: Share of the held-out inputs to accept, in (0, 1].
            score: Name of one member, whose score is used alone in its own unit, or several names. None is the default:
                all three. With a warning, it leaves out neighbours if the logits are not the output of a linear layer.
            progress: Show a progress bar; None shows it on terminals.

        Raises:
            NotFittedError: Before `fit`, or if the factors have no reference set for neighbours.
            ModelError: If ``score`` names neighbours and the model has no penultimate features.
            DataError: If there are too few held-out examples.

        Example:
            >>> gate = ifc.ood_detector(held_out)
            >>> familiar, inverted = gate.predict(x), gate.predict(1 - x)
            >>> int(familiar.sum()) <= 20, int(inverted.sum()) > 300  # of 400 each
            (True, True)
        """
        check_members(score)
        ood_threshold([0.0], tpr)  # checks tpr before any work is done
        identity = self._detector_identity
        first, batches = _unlabelled(self._data(held_out), "ood_detector", progress)
        scorer = self._member_scorer(first)
        self._check_code()
        self._ood_rule = rule = build_rule(scorer, batches, score, tpr, identity)
        return OODDetector(rule, self._read_members)

    @property
    def detector(self) -> OODDetector | None:
        """The latest result of `ood_detector`, also after `load`; None before. `fit` removes it."""
        return None if self._ood_rule is None else OODDetector(self._ood_rule, self._read_members)

    def _read_members(self, rule: OODRule, data: Any, *, is_data: bool, progress: bool | None = None) -> pd.DataFrame:
        """Member scores for a detector, one row per example.

        Args:
            rule: Rule of the detector. It must belong to this model and fit.
            data: Inputs of a call, or data.
            is_data: Whether ``data`` is data. Its rows have the names of the examples, if they are known.
            progress: Show a progress bar; None shows it on terminals.
        """
        rule.check_fit(self._detector_identity)
        if not is_data:
            batch = replace(self._batch(data), labels=None)
            return self._member_scorer(batch).score([batch], rule.members)
        known = self._data(data)
        warn_if_shuffled(known.batches)
        first, batches = _unlabelled(known, "table", progress)
        scorer = self._member_scorer(first)
        self._check_code()
        frame = scorer.score_data(batches, rule.members)
        names = None if known.example_names is None else known.example_names()
        return frame if len(names or ()) != len(frame) else frame.assign(name=names)

    def _member_scorer(self, first: Batch) -> MemberScorer:
        """The scorer of this fit. ``first`` verifies a model whose factors were loaded."""
        with exclusive(self.model):
            kept, factors = self._scorer, self._fitted
            if kept is None or kept.evaluation.factors is not factors or kept.evaluation.recorder is not self._recorder:
                self._scorer = kept = MemberScorer(self._evaluation(first, OOD_DAMPING))
            return kept

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
        """Parametric complexity of inputs, ``log(1 + alpha/n E[IF])`` in nats, [B]. Larger = more surprising.

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

    @overload
    def bounded_complexity(
        self, x: Any, *, exact: bool = ..., return_error: Literal[False] = ..., damping: Damping | None = ...
    ) -> Tensor: ...

    @overload
    def bounded_complexity(
        self, x: Any, *, exact: bool = ..., return_error: Literal[True], damping: Damping | None = ...
    ) -> tuple[Tensor, Tensor]: ...

    def bounded_complexity(
        self, x: Any, *, exact: bool = False, return_error: bool = False, damping: Damping | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Parametric complexity with hindsight probabilities below 1: ``log S`` between 0 and log K nats, [B].

        ``S`` is the sum of the hindsight probabilities (`ifcomp.complexity.bounded_complexity`). Larger = more
        surprising. It is also large for confident predictions far from the training data, and alpha follows from the
        training data. `ood_detector` joins it with other scores.

        Up to 32 classes all labels are evaluated. Beyond, S is estimated without bias from the predicted label and 16
        sampled labels (`ifcomp.bounded.bounded_complexity`), and log S has a bias of about ``-Var(S) / (2 S^2)``. The
        value of an example does not depend on its batch. Cost: 1 + 2K or 35 forward passes.

        Args:
            x: Inputs.
            exact: Evaluate all labels for any number of classes.
            return_error: Return the standard error of the value as well, in nats, [B]; 0 if all labels are evaluated.
                Its square is correct on average over samples.
            damping: Overrides the damping of the predictor.
        """
        batch = replace(self._batch(x), labels=None)
        evaluation = self._evaluation(batch, damping)
        samples = sample_size(evaluation.factors.num_classes, SAMPLED_LABELS, exact)
        bounded = evaluate_bounded(evaluation, [batch], samples)
        return (bounded.value, bounded.error) if return_error else bounded.value

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
        """Stochastic complexity of labels: error plus parametric complexity (eq. ifcomp_full) in nats, [B].

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

        Example:
            >>> table = ifc.score(train)
            >>> len(table), sorted(table.frame["label_complexity"].nlargest(2).index)  # the wrong labels
            (400, [0, 1])
        """
        options, limit = ScoreOptions(seen, alpha, linearized, probes, capped), as_bytes(max_memory)
        data = self._data(data)
        (warn_if_shuffled if checkpoint is None else check_not_shuffled)(data.batches)
        check_repeatable(data, in_order=checkpoint is not None)
        progress = progress if process_info().rank == 0 else False
        batches = same_batches(as_batches(track(data.batches, "scoring", progress)))
        first = next(batches, None)
        if first is None:
            raise EmptyDataError("score needs at least one example, but the data is empty.")
        check_label_form(first)
        evaluation = self._evaluation(first, damping).with_limit(limit)
        self._check_code()
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
                check_probe(
                    self.model, work.settings.setdefault("probe", self._probe), f"The rows in '{checkpoint.path}'"
                )
                evaluation.microbatches.peaks = work.settings.setdefault("peaks", {})
            shard = shard_batches(work.remaining_batches(itertools.chain([first], batches)))
            columns = score_columns(evaluation, shard, options, work)
        frame = gather_rows(pd.DataFrame({name: value.numpy() for name, value in columns.items()}))
        if checkpoint is not None and not np.array_equal(frame["index"], np.arange(len(frame))):
            raise CheckpointError(
                f"'{checkpoint.path}' does not contain the rows of all examples in order. Delete it to start again."
            )
        settings = {
            **asdict(options),
            "model": short_digest(self._fingerprint),
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
        checkpoint: Checkpoint | None = None,
        progress: bool | None = None,
    ) -> LabelAudit:
        """Find wrong labels from the evidence of all layers. No fit is needed.

        Two predictors per layer, on the input and up to 8 layers, predict the label of every example from the other
        examples: votes of nearest neighbours and ridge regression. The pool is the weighted mean of their predictions
        and the softmax; layers that have memorised the labels get little weight.
        Cost: two forward passes per example, matrix products and a search for neighbours; no backward pass. Together
        this is the time of about 3 forward passes on a ResNet-18 and of 5 on a ResNet-20.

        After `fit` the table also has label complexity, which adds the cost of about seven forward passes. If the data
        has as many examples as that of the fit, `LabelAudit.influential` lists the training examples that support and
        contradict the labels of the first suspects, at the cost of `explain`.

        Args:
            data: Labelled data as for `fit`, iterated over twice in the same order. The model may have been trained on
                it or not. File names, texts and class names that the data knows are columns of the table.
            reference: Labelled data on which the predictors are fitted instead, for instance with trusted labels. It
                must not contain the audited examples. If its class frequencies differ from those of the data, the
                noise rate is too high.
            max_memory: Memory limit of the tensors of a forward pass, in bytes or as ``"8GB"``. Features and
                distributions of more than 1 GiB are in temporary files.
            checkpoint: As for `fit`, for one process. Features and distributions are then in files beside it. After a
                kill, the audit resumes at the next batch or layer.
            progress: Show progress bars; None shows them on terminals.

        Raises:
            LabelError: If labels are missing or outside 0 ... K-1.
            LengthChangedError: If the data cannot be iterated over twice.
            DataError: If the data is shuffled, or differs between the two passes.

        Example:
            >>> audit = IFComp(model).audit(train)
            >>> sorted(audit.suspects["index"].head(2))  # the wrong labels
            [0, 1]
        """
        if reference is not None and reference is data:
            raise SettingError(
                "The reference is the audited data itself, so no example would be left out. Leave reference= out."
            )
        limit, data = as_bytes(max_memory), self._data(data)
        base = None if reference is None else self._data(reference)
        with ExitStack() as stack:
            scores = None if checkpoint is None else stack.enter_context(checkpoint.beside("scores"))
            evidence, settings = read_evidence(
                self.model, data, base, limit=limit, seed=self.settings.seed, checkpoint=checkpoint, progress=progress
            )
            audit = audit_evidence(evidence, settings, seed=self.settings.seed)
            if self.factors is not None:
                probes = min(2, self.factors.num_classes)
                table = self.score(
                    data,
                    damping=AUDIT_DAMPING,
                    probes=probes,
                    max_memory=max_memory,
                    checkpoint=scores,
                    progress=progress,
                )
                audit.frame["label_complexity"] = table.column("label_complexity")
                if self.factors.count == len(audit.frame) and process_info().world_size == 1:
                    audit = replace(audit, influential=self._explain_suspects(audit, data, progress))
            return with_known_names(audit, data)

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

        Example:
            >>> explanation = ifc.explain(x[:1], y[:1], train, k=3)
            >>> explanation
            Explanation(3 supporting and 3 contradicting training examples of 1 query)
            >>> int(explanation.frame["label"].iloc[0]) == int(y[0])  # the strongest support has the same label
            True
        """
        batch = self._batch(x, y)
        check_labels(batch, self._fitted.num_classes)
        train = self._data(train)
        check_reiterable(train.batches, "explain reads the data once for each group of queries")
        check_repeatable(train, in_order=False)
        evaluation = self._evaluation(batch, damping)
        self._check_code()
        return explain(evaluation, batch, train.batches, k, positions, progress)

    def prune(
        self,
        train: Any,
        drop: float = 0.3,
        *,
        balanced: bool = False,
        max_memory: int | str | None = None,
        progress: bool | None = None,
    ) -> NDArray[np.int64]:
        """Positions of the training examples to keep, [n - floor(drop n)], sorted.

        The examples of lowest stochastic complexity in nats are dropped first. Wrong labels have a large complexity and
        are kept: audit the labels first. Cost: that of `score`.

        Args:
            train: Labelled training data as for `fit`, in the same order on every pass.
            drop: Share of the examples to drop, in [0, 1). Beyond 0.6 a random subset may be better.
            balanced: Drop this share of every class; every class keeps at least one example.
            max_memory: As for `fit`.
            progress: Show a progress bar; None shows it on terminals.

        Example:
            >>> keep = ifc.prune(train, drop=0.3)
            >>> len(keep), sorted({0, 1} & set(keep.tolist()))  # the wrong labels are kept
            (280, [0, 1])
        """
        check_fractions([drop])
        warn_of_large_fractions([drop])
        data = self._data(train)
        first_labelled(data, "Pruning", "training data")
        table = self.score(data, damping=PRUNING_DAMPING, max_memory=max_memory, progress=progress)
        return keep_lists(table, [drop], balanced=balanced)[drop]

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        audit: LabelAudit | None = None,
        ood: OODTable | OODScores | None = None,
        calibration: Calibration | ReliabilityPair | None = None,
        title: str | None = None,
        previews: ShowExamples | None = None,
        reference_previews: ShowExamples | None = None,
        ood_previews: ShowExamples | None = None,
        class_names: Sequence[str] | None = None,
        provenance: Mapping[str, Any] | None = None,
        apply_command: str | None = None,
    ) -> Path:
        """Write results to one self-contained HTML file, atomically, and return its path.

        Args:
            path: File to write; its name ends in ``.html``.
            audit: Result of `audit`, with neighbours and influential examples of its suspects.
            ood: Result of `OODDetector.table`, or scores of several data sets.
            calibration: Result of `calibrate`, or reliability curves of other data.
            title: Heading of the page.
            previews: Function from positions in the audited data to one `ifcomp.report.Preview` each. None shows the
                file names or texts of the audit.
            reference_previews: The same for the reference of the audit.
            ood_previews: The same for the inputs of ``ood``. Flagged inputs are shown with the nearest training
                examples if the audit is that of the training data.
            class_names: Names of the classes 0 ... K-1. None uses those of the audit.
            provenance: Origin of the results. None stands for versions, model and seed.
            apply_command: Command that carries out the decisions, shown next to their export.

        Raises:
            SettingError: If a result belongs to another model or fit, or there is nothing to report.
            StorageError: If the file cannot be written.

        Example:
            >>> audit, calibration = ifc.audit(train), ifc.calibrate(held_out)
            >>> ifc.report("report.html", audit=audit, calibration=calibration).name
            'report.html'
        """
        from ifcomp.report import (
            audit_parts,
            build_report,
            class_names_of,
            current_provenance,
            ood_scores_of,
            training_data_of,
        )
        from ifcomp.report import reliability_of as reliability

        if Path(path).suffix != ".html":
            raise SettingError(f"The name of '{os.fspath(path)}' must end in .html.")
        for result in (audit, ood):
            self._check_model(result)
        if isinstance(calibration, Calibration):
            calibration.check_fit(self._calibration_identity)
        model = type(self.model).__name__
        parts, training = {}, None
        if audit is not None:
            parts = audit_parts(audit, previews, reference_previews)
            training = None if self.factors is None else training_data_of(audit, self.factors.count, previews)
            class_names = class_names or class_names_of(audit)
        return build_report(
            path,
            title=title or f"Report of {model}",
            **parts,
            calibration=None if calibration is None else reliability(calibration),
            ood=None if ood is None else ood_scores_of(ood, ood_previews, training),
            class_names=class_names,
            provenance=provenance or current_provenance(model=model, seed=self.settings.seed),
            coverage=None if self.factors is None else self.coverage,
            apply_command=apply_command,
        )

    def _check_model(self, result: Any) -> None:
        """Raise SettingError if a result was made with another model."""
        expected, made_with = short_digest(fingerprint(self.model)), getattr(result, "settings", {}).get("model")
        if made_with not in (None, expected):
            raise SettingError(
                f"The {type(result).__name__} was made with another model or other weights ({made_with}, not "
                f"{expected}). Make it again with this predictor."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write factors, settings, `calibration` and `detector` to one safetensors file, atomically.

        Example:
            >>> ifc.save("run.ifcomp")
            >>> IFComp.load("run.ifcomp", model)
            IFComp(Sequential, fitted on 400 examples, 10 classes, 100 % covered, beta 1)
        """
        save_state(path, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> Self:
        """Read a file that `save` wrote, for the same model.

        Raises:
            StorageError: If the file cannot be read.
            FingerprintError: If it belongs to another model. The message names the differences.

        Example:
            >>> ifc.save("run.ifcomp")
            >>> loaded = IFComp.load("run.ifcomp", model)
            >>> bool((loaded.predict_proba(x) == ifc.predict_proba(x)).all())
            True
        """
        return load_state(cls, path, model)

    @classmethod
    def from_factors(
        cls,
        model: nn.Module,
        factors: Factors,
        *,
        partial: bool = False,
        damping: Damping = DEFAULT_DAMPING,
        sua: Sua = "auto",
        max_output_basis: int = MAX_OUTPUT_BASIS,
    ) -> Self:
        """Build a fitted predictor from factors of another source.

        Args:
            model: The classifier that the factors belong to; only their shapes can be checked.
            factors: Second moments and eigenbases of its blocks.
            partial: Accept factors that leave out trainable parameters.
            damping: As for the constructor.
            sua: The value that the factors were fitted with.
            max_output_basis: As for the constructor; at least the number of classes if the factors have an output
                basis of the last layer.

        Raises:
            FingerprintError: If factors are missing, unknown, or of another shape or dtype. The message lists them.
        """
        layers, model = None, unwrapped(model)
        if partial:
            known = factors.blocks.keys()
            complete = take_inventory(model, Selection(sua=sua, skip_uncovered=True)).blocks
            layers = [block.name for block in complete if not known.isdisjoint((block.name, *block.parameters))] or None
        made = cls(
            model,
            **asdict(factors.settings),
            layers=layers,
            damping=damping,
            sua=sua,
            skip_uncovered=partial,
            max_output_basis=max_output_basis,
        )
        advice = "Give the model, sua= and max_output_basis= of the fit; partial=True accepts missing parameters."
        made._receive(factors, fingerprint(model), {}, "The given factors", advice)
        return made

    def _check_code(self) -> None:
        """Raise FingerprintError if the model computes other logits than in the fit with the same weights."""
        check_probe(self.model, self._probe, "The fitted factors")

    def _column(self, name: str, batch: Batch, options: ScoreOptions, damping: Damping | None) -> Tensor:
        evaluation = self._evaluation(batch, damping)
        device = double_device(evaluation.recorder.device, evaluation.recorder.dtype)
        return score_columns(evaluation, [batch], options)[name].to(device, torch.float64)


def _unlabelled(data: Data, verb: str, progress: bool | None) -> tuple[Batch, Iterator[Batch]]:
    """Return the first batch of data, and all batches, without labels. Random transforms are refused."""
    check_repeatable(data, in_order=False)
    progress = progress if process_info().rank == 0 else False
    read = same_batches(as_batches(track(data.batches, "OOD scores", progress)))
    batches = (replace(batch, labels=None) for batch in read)
    first = next(batches, None)
    if first is None:
        raise EmptyDataError(f"{verb} needs at least one example, but the data is empty.")
    return first, itertools.chain([first], batches)
