"""A model, its blocks and its data sizes, ready to be recorded: what curvature and influence work with."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from ifcomp.batches import Batch, check_inputs, check_labels
from ifcomp.layers.block import Block, IndexedBlock, KroneckerBlock, Layout, NormBlock, RecordedBlock
from ifcomp.layers.capture import Recording, Tape
from ifcomp.layers.examine import examine
from ifcomp.layers.inventory import keep_blocks, restrict, take_inventory, with_known
from ifcomp.layers.other import other_gradients
from ifcomp.layers.registry import Selection

LabelUse = Literal["needed", "optional", "unused"]

#: What one piece of a batch may hold, in bytes.
PIECE_BYTES = 384 * 2**20

#: More examples in a piece gain nothing.
_MOST_EXAMPLES = 256

#: Output gradients of so many cotangents are held at once: enough for large matrix products.
COTANGENTS_AT_ONCE = 16

#: Numbers that a recording holds for each number of a layer's output: the graph's activations and one layer's patches.
_ENTRIES_PER_OUTPUT = 4


class Session:
    """The model as it is recorded. Made from one real batch, on which every rule is checked."""

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        first_batch: Batch,
        likely: Mapping[str, Layout] | None = None,
        known: Collection[str] = (),
    ) -> None:
        """Check the model on a few examples and find where each layer's batch axis is.

        Args:
            model: The classifier.
            selection: What the user wants covered.
            first_batch: Some real data.
            likely: Layouts that an earlier session found.
            known: Names of the blocks that factors exist for already; empty for a new fit.
        """
        doubles = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = torch.float64 if doubles else torch.float32
        check_inputs(first_batch)
        start = with_known(model, selection, known)[1] if known else set()
        examined = examine(
            model,
            lambda demoted: take_inventory(model, selection, {*start, *demoted}),
            first_batch,
            self.dtype,
            likely or {},
        )
        if known:
            self.inventory = keep_blocks(examined.inventory, known)
        else:
            complete = take_inventory(model, selection)
            self.inventory = restrict(examined.inventory, selection.layers, complete, examined.order)
        self.layouts = examined.layouts
        self._tape = Tape(model, self.inventory.sites, examined.layouts, self.dtype)
        self._others = [block.name for block in self.inventory.others]
        with self.attached():
            recording = self._tape.record(first_batch.select(slice(0, 1)).to(self.device))
        self._room: dict[str, Tensor] = {}
        self.num_classes = recording.logits.shape[1]
        outputs = {
            block: sum(use.shape.numel() for use in recording.uses.get(block.name, [])) for block in self.recorded
        }
        self._entries_per_cotangent = sum(
            size for block, size in outputs.items() if not isinstance(block, NormBlock)
        ) + sum(block.size for block in self.inventory.others)
        self._entries_per_example = sum(outputs.values()) * _ENTRIES_PER_OUTPUT

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks."""
        return self.inventory.blocks

    @property
    def recorded(self) -> tuple[RecordedBlock, ...]:
        """Blocks that are read off modules."""
        return self.inventory.recorded

    @property
    def kronecker(self) -> tuple[KroneckerBlock | IndexedBlock, ...]:
        """Blocks with an eigenbasis."""
        return tuple(block for block in self.recorded if isinstance(block, KroneckerBlock | IndexedBlock))

    def zeros(self, *shape: int) -> Tensor:
        """An accumulator on the model's device."""
        with self.computing():
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The model in eval mode with hooks, for the length of the context."""
        with self._tape.attached():
            yield

    @staticmethod
    @contextmanager
    def computing() -> Iterator[None]:
        """No graph, and tensors that can be used later, whatever modes a loader left behind."""
        with torch.inference_mode(False), torch.no_grad():
            yield

    def pieces(self, batches: Iterable[Batch], cotangents: int, labels: LabelUse) -> Iterator[Batch]:
        """Check batches and split them so that a piece's recording, with its cotangents, fits in memory.

        Args:
            batches: What the user gave.
            cotangents: How many will be held at once.
            labels: Whether they must be there, are used if they are there, or are not used.
        """
        entries = self._entries_per_example + cotangents * self._entries_per_cotangent
        budget = PIECE_BYTES * 8 // torch.finfo(self.dtype).bits
        size = max(1, min(_MOST_EXAMPLES, budget // max(entries, 1)))
        for batch in batches:
            check_inputs(batch)
            unlike_labels = batch.labels is None or (labels == "unused" and batch.labels.is_floating_point())
            if labels == "needed" or not unlike_labels:
                batch = replace(batch, labels=check_labels(batch, self.num_classes))
            else:
                batch = replace(batch, labels=None)
            yield from (piece.to(self.device) for piece in batch.split(size))

    def record(self, piece: Batch) -> Recording:
        """Run the model on a piece, inside `attached`."""
        recording = self._tape.record(piece)
        for block in self.recorded:
            recording.check_layout(block)
        return recording

    def stacked_rows(self, block: KroneckerBlock, recording: Recording, cotangents: int) -> Tensor:
        """Room for the output gradients of all cotangents of a block, [B, G, C, O, T]: the same for every piece.

        Memory that is used again need not be asked for and cleared by the operating system each time.
        """
        shape = (recording.batch, block.groups, cotangents, block.rows, recording.positions(block))
        size = math.prod(shape)
        room = self._room.get(block.name)
        if room is None or len(room) < size:
            self._room[block.name] = room = self.zeros(size)
        return room[:size].view(shape)

    def other_gradients(self, piece: Batch, cotangents: Tensor) -> dict[str, Tensor]:
        """Per-example gradients [C, B, P] of the parameters that no rule covers."""
        if not self._others:
            return {}
        found = other_gradients(self.model, self._others, piece, cotangents)
        return {name: gradient.to(self.dtype) for name, gradient in found.items()}
