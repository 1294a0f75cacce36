"""Bytes of covariances, eigenbases and second moments, known before the first pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ifcomp.blocks.block import Block
from ifcomp.errors import MemoryLimitError
from ifcomp.memory import as_text

#: Matrices in float64 during an eigendecomposition: the matrix, the identity, their sum, the eigenvectors, and two of
#: workspace in LAPACK's divide and conquer.
_EIGEN_MATRICES = 6

#: Largest number of layers in a message.
_MAX_LAYERS = 5


def block_bytes(block: Block, itemsize: int) -> tuple[int, int, int]:
    """Bytes of second moments, input basis (or covariance) and output basis (or covariance) of a block."""
    moments, inputs, outputs = (0 if shape is None else math.prod(shape) * itemsize for shape in block.factor_shapes)
    return moments, inputs, outputs


def covariance_bytes(blocks: Sequence[Block], itemsize: int, fits: int = 1) -> int:
    """Bytes of the covariances of the first pass. Several fits share input covariances."""
    sizes = [block_bytes(block, itemsize) for block in blocks]
    return sum(inputs + fits * outputs for _, inputs, outputs in sizes)


def eigen_bytes(blocks: Sequence[Block], itemsize: int, fits: int = 1) -> int:
    """Bytes between the passes: covariances, eigenbases and the workspace of one decomposition."""
    largest = max((max(block_bytes(block, itemsize)[1:]) for block in blocks), default=0)
    return 2 * covariance_bytes(blocks, itemsize, fits) + largest * 8 * _EIGEN_MATRICES // itemsize


def factor_bytes(blocks: Sequence[Block], itemsize: int, fits: int = 1) -> int:
    """Bytes of the factors: eigenbases and second moments."""
    sizes = [block_bytes(block, itemsize) for block in blocks]
    return sum(inputs + fits * (moments + outputs) for moments, inputs, outputs in sizes)


def checkpoint_bytes(blocks: Sequence[Block], itemsize: int, fits: int = 1) -> int:
    """Bytes of the largest checkpoint of a fit: covariances and their eigenvectors, or the factors."""
    return max(2 * covariance_bytes(blocks, itemsize, fits), factor_bytes(blocks, itemsize, fits))


def check_factor_memory(
    blocks: Sequence[Block], itemsize: int, fits: int, limit: int | None, available: int | None
) -> None:
    """Raise MemoryLimitError if covariances, eigenbases and second moments alone exceed the limit or the free memory.

    Args:
        blocks: Blocks of the fit.
        itemsize: Bytes per element.
        fits: Number of fits in the same passes.
        limit: Limit of the user in bytes, if any.
        available: Free memory in bytes, if known.
    """
    allowed = min((size for size in (limit, available) if size is not None), default=None)
    needed = max(step(blocks, itemsize, fits) for step in (covariance_bytes, eigen_bytes, factor_bytes))
    if allowed is None or needed <= allowed:
        return
    largest = sorted(blocks, key=lambda block: -sum(block_bytes(block, itemsize)))[:_MAX_LAYERS]
    lines = [f"  {block.name or '(model)'}: {_describe(block, itemsize)}" for block in largest]
    limited = "max_memory is" if limit is not None and limit == allowed else "the free memory is"
    raise MemoryLimitError(
        f"The factors of this fit need {as_text(needed)} ({needed:,} bytes) at the peak, but {limited} "
        f"{as_text(allowed)}. The largest layers:\n" + "\n".join(lines) + "\nLeave layers out with layers=[...] or "
        "requires_grad_(False), share one input basis over the offsets of convolutions with sua=True, or use a "
        "machine with more memory."
    )


def _describe(block: Block, itemsize: int) -> str:
    moments, inputs, outputs = block_bytes(block, itemsize)
    _, input_basis, output_basis = block.factor_shapes
    parts = []
    if input_basis is not None:
        parts.append(f"{as_text(inputs)} for the covariance of {input_basis[-1]:,} inputs")
    if output_basis is not None:
        parts.append(f"{as_text(outputs)} for that of {output_basis[-1]:,} outputs")
    return ", ".join([*parts, f"{as_text(moments)} for second moments"])
