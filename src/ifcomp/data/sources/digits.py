"""``digits``: the handwritten digits of scikit-learn."""

from __future__ import annotations

import numpy as np

from ifcomp.data.sources.arrays import source_from_arrays
from ifcomp.data.sources.base import Source, SourceRequest


def open_digits(request: SourceRequest) -> Source:
    """Open the 1,797 handwritten digits of scikit-learn: [N, 1, 8, 8] with values in 0 ... 1."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.images / 16).astype(np.float32)[:, None]
    class_names = tuple(map(str, digits.target_names))
    return source_from_arrays(request.spec, x, digits.target, request.options, class_names)
