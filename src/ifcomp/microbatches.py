"""The size of microbatches, from measured peak memory.

The size of factors has a closed form. The peak of everything else is measured, once per input shape. Without a limit it
is extrapolated from one and two examples. With a limit, microbatches grow and each size is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, TypeVar

import torch

from ifcomp.data.batches import Batch
from ifcomp.data.checks import check_inputs, check_labels
from ifcomp.errors import MemoryLimitError
from ifcomp.memory import as_text, even_size, measured_peak

T = TypeVar("T")

#: Safety margin of extrapolated peaks.
_MARGIN = 1.15

#: Peak bytes of one microbatch without a limit. Larger microbatches are slower: glibc returns large freed buffers
#: to the system, and mapping them again takes time.
MICROBATCH_BYTES = 2**28

#: Largest number of examples in a microbatch; more gain nothing.
_MAX_EXAMPLES = 512

#: Largest number of cotangents whose output gradients are stacked.
_MAX_COTANGENTS = 16

#: A larger microbatch is measured only if it is larger by this factor.
_MIN_GROWTH = 1.5

#: Examples and cotangents at once of a measured microbatch.
Trial = tuple[int, int]

LabelUse = Literal["needed", "optional"]


def check_batch(batch: Batch, num_classes: int, labels: LabelUse) -> Batch:
    """Validate the inputs and labels of a batch.

    Args:
        batch: The batch.
        num_classes: K.
        labels: Whether labels are needed. Labels that are not needed are validated too, because regression and
            multi-label targets are errors.
    """
    check_inputs(batch)
    if labels == "needed" or batch.labels is not None:
        return replace(batch, labels=check_labels(batch, num_classes))
    return batch


class Microbatches:
    """Splits batches into microbatches whose work fits in memory.

    The peak of the first microbatches of each input shape is measured. Under a limit they have one example and one
    cotangent at a time, then one example and more cotangents, then more examples. The peak grows at most linearly in
    both numbers, and a larger microbatch is tried only if this bound fits. Without a limit, the peaks of one and two
    examples are extrapolated.

    Attributes:
        peaks: Measured peaks in bytes, by input shape and trial. They are plain JSON; a run that starts from them
            splits batches in the same way.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        limit: int | None = None,
        fixed_bytes: int = 0,
        peaks: dict[str, dict[str, int]] | None = None,
        repeat_trials: bool = False,
    ) -> None:
        """Start without measurements.

        Args:
            device: Device of the model.
            limit: Bytes that tensors may take in all; None aims at `MICROBATCH_BYTES` per microbatch.
            fixed_bytes: Bytes of factors and accumulators, which do not depend on the microbatch.
            peaks: Measurements of an earlier run, to which new ones are added.
            repeat_trials: Whether results of measured microbatches are discarded and computed again. The same call then
                gives the same bits each time. Steps that add to accumulators cannot be repeated.
        """
        self.device, self.limit, self.fixed_bytes, self._repeat = device, limit, fixed_bytes, repeat_trials
        self.peaks: dict[str, dict[str, int]] = {} if peaks is None else peaks

    @property
    def budget(self) -> int:
        """Bytes for one microbatch."""
        return MICROBATCH_BYTES if self.limit is None else self.limit - self.fixed_bytes

    def run(self, batch: Batch, cotangents: int, step: Callable[[Batch, int], T], work: str = "") -> Iterator[T]:
        """Run a step on consecutive microbatches.

        Args:
            batch: The examples.
            cotangents: Number of cotangents per example.
            step: Receives a microbatch on the model's device and the number of cotangents to stack at once.
            work: Name of the step. Steps of different memory need different names.

        Yields:
            The results of the step, in order.

        Raises:
            MemoryLimitError: If one example with one cotangent at a time exceeds the limit.
        """
        key = _shape_key(batch, cotangents, work)
        peaks = self.peaks.setdefault(key, {})
        start = 0
        while (trial := self._next_trial(peaks, batch.size - start, cotangents)) is not None:
            examples, chunk_size = trial
            with measured_peak(self.device) as peak:
                result = step(batch.select(slice(start, start + examples)).to(self.device), chunk_size)
            peaks = self.peaks[key] = {**peaks, _trial_key(trial): peak.size}  # other threads may read the old one
            self._check(peaks)
            if not self._repeat:
                start += examples
                yield result
            del result
        examples, chunk_size = self._choose(peaks)
        examples = even_size(batch.size - start, examples)
        for first in range(start, batch.size, max(1, examples)):
            yield step(batch.select(slice(first, min(first + examples, batch.size))).to(self.device), chunk_size)

    def predict(self, batch: Batch, cotangents: int) -> int:
        """Peak bytes for batches of this size and shape, from the measurements so far."""
        trials = _trials(self.peaks[_shape_key(batch, cotangents)])
        examples, chunk_size = self._choose(self.peaks[_shape_key(batch, cotangents)])
        examples, single = even_size(batch.size, examples), trials[1, chunk_size]
        return int(single + (examples - 1) * (trials.get((2, chunk_size), 2 * single) - single))

    def _next_trial(self, peaks: Mapping[str, int], left: int, cotangents: int) -> Trial | None:
        """The next microbatch to measure; None if no larger one is worth it."""
        if not peaks:
            return 1, 1 if self.limit is not None else min(cotangents, _MAX_COTANGENTS)
        if not left:
            return None
        trials = _trials(peaks)
        (examples, chunk_size), peak = max(trials.items())
        more = min(cotangents, _MAX_COTANGENTS, int(chunk_size * self._growth(peak)))
        if examples == 1 and more >= min(_MIN_GROWTH * chunk_size, _MAX_COTANGENTS, cotangents) and more > chunk_size:
            return 1, more
        if examples == 1:
            return (2, chunk_size) if left > 1 and self._growth(peak) >= 2 else None
        if self.limit is None:
            return None
        examples = min(left, _MAX_EXAMPLES, int(examples * self._growth(peak)))
        return (examples, chunk_size) if examples >= _MIN_GROWTH * max(trials)[0] else None

    def _choose(self, peaks: Mapping[str, int]) -> Trial:
        """The number of examples and cotangents at once that fit the budget."""
        trials = _trials(peaks)
        (examples, chunk_size), peak = max(trials.items())
        if self.limit is None and examples == 2:
            single = trials[1, chunk_size]
            slope = max(peak - single, 1)
            return max(1, min(_MAX_EXAMPLES, 1 + int((self.budget / _MARGIN - single) / slope))), chunk_size
        return max(1, min(_MAX_EXAMPLES, int(examples * self._growth(peak)))), chunk_size

    def _growth(self, peak: int) -> float:
        """The factor by which a microbatch with this peak may grow."""
        return self.budget / (_MARGIN * max(peak, 1))

    def _check(self, peaks: dict[str, int]) -> None:
        smallest = peaks[_trial_key(min(_trials(peaks)))]
        if self.limit is None or smallest <= self.budget:
            return
        needed = self.fixed_bytes + smallest
        raise MemoryLimitError(
            f"max_memory is {as_text(self.limit)} ({self.limit:,} bytes), but at least {needed:,} bytes "
            f"({as_text(needed)}) are needed: {as_text(self.fixed_bytes)} for the factors and "
            f"{as_text(needed - self.fixed_bytes)} for one example. Allow more, or cover fewer layers with layers=."
        )


def _trial_key(trial: Trial) -> str:
    return f"{trial[0]} x {trial[1]}"


def _trials(peaks: Mapping[str, int]) -> dict[Trial, int]:
    """Measured peaks by examples and cotangents at once."""
    keys = [tuple(map(int, key.split(" x "))) for key in peaks]
    return {(key[0], key[1]): peak for key, peak in zip(keys, peaks.values(), strict=True)}


def _shape_key(batch: Batch, cotangents: int, work: str = "") -> str:
    """The work, and the shapes and types of one example of a batch."""
    shapes = [
        f"{list(value.shape[1:] if has_axis else value.shape)} {value.dtype}"
        for value, has_axis in zip(batch.tensors(), batch.batched().values(), strict=True)
    ]
    return "; ".join([*batch.kwargs, *shapes, f"{cotangents} cotangents", *filter(None, [work])])
