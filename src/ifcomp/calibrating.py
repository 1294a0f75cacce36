"""Read held-out data and calibrate predictions on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch, as_batches
from ifcomp.data.checks import check_labelled, check_labels, check_same_order
from ifcomp.data.digests import DataDigest
from ifcomp.data.forms import Data, check_repeatable
from ifcomp.errors import DataError, IfcompWarning, LengthChangedError
from ifcomp.layers.forward import evaluating, run_model
from ifcomp.prediction import logits_and_influence
from ifcomp.progress import track
from ifcomp.scoring import Evaluation
from ifcomp.tasks.calibration_fit import FEW_EXAMPLES, MIN_EXAMPLES, HeldOut, fit_calibration, split_halves
from ifcomp.tasks.calibration_result import Calibration
from ifcomp.tasks.simple_scores import fit_temperature

#: Largest change of a logit between the two passes, relative to the largest logit. Rounding in bfloat16 is smaller.
_MAX_CHANGE = 0.05


def first_held_out(parts: Sequence[Data]) -> Batch:
    """The first batch of held-out data. Data that cannot be read twice in the same order is refused."""
    for data in parts:
        check_same_order(data.batches, "A calibration")
        check_repeatable(data, in_order=True)
    first = next(_batches(parts[0].batches), None)
    if first is None:
        raise _too_few(0)
    return first


def calibrate(
    evaluation: Evaluation,
    model: nn.Module,
    parts: Sequence[Data],
    settings: Mapping[str, Any],
    *,
    seed: int,
    progress: bool | None,
) -> Calibration:
    """Choose the temperature on logits, evaluate E[IF] at that temperature, and choose alpha.

    Args:
        evaluation: The recorded model and its curvature.
        model: The classifier.
        parts: Held-out data, and shifted data if there is any. Both with labels.
        settings: Settings to store in the result.
        seed: Seed of the split into halves and of the folds.
        progress: Show progress bars; None shows them on terminals.
    """
    first, second = DataDigest(), DataDigest()
    read = [_logits_and_labels(model, data, first, progress) for data in parts]
    count = len(read[0][1])
    if count < MIN_EXAMPLES:
        raise _too_few(count)
    if count < FEW_EXAMPLES:
        warnings.warn(
            f"{count} held-out examples are few: temperature, alpha and coverage are uncertain. Give {FEW_EXAMPLES} "
            "or more.",
            IfcompWarning,
            stacklevel=4,
        )
    logits, labels = (torch.cat(tensors) for tensors in zip(*read, strict=True))
    tuning, conformal = split_halves(count, seed)
    tuning = np.concatenate([tuning, np.arange(count, len(labels))])  # shifted data is for tuning only
    temperature = fit_temperature(logits[tuning], labels[tuning])
    expected = _expected_influence(evaluation, parts, temperature, logits, second, progress)
    if first.in_order != second.in_order:
        raise DataError(
            "The inputs or labels of the held-out data differ between two passes. Usual causes are random transforms "
            "and files that change. Give data that is the same each time it is iterated."
        )
    held_out = HeldOut(logits.numpy(), labels.numpy(), expected.numpy())
    sizes = {
        "held_out_examples": count,
        "shifted_examples": len(labels) - count,
        "tuning_examples": len(tuning),
        "conformal_examples": len(conformal),
        "seed": seed,
    }
    return fit_calibration(
        held_out.select(tuning),
        held_out.select(conformal),
        temperature,
        evaluation.factors.count,
        evaluation.effective_parameters or 1.0,
        {**settings, **sizes},
        seed=seed,
    )


def _batches(data: Iterable[Any]) -> Iterator[Batch]:
    return (batch for batch in as_batches(data) if batch.size)


def _logits_and_labels(
    model: nn.Module, data: Data, digest: DataDigest, progress: bool | None
) -> tuple[Tensor, Tensor]:
    """Logits [N, K] in float64 and labels [N], on the CPU. The data is added to the digest."""
    all_logits, all_labels = [torch.empty(0)], [torch.empty(0, dtype=torch.long)]
    device = next(model.parameters()).device
    for batch in digest.adding(_batches(track(data.batches, "logits", progress))):
        check_labelled(batch)
        with torch.no_grad(), evaluating(model):
            logits = run_model(model, batch.to(device)).cpu().double()
        all_logits.append(logits)
        all_labels.append(check_labels(batch, logits.shape[1]).cpu())
    return torch.cat(all_logits[1:] or all_logits), torch.cat(all_labels)


def _expected_influence(
    evaluation: Evaluation,
    parts: Sequence[Data],
    temperature: float,
    logits: Tensor,
    digest: DataDigest,
    progress: bool | None,
) -> Tensor:
    """E[IF] of all parts at a temperature, [N]. The data is added to the digest.

    Raises:
        DataError: If the logits are not those of the first pass.
    """
    batches = (batch for data in parts for batch in _batches(track(data.batches, "expected influence", progress)))
    again, expected = logits_and_influence(evaluation, digest.adding(batches), 1 / temperature)
    if len(again) != len(logits):
        raise LengthChangedError(
            f"The held-out data has {len(logits):,} examples in the first pass, but {len(again):,} in the second. Give "
            "data that can be iterated over twice."
        )
    if bool(((again - logits).abs() > _MAX_CHANGE * logits.abs().max()).any()):
        raise DataError(
            "The logits of the held-out data differ between two passes: the data is shuffled or transformed at random. "
            "Give the same examples in the same order on every pass."
        )
    return expected.double()


def _too_few(count: int) -> DataError:
    return DataError(
        f"A calibration needs at least {MIN_EXAMPLES} held-out examples, but got {count}: one half is for temperature "
        "and alpha, the other one for prediction sets."
    )
