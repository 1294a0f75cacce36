"""Blocks and recordings without a model: sizes alone, or inputs that are typed in."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ifcomp.layers.block import IndexedBlock, KroneckerBlock, OtherBlock
from ifcomp.layers.session import Footprint


@dataclass(frozen=True)
class Kronecker(KroneckerBlock):
    """A block of some shape that no model has."""

    def input_axes(self, value: Tensor) -> int:
        raise NotImplementedError

    def positions(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def outputs(self, rows: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Indexed(IndexedBlock):
    """A table of some shape that no model has."""

    def input_axes(self, value: Tensor) -> int:
        raise NotImplementedError


def kronecker(name: str, groups: int, rows: int, channels: int, offsets: int = 1, bias: bool = True) -> Kronecker:
    columns = channels if offsets == 1 else channels * offsets + bias
    size = groups * rows * columns
    return Kronecker(name, "", (name,), size, groups, rows, channels, offsets, True, bias, 0)


def table(name: str, entries: int, width: int) -> Indexed:
    return Indexed(name, "", (name,), entries * width, entries, width, None)


def other(name: str, size: int) -> OtherBlock:
    return OtherBlock(name, "", (name,), size)


def footprint(**sizes: object) -> Footprint:
    """Nothing but what is named."""
    names = ("graph", "gradients", "streamed", "normalised", "rows", "passing", "widest", "filters", "turned")
    return Footprint(**{**dict.fromkeys(names, 0), "positions": {}, "covered": {}, "images": {}, **sizes})


@dataclass(frozen=True)
class Recorded:
    """A forward pass with these inputs of a block, [B, G, J, T]; where offsets are shared, of one channel each."""

    inputs: Tensor

    @property
    def batch(self) -> int:
        return len(self.inputs)

    def positions(self, _: KroneckerBlock) -> int:
        return self.inputs.shape[3]

    def inside(self, block: KroneckerBlock) -> Tensor:
        return torch.ones(self.inputs.shape[3], block.offsets, dtype=torch.bool)

    def columns(self, block: KroneckerBlock, examples: slice, width: int) -> Tensor:
        assert not block.shared_offsets
        return F.pad(self.inputs[examples], (0, 0, 0, width - block.columns))

    def room(self, _: str, *shape: int) -> Tensor:
        return self.inputs.new_full(shape, torch.nan)

    def rotated_windows(self, block: KroneckerBlock, basis: Tensor, examples: slice, width: int) -> Tensor:
        assert block.shared_offsets
        return F.pad(self.inputs[examples].transpose(2, 3) * basis, (0, width - block.columns))
