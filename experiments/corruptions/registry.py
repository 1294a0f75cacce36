"""A corruption is a function of float images, a random generator and one severity's parameter, found by its name."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Float32 images [N, H, W, C] with values in [0, 1] and C = 1 or 3; results are cut to that range.
Images = np.ndarray
#: A fresh generator for every kind of random number that a corruption draws, by what it is for.
Streams = Callable[[str], np.random.Generator]
Apply = Callable[[Images, Streams, Any], Images]


@dataclass(frozen=True)
class Corruption:
    """What a name stands for.

    Attributes:
        apply: Maps images, random streams and a parameter to corrupted images.
        parameters: One for each of the severities 1 to 5.
    """

    apply: Apply
    parameters: tuple[Any, ...]


REGISTRY: dict[str, Corruption] = {}


def corruption(*parameters: Any) -> Callable[[Apply], Apply]:
    """Register a function under its own name with its parameters for severity 1 to 5."""

    def register(apply: Apply) -> Apply:
        REGISTRY[apply.__name__] = Corruption(apply, parameters)
        return apply

    return register


def streams(name: str, seed: int) -> Streams:
    """Generators that depend on the corruption, the seed and the purpose, but not on severity.

    Each fills arrays [N, ...] in order, so the first images get the same numbers however many there are.
    """
    return lambda purpose: np.random.default_rng([seed, zlib.crc32(name.encode()), zlib.crc32(purpose.encode())])
