"""Registry of corruptions: functions of float images, random streams and the parameter of a severity."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Float32 images [N, H, W, C] with values in [0, 1] and C = 1 or 3; results are clipped to this range.
Images = np.ndarray
#: Function that returns a new random generator for a purpose.
Streams = Callable[[str], np.random.Generator]
Apply = Callable[[Images, Streams, Any], Images]


@dataclass(frozen=True)
class Corruption:
    """A registered corruption.

    Attributes:
        apply: Function of images, random streams and a parameter.
        parameters: Parameters of the severities 1 to 5.
    """

    apply: Apply
    parameters: tuple[Any, ...]


REGISTRY: dict[str, Corruption] = {}


def corruption(*parameters: Any) -> Callable[[Apply], Apply]:
    """Register a function under its name with its parameters for severities 1 to 5."""

    def register(apply: Apply) -> Apply:
        REGISTRY[apply.__name__] = Corruption(apply, parameters)
        return apply

    return register


def streams(name: str, seed: int) -> Streams:
    """Return generators that depend on corruption, seed and purpose, but not on severity.

    Arrays [N, ...] are filled in order, so the numbers of the first images do not depend on N.
    """
    return lambda purpose: np.random.default_rng([seed, zlib.crc32(name.encode()), zlib.crc32(purpose.encode())])
