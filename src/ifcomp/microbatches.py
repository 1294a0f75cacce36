"""The size of microbatches, from measured peak memory.

The size of factors has a closed form. The peak of everything else is measured on microbatches of one and two examples
and extrapolated, once per input shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, TypeVar

import torch

from ifcomp.data.batches import Batch, check_inputs, check_labels
from ifcomp.errors import MemoryLimitError
from ifcomp.memory import as_text, even_size, measured_peak

T = TypeVar("T")

#: Safety margin of extrapolated peaks.
_MARGIN = 1.15

#: Peak bytes of one microbatch without a limit.
MICROBATCH_BYTES = 2**28

#: Largest number of examples in a microbatch; more gain nothing.
_MAX_EXAMPLES = 512

#: Largest number of cotangents whose output gradients are stacked.
_MAX_COTANGENTS = 16

#: Microbatches that are measured, as (examples, cotangents at once).
_TRIALS = ((1, 1), (1, 2), (2, 1))


LabelUse = Literal["needed", "optional", "unused"]


def check_batch(batch: Batch, num_classes: int, labels: LabelUse) -> Batch:
    """Validate the inputs and labels of a batch.

    Args:
        batch: The batch.
        num_classes: K.
        labels: Whether labels are needed, used if they are there, or not used.
    """
    check_inputs(batch)
    not_classes = batch.labels is None or (labels == "unused" and batch.labels.is_floating_point())
    if labels == "needed" or not not_classes:
        return replace(batch, labels=check_labels(batch, num_classes))
    return replace(batch, labels=None)


class Microbatches:
    """Splits batches into microbatches whose work fits in memory.

    The first microbatches of an input shape have one and two examples, and their peaks are measured. The peak is
    modelled as ``fixed + examples * (per_example + cotangents * per_cotangent)``. Slabs of gradients have a largest
    size, so the model is an upper bound for larger microbatches.

    Attributes:
        peaks: Measured peaks in bytes, by input shape and trial. Plain JSON: a resumed run that starts from it splits
            batches as the first run did.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        limit: int | None = None,
        held: int = 0,
        repeat_trials: bool = False,
    ) -> None:
        """Start without measurements.

        Args:
            device: Device of the model.
            limit: Bytes that tensors may take in all; None aims at `MICROBATCH_BYTES` per microbatch.
            held: Bytes of factors and accumulators, which do not depend on the microbatch.
            repeat_trials: Whether results of measured microbatches are discarded and computed again. The same call then
                gives the same bits each time. Steps that add to accumulators cannot be repeated.
        """
        self.device, self.limit, self.held, self._repeat = device, limit, held, repeat_trials
        self.peaks: dict[str, dict[str, int]] = {}

    @property
    def budget(self) -> int:
        """Bytes for one microbatch."""
        return MICROBATCH_BYTES if self.limit is None else self.limit - self.held

    def run(self, batch: Batch, cotangents: int, step: Callable[[Batch, int], T]) -> Iterator[T]:
        """Run a step on consecutive microbatches.

        Args:
            batch: The examples.
            cotangents: Number of cotangents per example.
            step: Receives a microbatch on the model's device and the number of cotangents to stack at once.

        Yields:
            The results of the step, in order.

        Raises:
            MemoryLimitError: If one example with one cotangent at a time exceeds the limit.
        """
        peaks = self.peaks.setdefault(_shape_key(batch, cotangents), {})
        start = 0
        while (trial := self._next_trial(peaks, batch.size - start, cotangents)) is not None:
            examples, at_once = trial
            with measured_peak(self.device) as peak:
                result = step(batch.select(slice(start, start + examples)).to(self.device), at_once)
            peaks[_trial_key(trial)] = peak.size
            self._check(peaks)
            if not self._repeat:
                start += examples
                yield result
            del result
        examples, at_once = self._choose(peaks, cotangents)
        examples = even_size(batch.size - start, examples)
        for first in range(start, batch.size, max(1, examples)):
            yield step(batch.select(slice(first, min(first + examples, batch.size))).to(self.device), at_once)

    def predict(self, batch: Batch, cotangents: int) -> int:
        """Peak bytes for batches of this size and shape, from the measurements so far."""
        peaks = self.peaks[_shape_key(batch, cotangents)]
        examples, at_once = self._choose(peaks, cotangents)
        return int(_model(peaks)(even_size(batch.size, examples), at_once))

    def _next_trial(self, peaks: dict[str, int], left: int, cotangents: int) -> tuple[int, int] | None:
        """The next microbatch to measure, or None if all useful ones are measured."""
        for examples, at_once in _TRIALS:
            if _trial_key((examples, at_once)) in peaks or examples > left or at_once > cotangents:
                continue
            bound = peaks.get("1 x 1", 0) * examples * at_once * _MARGIN
            if bound <= self.budget:
                return examples, at_once
        return None

    def _choose(self, peaks: dict[str, int], cotangents: int) -> tuple[int, int]:
        """The number of examples and cotangents at once that fit the budget."""
        peak, budget = _model(peaks), self.budget / _MARGIN
        at_once = largest(lambda count: peak(1, count) <= budget, 1, min(cotangents, _MAX_COTANGENTS))
        return largest(lambda count: peak(count, at_once) <= budget, 1, _MAX_EXAMPLES), at_once

    def _check(self, peaks: dict[str, int]) -> None:
        if self.limit is None or peaks["1 x 1"] <= self.budget:
            return
        needed = self.held + peaks["1 x 1"]
        raise MemoryLimitError(
            f"max_memory is {as_text(self.limit)} ({self.limit:,} bytes), but at least {needed:,} bytes "
            f"({as_text(needed)}) are needed: {as_text(self.held)} for the factors and "
            f"{as_text(needed - self.held)} for one example. Allow more, or cover fewer layers with layers=."
        )


def _trial_key(trial: tuple[int, int]) -> str:
    return f"{trial[0]} x {trial[1]}"


def _model(peaks: dict[str, int]) -> Callable[[int, int], float]:
    """Peak bytes by examples and cotangents at once. Without a measurement memory is taken to be proportional."""
    single = peaks["1 x 1"]
    per_cotangent = max(0, peaks.get("1 x 2", 2 * single) - single)
    per_example = max(per_cotangent, peaks.get("2 x 1", 2 * single) - single)
    fixed = max(0, single - per_example)
    return lambda examples, at_once: fixed + examples * (per_example + (at_once - 1) * per_cotangent)


def _shape_key(batch: Batch, cotangents: int) -> str:
    """The shapes and types of one example of a batch."""
    shapes = [
        f"{list(value.shape[1:] if value.dim() and len(value) == batch.size else value.shape)} {value.dtype}"
        for value in batch.tensors()
    ]
    return "; ".join([*batch.kwargs, *shapes, f"{cotangents} cotangents"])


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from low to high that fits; low if none does."""
    if fits(high):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
