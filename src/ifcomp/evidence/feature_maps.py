"""Maps from raw to stored features: standardisation, and projection onto an approximate principal subspace.

The first forward pass over the data accumulates `Moments`. They give the map that the second pass applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ifcomp.distributed import all_gather_objects, all_reduce_sum

#: Largest number of features of one layer. More are projected to at most this number.
MAX_FEATURES = 1000

#: Largest number of elements of a sketch. More than 2^24 / 1000 features are projected to fewer than `MAX_FEATURES`.
_SKETCH_ELEMENTS = 2**24

#: Standard deviation relative to the largest magnitude below which a feature counts as constant.
_CONSTANT = 1e-6

#: Diagonal element of the triangular factor, relative to the largest, below which a direction is rounding error.
_RANK_TOLERANCE = 1e-8


@dataclass(frozen=True)
class FeatureMap:
    """Map from raw to stored features of one layer.

    Attributes:
        columns: Indices of the features that are not constant, [D'].
        mean: Mean of these features, [D']; 0 for counts of tokens.
        scale: Reciprocal standard deviation, or inverse document frequency of tokens, [D'].
        normalises: Whether rows are divided by their norm: counts of tokens.
        projection: Orthonormal columns, [D', d], or None.
    """

    columns: Tensor
    mean: Tensor
    scale: Tensor
    normalises: bool
    projection: Tensor | None

    @property
    def size(self) -> int:
        """Number of features after the projection."""
        return len(self.columns) if self.projection is None else self.projection.shape[1]

    def __call__(self, features: Tensor) -> Tensor:
        """Map raw features [B, D] to [B, size]."""
        values = (features[:, self.columns].double() - self.mean) * self.scale
        if self.normalises:
            values = torch.nn.functional.normalize(values, dim=1)
        values = values.to(features.dtype)
        return values if self.projection is None else values @ self.projection


class Sketch:
    """Sketch ``C Omega`` of the covariance C of wide features, with a Gaussian matrix Omega [D, d].

    Its columns span approximately the leading principal directions (a randomised range finder with one power
    iteration). It is accumulated in one pass, in float64.

    Attributes:
        total: Sum of the features, [D].
        products: Sum of ``x (x^T Omega)`` over the examples, [D, d].
    """

    def __init__(self, size: int, seed: int) -> None:
        columns = max(1, min(MAX_FEATURES, _SKETCH_ELEMENTS // size))
        generator = torch.Generator("cpu").manual_seed(seed)
        self._omega = torch.randn(size, columns, generator=generator, dtype=torch.float64)
        self.total = torch.zeros(size, dtype=torch.float64)
        self.products = torch.zeros_like(self._omega)

    def add(self, features: Tensor) -> None:
        """Add examples [B, D] in float64. Cost: 2 B D d multiplications."""
        self.total += features.sum(0)
        self.products.addmm_(features.T, features @ self._omega)

    def basis(self, columns: Tensor, scale: Tensor, count: int) -> Tensor:
        """Return an orthonormal basis [D', d] of the leading principal directions; d is at most the rank.

        Args:
            columns: Indices of the features, [D'].
            scale: Factors of these features, [D'].
            count: Number of examples.
        """
        centred = self.products - torch.outer(self.total, self.total @ self._omega) / count
        basis, triangle = torch.linalg.qr(centred[columns] * scale.unsqueeze(1))
        size = triangle.diagonal().abs()
        kept: Tensor = basis[:, size > _RANK_TOLERANCE * size.max()]
        return kept


class Moments:
    """Statistics of the raw features of one layer over examples, in float64.

    Args:
        size: Number of features D.
        counts_tokens: Whether the features are counts of tokens.
        seed: Seed of the sketch.

    Attributes:
        count: Number of examples.
        total: Sum of the features, [D].
        squares: Sum of the squared features, [D].
        nonzero: Number of examples in which a feature is not zero, [D].
        largest: Largest magnitude, [D].
        sketch: Sketch of the covariance if D is larger than `MAX_FEATURES`. Rows of counts are divided by their norm.
    """

    def __init__(self, size: int, counts_tokens: bool, seed: int) -> None:
        self.counts_tokens = counts_tokens
        self.count = 0
        self.total, self.squares, self.nonzero, self.largest = torch.zeros(4, size, dtype=torch.float64)
        self.sketch = Sketch(size, seed) if size > MAX_FEATURES else None

    @property
    def size(self) -> int:
        """Number of features D."""
        return len(self.total)

    def add(self, features: Tensor) -> None:
        """Add examples [B, D]."""
        values = features.double()
        self.count += len(values)
        self.total += values.sum(0)
        self.squares += values.square().sum(0)
        self.nonzero += (values != 0).sum(0)
        self.largest = torch.maximum(self.largest, values.abs().amax(0))
        if self.sketch is not None:
            self.sketch.add(torch.nn.functional.normalize(values, dim=1) if self.counts_tokens else values)

    def state(self) -> dict[str, Tensor]:
        """Return all statistics by name."""
        sketched = {} if self.sketch is None else {"sums": self.sketch.total, "products": self.sketch.products}
        count = torch.tensor(self.count)
        known = {"count": count, "total": self.total, "squares": self.squares, "nonzero": self.nonzero}
        return {**known, "largest": self.largest, **sketched}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Replace all statistics by those of `state`, in place."""
        for name, value in self.state().items():
            value.copy_(state[name])
        self.count = int(state["count"])

    def reduce(self) -> None:
        """Combine the moments of all processes, in place. Every process calls it."""
        count = torch.tensor(float(self.count), dtype=torch.float64)
        sketched = [] if self.sketch is None else [self.sketch.total, self.sketch.products]
        all_reduce_sum([count, self.total, self.squares, self.nonzero, *sketched])
        self.count = round(float(count))
        self.largest = torch.stack(all_gather_objects(self.largest)).amax(0)

    def feature_map(self, dtype: torch.dtype) -> FeatureMap | None:
        """Return the map of the layer; None if all features are constant. The projection has the given dtype."""
        mean = self.total / self.count
        deviation = (self.squares / self.count - mean.square()).clamp(min=0).sqrt()
        scale = ((1 + self.count) / (1 + self.nonzero)).log() if self.counts_tokens else 1 / deviation
        columns = ((deviation > _CONSTANT * self.largest) & (scale > 0)).nonzero().flatten()
        if not len(columns):
            return None
        centre = torch.zeros_like(mean) if self.counts_tokens else mean
        projection = None
        if self.sketch is not None and len(columns) > MAX_FEATURES:
            projection = self.sketch.basis(columns, scale[columns], self.count).to(dtype)
        return FeatureMap(columns, centre[columns], scale[columns], self.counts_tokens, projection)
