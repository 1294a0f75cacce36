"""`IFComp`: the thin object over inventory, curvature, influence and complexity."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ifcomp import storage
from ifcomp._version import __version__
from ifcomp.batches import Batch, as_batch, as_batches, check_data, check_labels
from ifcomp.complexity import pnml_distribution
from ifcomp.curvature.eigen import eigenbases
from ifcomp.curvature.factors import Damping, Factors, FisherKind, FitSettings, Relative, check_damping
from ifcomp.curvature.holdings import check_factors, check_pieces, factor_shapes
from ifcomp.curvature.passes import fit_covariances, fit_second_moments
from ifcomp.distributed import gather_rows, own_slices, ranks
from ifcomp.errors import (
    DataError,
    EmptyDataError,
    FingerprintError,
    LengthChangedError,
    ModelError,
    NotFittedError,
    SettingError,
    StorageError,
)
from ifcomp.explanation import Explanation, explain
from ifcomp.influence.weights import Weights, invert
from ifcomp.layers.block import Layout
from ifcomp.layers.inventory import Coverage, restrict, take_inventory, with_known
from ifcomp.layers.registry import Selection, Sua
from ifcomp.layers.session import Session, working_dtype
from ifcomp.memory import as_bytes, available
from ifcomp.progress import track
from ifcomp.scores import ScoreTable
from ifcomp.scoring import Evaluation, ScoreOptions, influences, pieces, score_frame

#: Safe on small and large networks; out-of-distribution detection prefers far smaller values.
DEFAULT_DAMPING = Relative(0.1)


class IFComp:
    """Boltzmann influence, pNML distribution and stochastic complexity of a trained classifier.

    Larger scores are always more surprising, more suspicious; codelengths are in nats. Tensors come back in float64 on
    the model's device.

    Example:
        >>> ifc = IFComp(model).fit(train_loader)
        >>> ifc.predict_proba(x, alpha=0.15)          # calibrated distribution, [B, K]
        >>> ifc.stochastic_complexity(x, y)           # label suspicion, [B], nats
        >>> ifc.parametric_complexity(x)              # how unlike the training data, [B], nats
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
    ) -> None:
        """Take stock of a model; it is never changed.

        Args:
            model: Returns logits [B, K], or an object with ``.logits``.
            beta: Inverse temperature; 1 is the ordinary influence function, 0 the limit in which all
                labels count alike.
            layers: None covers all; ``"last"`` the last weight layer; or names and shell-style patterns.
            damping: Added to the curvature before it is inverted: how far the hindsight model may move. A float is
                absolute in beta-free units (the paper's delta over beta squared); ``Relative(0.1)`` is a multiple of
                each layer's mean. Every scoring call can override it.
            sua: Share one input basis over the offsets of a convolution kernel: True, False, or "auto" for wide layers.
            fisher: "sampled" labels from the model, "exact" expectation over all labels, or "empirical" labels of
                the data.
            label_samples: Labels drawn per example and pass.
            seed: Of the label samples and probes.
            skip_uncovered: Leave out parameters that cannot be covered instead of raising.
        """
        if not isinstance(model, nn.Module):
            raise ModelError(f"The model must be an nn.Module, but is a {type(model).__name__}.")
        self.model = model
        self.settings = FitSettings(beta, fisher, label_samples, seed)
        self.damping = check_damping(damping)
        self.factors: Factors | None = None
        self._selection = Selection(tuple(layers) if isinstance(layers, list) else layers, sua, skip_uncovered)
        complete = take_inventory(model, self._selection)
        self._inventory = restrict(complete, self._selection.layers, complete)
        self._session: Session | None = None
        self._fingerprint: dict[str, str] = {}
        self._layouts: Mapping[str, Layout] = {}
        self._checksums: list[tuple[int, int, complex]] = []
        self._inverted: tuple[Factors, Damping, dict[str, Weights]] | None = None

    @property
    def beta(self) -> float:
        """Inverse temperature."""
        return self.settings.beta

    @property
    def coverage(self) -> Coverage:
        """Which parameters are covered and how. After `fit` as checked on the data."""
        return (self._session.inventory if self._session else self._inventory).coverage

    def fit(self, data: Iterable[Any], *, max_memory: int | str | None = None, progress: bool | None = None) -> Self:
        """Estimate the curvature in two passes over the training data.

        Args:
            data: Any re-iterable of ``(x, y)``, ``(x,)``, ``x`` or dicts. Labels are only used by the empirical Fisher;
                integer ones are checked all the same.
            max_memory: What tensors may hold beside model and data, in bytes or such as ``"8GB"``; changes no result.
                None works in pieces of a sensible size, and asks only that the factors fit in what is there.
            progress: Show a progress bar; None shows it on terminals.

        Raises:
            MemoryLimitError: If it is too little; says what is needed, and by which layer.
        """
        fit_together([self], data, max_memory=max_memory, progress=progress)
        return self

    def influence(self, x: Any, *, damping: Damping | None = None) -> Tensor:
        """``IF_beta(x, y)`` of every label (eq. bif), [B, K]. Cost: 1 + 2K forward passes."""
        batch = as_batch(x)
        evaluation = self._evaluation(batch, damping)
        with evaluation.session.attached():
            return torch.cat([found for _, found in influences(evaluation, [batch])])

    def logit_kernel(self, x: Any, *, damping: Damping | None = None) -> Tensor:
        """``M(x) = J (G + damping)^-1 J^T`` in beta-free units, [B, K, K].

        ``IF_beta(x, y) = (p - e_y)^T M (p - e_y)``, and ``M / n`` is the logit covariance of the linearised Laplace
        approximation.
        """
        batch = as_batch(x)
        evaluation = self._evaluation(batch, damping)
        kernels = []
        with evaluation.session.attached():
            for piece in pieces(evaluation, [batch], evaluation.factors.num_classes, together=True):
                size, classes = piece.logits.shape
                axes = torch.eye(classes, dtype=torch.float64, device=piece.logits.device)
                kernels.append(piece.evaluator.products(axes.unsqueeze(1).expand(classes, size, classes)))
        return torch.cat(kernels)

    def predict_proba(
        self, x: Any, alpha: float = 0.15, *, keep_argmax: bool = False, damping: Damping | None = None
    ) -> Tensor:
        """The calibrated pNML distribution (eq. pnml_dist), [B, K].

        Args:
            x: Inputs.
            alpha: Weight of the example beside a training example; 0 gives the model's own distribution at beta.
            keep_argmax: Spread the same doubt evenly over classes, so that the predicted class never changes.
            damping: Overrides the predictor's.
        """
        batch, alpha = as_batch(x), ScoreOptions(alpha=alpha).alpha
        evaluation = self._evaluation(batch, damping)
        with evaluation.session.attached():
            parts = [
                pnml_distribution(piece.probability, found, evaluation.factors.count, alpha, keep_argmax)
                for piece, found in influences(evaluation, [batch])
            ]
        return torch.cat(parts)

    def parametric_complexity(
        self,
        x: Any,
        *,
        alpha: float = 1.0,
        linearized: bool = False,
        probes: int | None = None,
        damping: Damping | None = None,
    ) -> Tensor:
        """How unlike anything the model knows an input is: ``log(1 + alpha/n E[IF])`` in nats, [B].

        Args:
            x: Inputs.
            alpha: Weight of the example beside a training example.
            linearized: The paper's ``alpha/n E[IF]`` (eq. ifcomp_par); the order is the same.
            probes: Estimate E[IF] from so many random directions instead of all labels: 1 + 2 probes forward passes.
            damping: Overrides the predictor's.
        """
        batch = replace(as_batch(x), labels=None)
        options = ScoreOptions(alpha=alpha, linearized=linearized, probes=probes)
        return self._column("parametric_complexity", batch, options, damping)

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
        """How suspicious a labelled example is: error plus parametric complexity (eq. ifcomp_full) in nats, [B].

        Args:
            x: Inputs.
            y: Labels [B].
            seen: Whether the model was trained on these labels. If not, the error is the hindsight codelength.
            alpha: Weight of the example beside a training example.
            linearized: The paper's first-order parametric complexity.
            damping: Overrides the predictor's.
        """
        batch, options = as_batch(x, labels=y), ScoreOptions(seen, alpha, linearized)
        check_labels(batch, self._fitted.num_classes)
        return self._column("stochastic_complexity", batch, options, damping)

    def score(
        self,
        data: Iterable[Any],
        *,
        seen: bool = True,
        alpha: float = 1.0,
        linearized: bool = False,
        probes: int | None = None,
        damping: Damping | None = None,
        max_memory: int | str | None = None,
        progress: bool | None = None,
    ) -> ScoreTable:
        """Score a data set: one row an example, in order; label columns if the data has labels.

        Args:
            data: ``(x, y)``, ``(x,)``, ``x`` or dicts.
            seen: Whether the model was trained on these labels.
            alpha: Weight of the example beside a training example.
            linearized: First-order parametric complexity.
            probes: Estimate E[IF] from so many random directions; leaves out the columns that need single labels, and
                from two probes on adds the standard error of the estimate.
            damping: Overrides the predictor's.
            max_memory: What tensors may hold beside model and data, in bytes or such as ``"8GB"``; changes no result.
                None works in pieces of a sensible size.
            progress: Show a progress bar; None shows it on terminals.

        Raises:
            MemoryLimitError: If ``max_memory`` is too little; says what is needed.
        """
        options, limit = ScoreOptions(seen, alpha, linearized, probes), as_bytes(max_memory)
        check_data(data)
        progress = progress if ranks().rank == 0 else False
        batches = as_batches(track(data, "scoring", progress))
        first = next(batches, None)
        if first is None:
            raise EmptyDataError("score needs at least one example, but the data is empty.")
        evaluation = replace(self._evaluation(first, damping), limit=limit)
        frame = gather_rows(score_frame(evaluation, own_slices(itertools.chain([first], batches)), options))
        settings = {
            **asdict(options),
            "beta": self.beta,
            "damping": repr(evaluation.damping),
            "training_examples": evaluation.factors.count,
            "version": __version__,
        }
        return ScoreTable(frame, settings)

    def explain(
        self,
        x: Any,
        y: Any,
        train: Iterable[Any],
        *,
        k: int = 5,
        positions: Sequence[int] | None = None,
        damping: Damping | None = None,
        progress: bool | None = None,
    ) -> Explanation:
        """The training examples that most support and most contradict the labels of some examples.

        The effect of training example i on (x, y) is ``g_y^T (G + damping)^-1 g_i / n``: how many nats the codelength
        of y would grow, to first order, if the model had been trained without i. Positive effects support the label,
        negative ones contradict it. One pass over the training data; memory does not grow with it.

        Args:
            x: Inputs of the examples to explain.
            y: Their labels [B].
            train: The training data as ``(x, y)`` or dicts with labels, re-iterable.
            k: How many of each kind for an example.
            positions: Where each of the examples is itself in the training data, to leave it out.
            damping: Overrides the predictor's.
            progress: Show a progress bar; None shows it on terminals.
        """
        batch = as_batch(x, labels=y)
        check_labels(batch, self._fitted.num_classes)
        check_data(train)
        return explain(self._evaluation(batch, damping), batch, train, k, positions, progress)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the factors and settings to one safetensors file, atomically."""
        relative = isinstance(self.damping, Relative)
        options = {
            "selection": asdict(self._selection),
            "damping": self.damping.multiple if isinstance(self.damping, Relative) else self.damping,
            "relative_damping": relative,
            "layouts": {name: layout.value for name, layout in self._layouts.items()},
        }
        storage.save(path, storage.Stored(self._fitted, self._fingerprint, options, __version__))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module) -> Self:
        """Read a file that `save` wrote, for the same model.

        Raises:
            StorageError: If the file cannot be read.
            FingerprintError: If it belongs to another model; says what differs.
        """
        stored = storage.load(path)
        storage.check_fingerprint(stored.fingerprint, model, f"The factors in '{path}'")
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
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StorageError(
                f"Cannot read factors from '{path}': its settings are damaged ({error!r}). Fit again."
            ) from error
        advice = "Is the file damaged, or was the model's code changed? Fit again."
        loaded._receive(stored.factors, dict(stored.fingerprint), layouts, f"The factors in '{path}'", advice)
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
        """A fitted predictor from factors that were made elsewhere, for this very model.

        Args:
            model: The classifier that the factors belong to; only their shapes can be checked.
            factors: Second moments and eigenbases of its blocks.
            partial: Accept factors that leave out trainable parameters, and score with the blocks that are there.
            damping: As of the constructor.
            sua: Must be what the factors were made with.

        Raises:
            FingerprintError: If factors are missing, foreign or of another shape; lists them.
        """
        layers = None
        if partial:
            known = factors.blocks.keys()
            complete = take_inventory(model, Selection(sua=sua, skip_uncovered=True)).blocks
            layers = [block.name for block in complete if not known.isdisjoint((block.name, *block.parameters))] or None
        made = cls(model, **asdict(factors.settings), layers=layers, damping=damping, sua=sua, skip_uncovered=partial)
        advice = "Give the model and sua= they were made with; partial=True scores without parameters that have none."
        made._receive(factors, storage.fingerprint(model), {}, "The given factors", advice)
        return made

    def _evaluation(self, first: Batch, damping: Damping | None) -> Evaluation:
        """Everything a scoring call needs; ``first`` is used to check the model if that is still to be done."""
        factors = self._fitted
        damping = self.damping if damping is None else check_damping(damping)
        if first.size == 0:
            raise EmptyDataError("There is no example to score: the inputs are empty.")
        if self._session is None:
            session = Session(self.model, self._selection, first, self._layouts, factors.blocks.keys())
            if session.num_classes != factors.num_classes:
                raise FingerprintError(
                    f"The factors are for {factors.num_classes} classes, but the model has {session.num_classes} "
                    "logits. Fit again."
                )
            self._session = session
        with self._session.computing():
            if self._inverted is None or self._inverted[:2] != (factors, damping):
                self._inverted = (factors, damping, invert(factors, damping))
        return Evaluation(self._session, factors, self._inverted[2], damping)

    def _column(self, name: str, batch: Batch, options: ScoreOptions, damping: Damping | None) -> Tensor:
        evaluation = self._evaluation(batch, damping)
        values = score_frame(evaluation, [batch], options)[name].to_numpy()
        return torch.tensor(values, dtype=torch.float64, device=evaluation.session.device)

    @property
    def _fitted(self) -> Factors:
        if self.factors is None:
            raise NotFittedError("Nothing is fitted yet: call fit(train_loader) first, or IFComp.load(path, model).")
        checksums = _checksums(self.model)
        if checksums != self._checksums:
            storage.check_fingerprint(self._fingerprint, self.model, "The fitted factors")
            self._receive(self.factors, self._fingerprint, self._layouts, "The fitted factors", "Fit again.")
        return self.factors

    def _receive(
        self, factors: Factors, fingerprint: dict[str, str], layouts: Mapping[str, Layout], what: str, advice: str
    ) -> None:
        """Adopt factors that were not fitted just now, on the model's device, once they are seen to fit the model."""
        self._inventory, _ = with_known(self.model, self._selection, factors.blocks.keys())
        self._check_shapes(factors, what, advice)
        self._session = None
        self._adopt(factors.to(next(self.model.parameters()).device), fingerprint, layouts)

    def _adopt(self, factors: Factors, fingerprint: dict[str, str], layouts: Mapping[str, Layout]) -> None:
        self.factors, self._fingerprint, self._layouts, self._inverted = factors, fingerprint, layouts, None
        self._checksums = _checksums(self.model)

    def _check_shapes(self, factors: Factors, what: str, advice: str) -> None:
        """Raise FingerprintError unless the factors are just those of the model's blocks, in the right shapes."""
        needed = {block.name: factor_shapes(block) for block in self._inventory.blocks}
        found = {name: block.shapes for name, block in factors.blocks.items()}
        lacking: set[str] = set()
        if self._selection.layers is None:
            complete = take_inventory(self.model, self._selection).blocks
            covered = {name for block in self._inventory.blocks for name in block.parameters}
            lacking = {name for block in complete for name in block.parameters} - covered
        dtype = working_dtype(self.model)
        foreign = {name for name, block in factors.blocks.items() if block.dtypes != {dtype}}
        groups = {
            f"factors that are not {dtype}": foreign,
            "parameters without factors": lacking,
            "factors without a layer": found.keys() - needed.keys(),
            "factors of another shape": {name for name in needed if needed[name] != found[name]},
        }
        lines = [f"  {title}: {', '.join(sorted(names))}" for title, names in groups.items() if names]
        if lines:
            raise FingerprintError("\n".join([f"{what} do not fit the layers of this model:", *lines, advice]))


