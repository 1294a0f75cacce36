"""The fit: two passes over the training data.

The first pass sums covariances of layer inputs and output gradients. Their eigenvectors are computed. The second pass
averages the squared per-example gradients in this eigenbasis.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from ifcomp._version import __version__
from ifcomp.blocks.block import Basis
from ifcomp.curvature.accumulation import CovarianceSums, add_second_moments, clear_rounding_errors, second_moment_sums
from ifcomp.curvature.eigen import basis_tensors, eigenbases, eigenvectors
from ifcomp.curvature.factors import BlockFactors, Factors, FitSettings, check_finite
from ifcomp.curvature.labels import Cotangents, fisher_cotangents
from ifcomp.curvature.reference import MAX_REFERENCE, ReferenceSample, reference_elements
from ifcomp.curvature.sizes import check_factor_memory, checkpoint_bytes, covariance_bytes, factor_bytes
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_label_form
from ifcomp.data.digests import DataDigest
from ifcomp.data.loaders import explain_dead_workers
from ifcomp.distributed import all_reduce_sum, process_info, same_batches, shard_batches
from ifcomp.errors import DataError, EmptyDataError, IfcompWarning, LengthChangedError
from ifcomp.io.checkpoints import Checkpoint
from ifcomp.io.resumable import NO_CHECKPOINT, ResumableWork, check_saved_tensor, restore_tensors
from ifcomp.layers.inventory import Inventory
from ifcomp.layers.model_checks import listed, untouched_norms
from ifcomp.layers.probe import check_probe, take_probe
from ifcomp.layers.recorder import Recorder, working_dtype
from ifcomp.layers.recording import Recording
from ifcomp.layers.registry import Selection
from ifcomp.layers.verification import verified_recorder
from ifcomp.memory import available
from ifcomp.microbatches import LabelUse, Microbatches, check_batch
from ifcomp.precision import as_double
from ifcomp.progress import track

#: Stages of a fit, as checkpoints name them.
STAGES = ("covariances", "eigenvectors", "second moments")

#: Adds one microbatch to accumulators. Arguments: recording, microbatch, cotangents per setting, cotangents per chunk.
_Add = Callable[[Recording, Batch, list[Cotangents], int], None]


@explain_dead_workers()
def fit_factors(
    model: nn.Module,
    inventory: Inventory,
    selection: Selection,
    settings: Sequence[FitSettings],
    data: Iterable[Any],
    *,
    fingerprint: str,
    limit: int | None = None,
    checkpoint: Checkpoint | None = None,
    progress: bool | None = None,
) -> tuple[Recorder, list[Factors], dict[str, Any] | None]:
    """Fit the curvature of a model for one or several settings in the same two passes.

    Args:
        model: The classifier.
        inventory: All of its blocks.
        selection: Which blocks are covered, and how.
        settings: Temperature, Fisher and seed of each fit.
        data: Batches that can be iterated twice, in the same order if there is a checkpoint.
        fingerprint: Identifies the weights in checkpoints.
        limit: Memory limit of tensors other than model and data, in bytes.
        checkpoint: Saves the accumulators from time to time.
        progress: Show a progress bar; None shows it on terminals.

    Returns:
        The recorder of the verified model, factors for each of the settings, and the probe of the model.
    """
    selected = inventory.keep(inventory.select(selection.layers)).blocks
    itemsize = working_dtype(model).itemsize
    check_factor_memory(selected, itemsize, len(settings), limit, available(next(model.parameters()).device))
    _warn_of_untouched_norms(model)
    progress = progress if process_info().rank == 0 else False
    with torch.inference_mode(False), ExitStack() as stack:
        batches = same_batches(as_batches(track(data, "pass 1 of 2: covariances", progress)))
        first = next(batches, None)
        if first is None:
            raise EmptyDataError("fit needs at least one example, but the data is empty.")
        check_label_form(first)
        recorder = verified_recorder(model, inventory, first, selection.layers)
        probe, work = take_probe(model, replace(first, shared=recorder.shared)), NO_CHECKPOINT
        if checkpoint is not None:
            key = _checkpoint_key(recorder, selection, settings, fingerprint, limit)
            size = checkpoint_bytes(recorder.blocks, itemsize, len(settings))
            size += reference_elements(recorder, MAX_REFERENCE) * itemsize
            work = stack.enter_context(checkpoint.resume(key, STAGES, size))
            check_probe(model, work.settings.setdefault("probe", probe), f"The sums in '{checkpoint.path}'")
        passes = FitPasses(recorder, settings, limit, work)
        sums, count = passes.covariances(itertools.chain([first], batches))
        bases = passes.eigenbases(sums, count)
        del sums
        again = same_batches(as_batches(track(data, "pass 2 of 2: second moments", progress)))
        factors = passes.second_moments(again, bases, count)
    if factors[0].count != count:
        raise LengthChangedError(
            f"The first pass over the data has {count} examples, the second {factors[0].count}. The data must give the "
            "same examples each time it is iterated."
        )
    passes.check_same_data()
    for fitted in factors:
        check_finite(fitted)
    _warn_of_low_accuracy(factors[0])
    return recorder, factors, probe


class FitPasses:
    """The stages of a fit. Each saves its accumulators in the checkpoint and continues from saved ones.

    Attributes:
        cotangents: Number of cotangents per example.
        microbatches: Splits batches into microbatches, for each of the two passes.
    """

    def __init__(
        self,
        recorder: Recorder,
        settings: Sequence[FitSettings],
        limit: int | None = None,
        work: ResumableWork = NO_CHECKPOINT,
    ) -> None:
        """Prepare both passes.

        Args:
            recorder: Records the model.
            settings: Temperature, Fisher and seed of each fit.
            limit: Memory limit of tensors other than model and data, in bytes.
            work: Saves accumulators from time to time.
        """
        self._recorder, self._settings, self._work = recorder, settings, work
        self._data = DataDigest(), DataDigest()
        exact = any(own.fisher == "exact" for own in settings)
        self.cotangents = recorder.num_classes if exact else max(own.label_samples for own in settings)
        saved = work.settings
        self.microbatches = tuple(
            Microbatches(
                recorder.device,
                limit=limit,
                fixed_bytes=size(recorder.blocks, recorder.dtype.itemsize, len(settings)),
                peaks=saved.setdefault(f"peaks of {stage}", {}),
            )
            for stage, size in ((STAGES[0], covariance_bytes), (STAGES[2], factor_bytes))
        )

    def covariances(self, batches: Iterable[Batch]) -> tuple[CovarianceSums, int]:
        """First pass: sums of outer products, and the number of examples."""
        sums = CovarianceSums.zeros(self._recorder, len(self._settings))
        count = _counter(self._recorder)
        state = {"examples/0": count, **sums.tensors}
        restore_tensors(state, self._work.begin_stage(STAGES[0], lambda: state))
        if not self._work.is_complete(STAGES[0]):

            def add(recording: Recording, _: Batch, cotangents: list[Cotangents], chunk_size: int) -> None:
                sums.add(recording, cotangents, chunk_size)

            self._run(batches, 0, add, count)
            all_reduce_sum(state.values())
        return sums, int(count)

    def eigenbases(self, sums: CovarianceSums, count: int) -> list[dict[str, Basis]]:
        """Eigenvectors of all covariances."""
        ready: dict[str, Tensor] = {}
        common = {"examples/0": torch.tensor(count, device="cpu"), **sums.tensors}
        saved = self._work.begin_stage(STAGES[1], lambda: ready, common)

        def decompose(name: str, matrix: Tensor) -> Tensor:
            key = f"basis/{name}"
            if key in saved:
                ready[key] = check_saved_tensor(key, saved[key], matrix).to(matrix.device)
            else:
                ready[key] = eigenvectors(name, matrix)
                self._work.save_if_due()
            return ready[key]

        return eigenbases(sums, decompose)

    def second_moments(
        self, batches: Iterable[Batch], bases: Sequence[Mapping[str, Basis]], count_before: int = 0
    ) -> list[Factors]:
        """Second pass: mean squared gradients in the eigenbasis, with fresh label samples, and the reference set.

        Args:
            batches: The training data.
            bases: Eigenbases for each of the settings.
            count_before: Number of examples of the first pass, which is saved in the checkpoint. There is no reference
                set if it is 0.
        """
        recorder = self._recorder
        vectors = {f"basis/{name}": value for name, value in basis_tensors(bases).items()}
        common = {"examples/0": torch.tensor(count_before, device="cpu"), **vectors}
        totals = [second_moment_sums(recorder) for _ in self._settings]
        count, matches = _counter(recorder), _counter(recorder, 2)
        state = {
            f"moments/{number}/{name}": total for number, sums in enumerate(totals) for name, total in sums.items()
        }
        state |= {"examples/1": count, "matches/1": matches}
        reference = ReferenceSample.zeros(recorder, count_before, self._settings[0].seed)
        if reference is not None:
            state["reference/features"] = reference.features
            self.microbatches[1].fixed_bytes += reference.features.nbytes
        restore_tensors(state, self._work.begin_stage(STAGES[2], lambda: state, common))

        def add(recording: Recording, batch: Batch, cotangents: list[Cotangents], chunk_size: int) -> None:
            if reference is not None:
                reference.add(recording, batch)
            for sums, basis, vectors in zip(totals, bases, cotangents, strict=True):
                add_second_moments(sums, recording, basis, vectors, chunk_size)

        self._run(batches, 1, add, count, matches)
        all_reduce_sum(state.values())
        for sums in totals:
            clear_rounding_errors(sums, recorder.verified.rounding, recorder.precision)
        examples, (correct, labelled) = int(count), matches.tolist()
        accuracy = correct / labelled if labelled else None
        features = None if reference is None else reference.features.cpu()
        return [
            Factors(
                {name: BlockFactors(total.div_(max(examples, 1)), basis.get(name)) for name, total in sums.items()},
                examples,
                recorder.num_classes,
                settings,
                accuracy,
                features,
            )
            for sums, basis, settings in zip(totals, bases, self._settings, strict=True)
        ]

    def check_same_data(self) -> None:
        """Raise DataError if the two passes saw different examples.

        If this process resumed after the first pass, only the checkpoint knows its data, and compares them.
        """
        first, second = self._data
        if first.count and not first.has_same_examples(second):
            raise DataError(
                "The inputs or labels of the second pass differ from those of the first, so covariances and second "
                "moments would belong to different data. Usual causes are random transforms and files that change. "
                "Give data that is the same each time it is iterated."
            )

    def _run(
        self, batches: Iterable[Batch], pass_index: int, add: _Add, count: Tensor, matches: Tensor | None = None
    ) -> None:
        """Record all batches in microbatches and add each to the accumulators.

        Args:
            batches: The training data.
            pass_index: 0 or 1.
            add: Adds one microbatch.
            count: Number of examples, in place.
            matches: Number of correct predictions and of labels [2], in place.
        """
        recorder, settings, microbatches = self._recorder, self._settings, self.microbatches[pass_index]
        labels: LabelUse = "needed" if any(own.fisher == "empirical" for own in settings) else "optional"

        def step(microbatch: Batch, chunk_size: int) -> tuple[int, Tensor]:
            with recorder.attached():
                recording = recorder.record(microbatch)
                with recorder.computing():
                    logits = as_double(recording.logits.detach(), recorder.dtype)
                    vectors = [
                        fisher_cotangents(logits, own, microbatch.labels, microbatch.position, pass_index)
                        for own in settings
                    ]
                    add(recording, microbatch, vectors, chunk_size)
                    return microbatch.size, _matches(logits, microbatch.labels)

        shared = (replace(batch, shared=recorder.shared) for batch in batches)
        for batch in shard_batches(self._work.remaining_batches(shared, self._data[pass_index])):
            checked = check_batch(batch, recorder.num_classes, labels)
            for size, found in microbatches.run(checked, self.cotangents, step):
                count += size
                if matches is not None:
                    matches += found.to(matches.device)


def _counter(recorder: Recorder, *shape: int) -> Tensor:
    with recorder.computing():
        return torch.zeros(shape, dtype=torch.int64, device=recorder.device)


def _matches(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Number of correct predictions and number of labels, [2]."""
    if labels is None:
        return torch.zeros(2, dtype=torch.int64, device=logits.device)
    correct = (logits.argmax(1) == labels.to(logits.device)).sum()
    return torch.stack([correct, torch.full_like(correct, len(labels))])


