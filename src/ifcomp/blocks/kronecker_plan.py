"""The plan of a Kronecker block for one input shape: when to rotate, which kernel, how much at once.

Rotating before the gradient is formed costs ``T J^2 + C T O^2`` multiplications per example, rotating it afterwards
``C O J^2 + C O^2 J``. Both give the same matrix.

*Direct* forms every rotated gradient D and sums ``D^2 W``: C T O J multiplications for C cotangents. *Pairs* never
forms a gradient (see `ifcomp.blocks.kronecker_forms`): T(T+1)/2 O J once, and C T(T+1)/2 O after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ifcomp.blocks.kronecker_inputs import KroneckerShape

Kernel = Literal["direct", "pairs"]

#: Entries of one slab of gradients: it stays in the cache while it is squared and summed.
SLAB_ENTRIES = 1 << 21

#: Multiplications that take as long as one access to memory outside the cache, and inside it.
_PER_ACCESS, _PER_CACHED_ACCESS = 24.0, 4.0

#: Largest condition at which *pairs* is used for T > 1. Its sum over pairs cancels where a gradient is small: the
#: relative error of *pairs* is about eps * condition, that of *direct* about eps^2 * condition.
MAX_CONDITION = 1e3


@dataclass(frozen=True)
class KroneckerPlan:
    """Rotation, kernel and slab size of one block.

    Attributes:
        kernel: The algorithm of the quadratic form.
        rotate_inputs_first: Rotate inputs (``T J^2``) instead of gradients (``C O J^2``).
        rotate_outputs_first: Rotate output gradients (``C T O^2``) instead of gradients (``C O^2 J``).
        examples: Examples per slab.
        columns: Inputs per slab.
    """

    kernel: Kernel
    rotate_inputs_first: bool
    rotate_outputs_first: bool
    examples: int
    columns: int


def make_plan(
    shape: KroneckerShape,
    positions: int,
    chunk_size: int,
    cotangents: int,
    condition: float,
    *,
    slab_entries: int = SLAB_ENTRIES,
) -> KroneckerPlan:
    """Choose by counting multiplications.

    A slab holds whole gradients of all cotangents, for as many examples as fit. If one example does not fit, a slab
    holds a part of the columns. If inputs are rotated after the product, a slab has all columns.

    Args:
        shape: G, O and J of the block. With shared offsets channels are rotated before they are unfolded.
        positions: T.
        chunk_size: C, the number of cotangents per call.
        cotangents: Number of cotangents in all calls together.
        condition: Largest inverse curvature times the mean curvature.
        slab_entries: Largest number of entries of a slab, and of its unfolded inputs.
    """
    groups, out_features, in_features = shape.groups, shape.out_features, shape.in_features
    inputs_first = shape.shares_offsets or positions <= chunk_size * out_features
    entries = groups * chunk_size * out_features * in_features
    examples = max(1, min(slab_entries // entries, slab_entries // (groups * in_features * positions)))
    columns = max(1, slab_entries // (groups * chunk_size * out_features)) if inputs_first else in_features
    return KroneckerPlan(
        kernel=_choose_kernel(out_features, in_features, positions, cotangents, condition),
        rotate_inputs_first=inputs_first,
        rotate_outputs_first=positions <= in_features,
        examples=examples,
        columns=min(columns, in_features),
    )


def _choose_kernel(out_features: int, in_features: int, positions: int, cotangents: int, condition: float) -> Kernel:
    """*Pairs* at one position; otherwise the cheaper kernel, and *pairs* only for well-conditioned curvature."""
    if positions == 1:
        return "pairs"
    if condition > MAX_CONDITION:
        return "direct"
    entries = out_features * in_features
    access = _PER_CACHED_ACCESS if entries <= SLAB_ENTRIES else _PER_ACCESS / 2  # half of a large slab is in the cache
    direct = cotangents * entries * (positions + 2 * access)
    per_pair = entries + _PER_ACCESS * (in_features + cotangents * out_features)
    return "pairs" if positions * (positions + 1) / 2 * per_pair < direct else "direct"
