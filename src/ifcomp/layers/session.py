"""A model, its blocks and its data sizes, ready to be recorded: what curvature and influence work with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ifcomp.batches import Batch, check_inputs, check_labels
from ifcomp.layers.block import Block, IndexedBlock, KroneckerBlock, NormBlock, RecordedBlock
from ifcomp.layers.capture import Recording, Tape
from ifcomp.layers.examine import examine
from ifcomp.layers.inventory import Inventory
from ifcomp.layers.other import other_gradients

#: What one piece of a batch may hold, in bytes.
PIECE_BYTES = 512 * 2**20

#: More examples in a piece gain nothing.
_MOST_EXAMPLES = 64

#: Output gradients of so many cotangents are held at once: enough for large matrix products.
COTANGENTS_AT_ONCE = 16

#: Numbers that a recording holds for each number of a layer's output: the graph's activations and one layer's patches.
_ENTRIES_PER_OUTPUT = 4


class Session:
    """The model as it is recorded. Made from one real batch, on which every rule is checked."""

    def __init__(
        self, model: nn.Module, inventory_without: Callable[[Iterable[str]], Inventory], first_batch: Batch
    ) -> None:
        """Check the model on a few examples and find where each layer's batch axis is.

        Args:
            model: The classifier.
            inventory_without: Its inventory with some blocks demoted; see `examine`.
            first_batch: Some real data.
        """
        doubles = any(parameter.dtype == torch.float64 for parameter in model.parameters())
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = torch.float64 if doubles else torch.float32
        check_inputs(first_batch, "first batch")
        self.inventory, layouts = examine(model, inventory_without, first_batch.to(self.device), self.dtype)
        self._tape = Tape(model, self.inventory.sites, layouts, self.dtype)
        self._others = [block.name for block in self.inventory.others]
        with self.attached():
            recording = self.record(first_batch.select(slice(0, 1)), "first batch")
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
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The model in eval mode with hooks, for the length of the context."""
        with self._tape.attached():
            yield

    def record(self, batch: Batch, where: str) -> Recording:
        """Check a batch and run the model on it, inside `attached`."""
        batch = batch.to(self.device)
        check_inputs(batch, where)
        return self._tape.record(batch, where)

    def other_gradients(self, batch: Batch, cotangents: Tensor) -> dict[str, Tensor]:
        """Per-example gradients [C, B, P] of the parameters that no rule covers."""
        if not self._others:
            return {}
        found = other_gradients(self.model, self._others, batch.to(self.device), cotangents)
        return {name: gradient.to(self.dtype) for name, gradient in found.items()}

    def pieces(self, batch: Batch, cotangents: int) -> Iterator[Batch]:
        """Split a batch so that the recording of a piece, with the cotangents held at once, fits in memory."""
        entries = self._entries_per_example + min(cotangents, COTANGENTS_AT_ONCE) * self._entries_per_cotangent
        budget = PIECE_BYTES * 8 // torch.finfo(self.dtype).bits
        return batch.split(max(1, min(_MOST_EXAMPLES, budget // max(entries, 1))))

    def check_labels(self, batch: Batch, num_classes: int, where: str, needed: bool) -> Tensor | None:
        """Labels as integers; None where there are none, or none that could be labels, and they are not needed."""
        if not needed and (batch.labels is None or batch.labels.is_floating_point() or batch.labels.dim() != 1):
            return None
        return check_labels(batch.labels, num_classes, batch.size, where)