def _warn_of_untouched_norms(model: nn.Module) -> None:
    if names := untouched_norms(model):
        warnings.warn(
            f"The running statistics of {listed(names)} are those of a new layer, mean 0 and variance 1: the model "
            "was never run in train mode, or its buffers were not loaded. Load the whole state dict, or run training "
            "data through the model in train mode first.",
            IfcompWarning,
            stacklevel=6,
        )


def least_accuracy(num_classes: int) -> float:
    """Training accuracy below which the model or its inputs are probably wrong.

    Twice chance. For fewer than five classes it is a quarter of the way from chance to 1: twice chance would be
    100 % of two classes.
    """
    chance = 1 / num_classes
    return chance + min(chance, (1 - chance) / 4)


def _warn_of_low_accuracy(factors: Factors) -> None:
    accuracy, least = factors.training_accuracy, least_accuracy(factors.num_classes)
    if accuracy is not None and accuracy < least and process_info().rank == 0:
        warnings.warn(
            f"The training accuracy is {accuracy:.1%}; chance is {1 / factors.num_classes:.1%}. Wrong preprocessing, "
            "or no weights? Every result depends on it. Give the inputs the preprocessing of the training "
            "(normalisation, size, order of channels), load the trained weights, and check the order of the classes.",
            IfcompWarning,
            stacklevel=6,
        )


def _checkpoint_key(
    recorder: Recorder, selection: Selection, settings: Sequence[FitSettings], fingerprint: str, limit: int | None
) -> dict[str, Any]:
    """Everything but the data that the result depends on, as plain JSON."""
    return {
        "work": "fit",
        "model": fingerprint,
        "settings": [asdict(own) for own in settings],
        "selection": asdict(selection),
        "device": str(recorder.device),
        "autocast": recorder.autocast,
        "max_memory": limit,
        "version": __version__,
    }
