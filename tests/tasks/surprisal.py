"""Surprisal of a score among held-out scores, by counting."""

import math
from collections.abc import Sequence


def slow_surprisal(value: float, held_out: Sequence[float]) -> float:
    """Count larger values; from the 90 % quantile on, an exponential tail with the mean excess."""
    ordered, count = sorted(held_out), len(held_out)
    start = ordered[math.floor(0.9 * (count - 1))]
    tail = [other - start for other in held_out if other > start]
    if value > start and tail:
        return (value - start) / (sum(tail) / len(tail)) - math.log((len(tail) + 0.5) / (count + 1))
    larger = sum(other > value for other in held_out) + 0.5 * sum(other == value for other in held_out)
    return -math.log((larger + 0.5) / (count + 1))
