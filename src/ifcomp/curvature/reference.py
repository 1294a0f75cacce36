"""The reference set: normalised penultimate features of a sample of the training examples.

The second pass of the fit collects them. OOD detection measures the distance of new inputs to them.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from ifcomp.data.batches import Batch
from ifcomp.layers.recorder import Recorder
from ifcomp.layers.recording import Recording
from ifcomp.precision import as_double, as_type_of

#: Largest number of examples of the reference set.
MAX_REFERENCE = 20_000

#: Largest number of elements of the reference set: 64 MiB in float32.
MAX_ELEMENTS = 2**24


def reference_size(count: int, features: int) -> int:
    """Number of examples of the reference set of ``count`` training examples with ``features`` features."""
    return min(count, MAX_REFERENCE, max(1, MAX_ELEMENTS // max(1, features)))


def reference_elements(recorder: Recorder, count: int) -> int:
    """Number of elements of the reference set; 0 for a model without penultimate features."""
    head = recorder.verified.head
    return 0 if head is None else reference_size(count, head.features) * head.features


class ReferenceSample:
    """Collects the features of a seeded sample of the training examples.

    Attributes:
        features: Normalised features [R, D] of the sample; zero for examples that were not seen by this process.
    """

    def __init__(self, features: Tensor, positions: Tensor) -> None:
        """Start with the buffer of the features, [R, D], and the sorted positions of the sample in the data, [R]."""
        self.features, self._positions = features, positions

    @classmethod
    def zeros(cls, recorder: Recorder, count: int, seed: int) -> Self | None:
        """Draw the sample; None for a model without penultimate features, or without examples.

        Args:
            recorder: Records the model.
            count: Number of training examples.
            seed: Seed of the sample.
        """
        head = recorder.verified.head
        if head is None or not count:
            return None
        size = reference_size(count, head.features)
        return cls(recorder.zeros(size, head.features), reference_positions(count, size, seed))

    def add(self, recording: Recording, batch: Batch) -> None:
        """Store the features of the examples of a microbatch that are in the sample."""
        ends = torch.tensor([batch.position, batch.position + batch.size], device="cpu")
        first, last = torch.searchsorted(self._positions, ends).tolist()
        if recording.penultimate is None or first == last:
            return
        rows = self._positions[first:last] - batch.position
        self.features[first:last] = as_type_of(unit_rows(recording.penultimate[rows]), self.features)


def reference_positions(count: int, size: int, seed: int) -> Tensor:
    """Positions of the reference set in the training data, increasing, [R].

    Args:
        count: Number of training examples.
        size: Number of examples R of the reference set.
        seed: Seed of the fit.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randperm(count, generator=generator, device="cpu")[:size].sort().values


def unit_rows(features: Tensor) -> Tensor:
    """Divide the rows of features [B, D] by their Euclidean norms, in float64. Rows of zeros are kept."""
    values = as_double(features)
    lengths: Tensor = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return values / lengths.clamp_min(torch.finfo(values.dtype).tiny)
