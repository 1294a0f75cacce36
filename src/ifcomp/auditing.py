"""Read the evidence of a label audit: check the data, record the layers, and name the examples."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn

from ifcomp._version import __version__
from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_labelled, check_same_order
from ifcomp.data.forms import Data, check_repeatable
from ifcomp.distributed import SAME_WEIGHTS, check_equal, process_info
from ifcomp.errors import EmptyDataError, SettingError
from ifcomp.evidence.collection import collect_evidence, stages
from ifcomp.evidence.features import FeatureReader, all_trainable
from ifcomp.evidence.members import Evidence
from ifcomp.io.checkpoints import Checkpoint
from ifcomp.io.fingerprints import fingerprint, short_digest
from ifcomp.io.resumable import NO_CHECKPOINT
from ifcomp.layers.inventory import take_inventory
from ifcomp.layers.probe import check_probe, take_probe
from ifcomp.layers.registry import Selection
from ifcomp.layers.threads import exclusive
from ifcomp.layers.verification import verified_recorder
from ifcomp.progress import known_length
from ifcomp.tasks.audit import LabelAudit


def read_evidence(
    model: nn.Module,
    data: Data,
    reference: Data | None,
    *,
    limit: int | None,
    seed: int,
    checkpoint: Checkpoint | None,
    progress: bool | None,
) -> tuple[Evidence, dict[str, Any]]:
    """Return the evidence of all layers about every label, and the settings of the audit.

    Args:
        model: The classifier.
        data: Labelled data to audit.
        reference: Labelled data of the predictors. None leaves each audited example out instead.
        limit: Memory limit of the tensors of a forward pass, in bytes.
        seed: Seed of projections and samples.
        checkpoint: Saves results from time to time.
        progress: Show a progress bar; None shows it on terminals.
    """
    if checkpoint is not None and process_info().world_size > 1:
        raise SettingError("With several processes an audit does not resume. Leave checkpoint= out.")
    first = first_labelled(data, "An audit", "data")
    if reference is not None:
        first_labelled(reference, "An audit", "reference")
    digest = short_digest(fingerprint(model))
    check_equal("The weights", digest, SAME_WEIGHTS)
    settings = {"model": digest, "seed": seed, "has_reference": reference is not None, "version": __version__}
    with exclusive(model), all_trainable(model), ExitStack() as stack:
        inventory = take_inventory(model, Selection(skip_uncovered=True))
        reader = FeatureReader(verified_recorder(model, inventory, first), first, limit)
        work = NO_CHECKPOINT
        if checkpoint is not None:
            recorder = reader.recorder
            key = {"work": "audit", **settings, "device": str(recorder.device), "max_memory": limit}
            rows = (known_length(data.batches) or 1) * first.size
            resumed = checkpoint.resume(key, stages(reference is not None), 8 * rows * (recorder.num_classes + 1))
            work = stack.enter_context(resumed)
            probe = work.settings.setdefault("probe", take_probe(model, replace(first, shared=recorder.shared)))
            check_probe(model, probe, f"The results in '{checkpoint.path}'")
            reader.microbatches.peaks = work.settings.setdefault("peaks", {})
        trusted = None if reference is None else reference.batches
        evidence = collect_evidence(reader, data.batches, trusted, seed=seed, progress=progress, work=work)
    return evidence, settings


def first_labelled(data: Data, reader: str, name: str) -> Batch:
    """Check labelled data that is read twice in the same order, and return its first batch."""
    check_same_order(data.batches, reader)
    check_repeatable(data, in_order=True)
    first = next(as_batches(data.batches), None)
    if first is None:
        raise EmptyDataError(f"{reader} needs at least one example, but the {name} is empty.")
    check_labelled(first)
    return first


def with_known_names(audit: LabelAudit, data: Data) -> LabelAudit:
    """Add the names of classes and examples of the data, if there is one per class and one per example."""
    classes = data.class_names if len(data.class_names or ()) == audit.pred_probs.shape[1] else None
    names = None if data.example_names is None else data.example_names()
    return audit.with_names(classes, names if len(names or ()) == len(audit.frame) else None)
