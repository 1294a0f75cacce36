"""What one forward pass left of every layer, in canonical form.

The forward pass runs in eval mode, so examples are independent and one ordinary backward of the batch gives every
example's own output gradients at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ifcomp.compiled import Windows
from ifcomp.errors import ModelError
from ifcomp.layers.backward import Gradients, Graph
from ifcomp.layers.block import IndexedBlock, KroneckerBlock, Layout, NormBlock, RecordedBlock, Use
from ifcomp.layers.room import Room


class Recording(Graph):
    """Inputs of every block, and its output gradients from a backward, by example."""

    def __init__(self, batch: int, layouts: Mapping[str, Layout], dtype: torch.dtype, room: Room) -> None:
        super().__init__(dtype)
        self.batch = batch
        self.layouts = layouts
        self.dtype = dtype
        self._room = room
        self._normalised: dict[tuple[int, Layout], Tensor] = {}

    def room(self, name: str, *shape: int) -> Tensor:
        """Memory for an intermediate result, with whatever was there before: see `Room`."""
        return self._room.take(name, shape, self.device)

    def inputs(self, block: RecordedBlock) -> list[Tensor]:
        """The block's inputs by example, one tensor [B, R, features...] a use."""
        layout = self.layouts[block.name]
        values = [use.value for use in self.uses.get(block.name, [])]
        return [layout.by_example(value, block.input_axes(value), self.batch) for value in values]

    def output_gradients(self, block: RecordedBlock, gradients: Gradients) -> list[Tensor]:
        """The block's output gradients by example, one tensor [B, R, features...] a use; zeros where unused."""
        layout = self.layouts[block.name]
        found = []
        for use in self.uses.get(block.name, []):
            gradient = gradients.values.get(self.number(use.edge))
            if gradient is None:
                gradient = self.logits.new_zeros(use.shape)
            gradient = gradient if use.part is None else gradient[..., use.part]
            rows = layout.by_example(gradient, block.output_axes(gradient), self.batch).to(self.dtype)
            if gradients.unscale is not None:
                rows = rows * gradients.unscale.to(self.dtype).view(-1, *[1] * (rows.dim() - 1))
            found.append(rows)
        return found

    def columns(self, block: KroneckerBlock, examples: slice | None = None, width: int | None = None) -> Tensor:
        """Canonical inputs a [B, G, J, T] of a Kronecker block, the bias included.

        Args:
            block: The block.
            examples: Some of the batch; the next call, for this or another block, overwrites what is returned for them.
                None is all of them, in memory of its own.
            width: J, or more: columns of zeros after the others.
        """
        count = self.batch if examples is None else len(range(self.batch)[examples])
        if not block.has_weight:
            return torch.ones(count, block.groups, 1, self.positions(block), dtype=self.dtype, device=self.device)
        values = [value[slice(None) if examples is None else examples].to(self.dtype) for value in self.inputs(block)]
        shape = (count, block.groups, width or block.columns, self.positions(block))
        found = values[0].new_empty(shape) if examples is None else self.room("windows", *shape)
        start = 0
        for value in values:  # [B, R, features...]
            view = block.positions(value.flatten(0, 1)).unflatten(0, value.shape[:2])  # [B, R, G, *J, *T]
            inner = view.dim() // 2 + 1  # J has as many axes as T, or one more
            view = view.movedim(1, inner)  # [B, G, *J, R, *T]
            size = view.shape[inner:].numel()
            part = found[:, :, : block.columns - block.has_bias, start : start + size]
            part.unflatten(3, view.shape[inner:]).unflatten(2, view.shape[2:inner]).copy_(view)
            start += size
        _complete(found, block)
        return found

    def windows(self, block: KroneckerBlock, examples: slice = slice(None)) -> Iterator[Windows]:
        """What positions see of the inputs of some examples, use by use: all that `columns` unfolds."""
        return (block.windows(value[examples].to(self.dtype)) for value in self.inputs(block))

    def rotated_windows(self, block: KroneckerBlock, basis: Tensor, examples: slice, width: int) -> Tensor:
        """Inputs of a block with shared offsets, channels in their basis [G, C, C], as [B, G, T, J], the bias included.

        J is in the order of `KroneckerBlock.by_offset`, with zeros after it where more columns are asked for. The next
        call overwrites what this one returns.
        """
        values = [value[examples].to(self.dtype) for value in self.inputs(block)]  # [B, R, features...]
        found = self.room("windows", len(values[0]), block.groups, self.positions(block), width)
        start = 0
        for value in values:
            windows = block.rotated_windows(value.flatten(0, 1), basis)  # [B R, G, *positions, *kernel, C]
            windows = windows.unflatten(0, value.shape[:2]).transpose(1, 2)
            inner = windows.dim() // 2 + 1  # of G and each axis of positions one, of C and each axis of the kernel one
            size = windows.shape[2:inner].numel()
            part = found[:, :, start : start + size, : block.columns - block.has_bias]
            part.unflatten(3, windows.shape[inner:]).unflatten(2, windows.shape[2:inner]).copy_(windows)
            start += size
        _complete(found.transpose(2, 3), block)
        return found

    def inside(self, block: KroneckerBlock) -> Tensor:
        """Whether a position has inputs at an offset, [T, offsets]: what is padding is zero. All unless shared."""
        if not block.shared_offsets:
            return torch.ones(self.positions(block), 1, dtype=torch.bool, device=self.device)
        parts = [block.inside(value.shape[3:]).repeat(value.shape[1], 1) for value in self.inputs(block)]
        return torch.cat(parts).to(self.device)

    def positions(self, block: KroneckerBlock) -> int:
        """T, the shared positions of a block over all its uses."""
        sizes = (use.shape.numel() // self.batch for use in self.uses[block.name])
        widths = (block.groups * block.rows if use.part is None else use.shape[-1] for use in self.uses[block.name])
        return sum(size // width for size, width in zip(sizes, widths, strict=True))

    def channels(self, block: KroneckerBlock) -> Tensor:
        """The channels of every input position of a block with shared offsets, [B, G, C, S]."""
        parts = [block.channel_rows(value.to(self.dtype).flatten(0, 1)) for value in self.inputs(block)]
        return _concatenate([_positions_last(part, self.batch) for part in parts])

    def rows(self, block: KroneckerBlock, gradients: Gradients) -> Tensor:
        """Canonical output gradients b [B, G, O, T] of a Kronecker block."""
        parts = [block.outputs(value.flatten(0, 1)) for value in self.output_gradients(block, gradients)]
        return _concatenate([_positions_last(part, self.batch) for part in parts])

    def indices(self, block: IndexedBlock) -> Tensor:
        """Indices [B, T] that an embedding looked up."""
        return torch.cat(self.inputs(block), 1)

    def looked_up(self, block: IndexedBlock, gradients: Gradients) -> Tensor:
        """Gradients [B, T, D] of what an embedding returned; zero at the padding index."""
        found = torch.cat(self.output_gradients(block, gradients), 1)
        return found if block.padding is None else found * (self.indices(block) != block.padding).unsqueeze(-1)

    def scale_and_shift(self, block: NormBlock, gradients: Gradients) -> Tensor:
        """Per-example gradient [B, P] of a normalisation layer."""
        uses = self.uses.get(block.name, [])
        parts = []
        for use, gradient in zip(uses, self.output_gradients(block, gradients), strict=True):
            factor = self._normalise(block, use) if block.has_weight else gradient
            scale, shift = block.reduce(gradient, factor, fused=not gradients.vmapped)
            both = block.has_weight and block.has_bias
            parts.append(torch.cat([scale, shift], 1) if both else scale if block.has_weight else shift)
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)

    def _normalise(self, block: NormBlock, use: Use) -> Tensor:
        """A norm's input before scale and shift, [B, R, features...]; kept, since every cotangent needs it."""
        layout = self.layouts[block.name]
        key = (id(use), layout)
        if key not in self._normalised:
            value = block.normalised(use.value)
            self._normalised[key] = layout.by_example(value, block.input_axes(value), self.batch).to(self.dtype)
        return self._normalised[key]

    def check_layout(self, block: RecordedBlock) -> None:
        """Raise ModelError if a block did not run as it did when it was examined."""
        layout = self.layouts.get(block.name)
        for use in self.uses.get(block.name, []):
            if layout is None or not layout.fits(use.value.shape, block.input_axes(use.value), self.batch, later=True):
                raise ModelError(
                    f"Layer '{block.name}' does not run as on the examples that were checked first: its input has "
                    f"shape {list(use.value.shape)} in a batch of {self.batch}. Begin with a batch in which every "
                    "layer runs as usual, or leave the layer out with layers= or requires_grad_(False)."
                )

    def check_unchanged(self, block: RecordedBlock) -> None:
        """Raise ModelError if an input that the gradient needs was changed in place after the layer had used it."""
        if block.reads_input and any(use.value._version != use.version for use in self.uses.get(block.name, [])):
            raise ModelError(
                f"The input of layer '{block.name}' is changed in place after the layer used it, so its gradient "
                "cannot be formed. Use the out-of-place operation there."
            )


def _complete(columns: Tensor, block: KroneckerBlock) -> None:
    """Put the input of the bias into columns [B, G, J, T], and zeros where more columns were asked for."""
    if block.has_bias:
        columns[:, :, block.columns - 1] = 1
    columns[:, :, block.columns :] = 0


def _positions_last(rows: Tensor, batch: int) -> Tensor:
    """[B*R, G, J, T] to [B, G, J, R*T]."""
    if rows.shape[0] == batch:
        return rows
    by_example: Tensor = rows.unflatten(0, (batch, -1))
    return by_example.permute(0, 2, 3, 1, 4).flatten(3)


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