def fit_together(
    predictors: Sequence[IFComp],
    data: Iterable[Any],
    *,
    max_memory: int | str | None = None,
    progress: bool | None = None,
) -> None:
    """Fit predictors of one model that differ in beta, Fisher or seed, in the same two passes over the data.

    Forward passes and input covariances are shared, so that a grid of betas costs little more than its backwards.

    Args:
        predictors: Of the same model, with the same layers and ``sua``.
        data: As for `IFComp.fit`.
        max_memory: As for `IFComp.fit`, for all of them together.
        progress: Show a progress bar; None shows it on terminals.
    """
    lead = predictors[0]
    if any(other.model is not lead.model or other._selection != lead._selection for other in predictors):
        raise SettingError("Predictors that are fitted together must have the same model, layers= and sua=.")
    if isinstance(data, Iterator):
        raise DataError(
            "fit goes over the data twice, but got an iterator that is exhausted after one pass. "
            "Give a DataLoader, a list of batches, or an object whose __iter__ starts anew."
        )
    check_data(data)
    settings, limit = [predictor.settings for predictor in predictors], as_bytes(max_memory)
    item_bytes, there = working_dtype(lead.model).itemsize, available(next(lead.model.parameters()).device)
    check_factors(lead._inventory.blocks, item_bytes, len(settings), limit, there)
    progress = progress if ranks().rank == 0 else False
    with torch.inference_mode(False):
        batches = as_batches(track(data, "pass 1 of 2: covariances", progress))
        first = next(batches, None)
        if first is None:
            raise EmptyDataError("fit needs at least one example, but the data is empty.")
        session = Session(lead.model, lead._selection, first)
        check_pieces(session, first, settings, limit)
        covariances = fit_covariances(session, own_slices(itertools.chain([first], batches)), settings, limit)
        seen, bases = covariances[0].count, eigenbases(covariances)
        del covariances  # before the second pass needs room
        again = as_batches(track(data, "pass 2 of 2: second moments", progress))
        fits = fit_second_moments(session, own_slices(again), settings, bases, limit)
    if fits[0].count != seen:
        raise LengthChangedError(
            f"The first pass saw {seen} examples, the second {fits[0].count}. The data must give the "
            "same examples each time it is iterated."
        )
    fingerprint = storage.fingerprint(lead.model)
    for predictor, factors in zip(predictors, fits, strict=True):
        predictor._session = session
        predictor._adopt(factors, fingerprint, session.layouts)


def _checksums(model: nn.Module) -> list[tuple[int, int, complex]]:
    """A cheap look at every tensor of the model: where it is, how often it was changed and what it sums to."""
    tensors = (*model.parameters(), *model.buffers())
    return [(value.data_ptr(), value._version, complex(value.detach().sum())) for value in tensors]
