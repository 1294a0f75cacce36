"""A model, its blocks and its data sizes, ready to be recorded: what curvature and influence work with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from ifcomp.data.batches import Batch
from ifcomp.data.checks import check_inputs, check_labels
from ifcomp.layers.backward import Backward, check_half, half_scales
from ifcomp.layers.block import Block, IndexedBlock, KroneckerBlock, Layout, NormBlock, RecordedBlock
from ifcomp.layers.capture import Recording
from ifcomp.layers.examine import examine
from ifcomp.layers.forward import autocast_dtype
from ifcomp.layers.inventory import keep_blocks, restrict, take_inventory, with_known
from ifcomp.layers.other import other_gradients
from ifcomp.layers.registry import Selection
from ifcomp.layers.room import keep_freed_memory
from ifcomp.layers.tape import Tape
from ifcomp.memory import NO_LIMIT, Budget, most

LabelUse = Literal["needed", "optional", "unused"]

#: What one piece of a batch may hold without a limit, in bytes.
PIECE_BYTES = 2**30

#: What is kept for the next call, in bytes: all of a piece, as a rule.
_KEPT_BYTES = 2**30

#: More examples in a piece gain nothing.
_MOST_EXAMPLES = 512

#: ... unless what autograd keeps of them all is smaller than this: if only the last layers are covered.
_SMALL_GRAPH = 1 << 20

#: Output gradients of so many cotangents are held at once: enough for large matrix products.
COTANGENTS_AT_ONCE = 16

#: Backwards of fewer examples are slow: it is better to hold fewer cotangents.
_FEW_EXAMPLES = 16


@dataclass(frozen=True)
class Footprint:
    """What an example of a certain shape leaves behind, in bytes; measured on one.

    Attributes:
        graph: What autograd keeps for backward, and the inputs of layers.
        gradients: Output gradients of one cotangent at all layers, and what backward needs on its way.
        streamed: What backward needs on its way alone: a skipped gradient, and one from which another is made.
        normalised: Inputs of normalisations, normalised.
        rows: Canonical output gradients of one cotangent: those that are stacked.
        positions: T of every Kronecker block that ran.
        passing: The example itself, and the largest input of a layer, padded or rotated.
        widest: The largest canonical input of a block.
        covered: What input covariances are made from, [G, C, T], by block: channels only where offsets are shared.
        filters: What quick backwards hold, whatever the number of examples is.
        turned: What the largest of them needs, with the gradients that are there at the time.
        images: Numbers of the largest padded input of every block that has windows.
    """

    graph: int
    gradients: int
    streamed: int
    normalised: int
    rows: int
    positions: Mapping[str, int]
    passing: int
    widest: int
    covered: Mapping[str, torch.Size]
    filters: int
    turned: int
    images: Mapping[str, int]


class Holds(Protocol):
    """Bytes that a step holds for so many examples of a shape and so many cotangents at once."""

    def __call__(self, footprint: Footprint, examples: int, cotangents: int) -> int: ...


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
        keep_freed_memory()
        self.model = model
        self.device = next(model.parameters()).device
        self.dtype = working_dtype(model)
        check_inputs(first_batch)
        start = with_known(model, selection, known)[1] if known else set()
        with torch.autocast(self.device.type, enabled=False):
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
        self._footprints: dict[object, Footprint] = {}
        self.num_classes = 0
        self.stacks_cotangents = stacks_cotangents(self.device)
        self._quick = False
        with self.attached():
            self.footprint(first_batch)

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

    def counter(self) -> Tensor:
        """A whole number on the model's device, 0."""
        with self.computing():
            return torch.zeros((), dtype=torch.int64, device=self.device)

    @property
    def item_bytes(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The model in eval mode with hooks, for the length of the context.

        Only covered parameters need gradients in it, so that autograd keeps nothing of the layers below the first.
        """
        owned = dict(self.model.named_parameters(remove_duplicate=False))  # a scripted model has no get_parameter
        covered = {id(owned[name]) for block in self.blocks for name in block.parameters}
        idle = [value for value in self.model.parameters() if value.requires_grad and id(value) not in covered]
        with self._tape.attached():
            try:
                for parameter in idle:
                    parameter.requires_grad_(False)
                yield
            finally:
                for parameter in idle:
                    parameter.requires_grad_(True)
                self._tape.room.clear(beyond=_KEPT_BYTES)

    def release(self) -> None:
        """Give back the memory that is kept for the next call."""
        self._tape.room.clear()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """No graph, full precision, and tensors that can be used later, whatever modes are on around."""
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield

    @property
    def autocast(self) -> str | None:
        """The precision of forward passes if it is not the model's own, in words."""
        found = autocast_dtype(self.device)
        return None if found is None else str(found)

    def pieces(
        self,
        batches: Iterable[Batch],
        cotangents: int,
        labels: LabelUse,
        *,
        budget: Budget = NO_LIMIT,
        holds: Holds | None = None,
        together: bool = False,
    ) -> Iterator[tuple[Batch, int]]:
        """Check batches and split them so that the work on a piece fits in memory.

        Args:
            batches: What the user gave.
            cotangents: How many there will be for each example.
            labels: Whether they must be there, are used if they are there, or are not used.
            budget: What may be held.
            holds: What the work on a piece holds; `recording_bytes` if nothing else is said.
            together: Whether all cotangents are needed at once.

        Yields:
            A piece on the model's device, and how many cotangents to work on at once.
        """
        if budget.limit is not None:
            self.release()  # what was kept had other limits
        for batch in batches:
            check_inputs(batch)
            unlike_labels = batch.labels is None or (labels == "unused" and batch.labels.is_floating_point())
            if labels == "needed" or not unlike_labels:
                batch = replace(batch, labels=check_labels(batch, self.num_classes))
            else:
                batch = replace(batch, labels=None)
            size, at_once = self.plan(batch, cotangents, budget, holds or self.recording_bytes, together)
            for piece in batch.split(size):
                yield piece.to(self.device), at_once

    def is_quick(self, budget: Budget) -> bool:
        """Whether layers may have a quicker backward than that of PyTorch, for which they need more memory."""
        return budget.limit is None and not self.stacks_cotangents

    def plan(
        self, batch: Batch, cotangents: int, budget: Budget, holds: Holds, together: bool = False
    ) -> tuple[int, int]:
        """How many examples of a batch to record at once, and how many cotangents to work on; inside `attached`."""
        self._quick = self.is_quick(budget)
        wanted = cotangents if together else min(cotangents, COTANGENTS_AT_ONCE)
        footprint, sensible = self.footprint(batch), PIECE_BYTES
        needs = partial(holds, footprint)
        examples = min(max(_MOST_EXAMPLES, _SMALL_GRAPH // max(footprint.graph, 1)), batch.size)
        if self.device.type == "cuda":
            sensible = max(sensible, torch.cuda.get_device_properties(self.device).total_memory // 4)
        room = budget.room(sensible)
        if self.stacks_cotangents and not together:
            wanted = most(lambda count: needs(examples, count) <= room, wanted, cotangents)
        elif wanted < cotangents and examples > 1 and needs(min(examples, _FEW_EXAMPLES), wanted) > room:
            wanted = -(-wanted // 2)  # products are large enough still, and pieces have twice as many examples
        return budget.plan(needs, examples, wanted, sensible, together)

    def footprint(self, batch: Batch) -> Footprint:
        """What an example of this batch's shape leaves behind; inside `attached`."""
        shape = (*batch.kwargs, *(_shape(value, batch.size) for value in batch.tensors()))
        if shape not in self._footprints:
            self._footprints[shape] = self._measure(batch.select(slice(0, 1)).to(self.device))
        return self._footprints[shape]

    def _measure(self, example: Batch) -> Footprint:
        own = {value.untyped_storage().data_ptr() for value in (*self.model.parameters(), *self.model.buffers())}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided and (storage := tensor.untyped_storage()).data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            recording = self._tape.record(example)
        self.num_classes = recording.logits.shape[1]
        self.stacks_cotangents = self.stacks_cotangents and _can_stack(recording)
        for uses in recording.uses.values():
            for use in uses:
                keep(use.value)
        outputs = {
            block.name: sum(use.shape.numel() for use in recording.uses.get(block.name, [])) for block in self.recorded
        }
        kronecker = [block for block in filter(recording.used, self.recorded) if isinstance(block, KroneckerBlock)]
        positions = {block.name: recording.positions(block) for block in kronecker}
        rows = {block.name: positions[block.name] * block.groups * block.rows for block in kronecker}
        rows |= {block.name: outputs[block.name] for block in self.recorded if isinstance(block, IndexedBlock)}
        norms = [block for block in self.recorded if isinstance(block, NormBlock)]
        inputs = [
            use.value.numel() for block in norms if block.has_weight for use in recording.uses.get(block.name, [])
        ]
        columns = {block.name: block.groups * block.columns * positions[block.name] for block in kronecker}
        covered = {
            block.name: recording.channels(block).shape[1:]
            if block.shared_offsets
            else torch.Size((block.groups, block.columns, positions[block.name]))
            for block in kronecker
        }
        item, widest_output = self.item_bytes, max(outputs.values(), default=0)
        filters, turned = self._quick_holdings(recording)
        return Footprint(
            graph=sum(kept.values()) + recording.logits.nbytes,
            gradients=(sum(outputs.values()) + 2 * widest_output) * item,
            streamed=3 * widest_output * item,
            normalised=sum(inputs) * item,
            rows=(sum(rows.values()) + sum(block.size for block in norms)) * item,
            positions=positions,
            passing=sum(value.nbytes for value in example.tensors())
            + 2 * max((use.value.nbytes for uses in recording.uses.values() for use in uses), default=0),
            widest=max(columns.values(), default=0) * item,
            covered=covered,
            filters=sum(filters) * item,
            turned=max(turned, default=0) * item,
            images={
                block.name: max(own.images.numel() for own in recording.windows(block))
                for block in kronecker
                if block.has_windows
            },
        )

    def _quick_holdings(self, recording: Recording) -> tuple[list[int], list[int]]:
        """Numbers that quick backwards hold: filters of every layer, and for an example with all gradients there."""
        filters, turned = [], []
        for site in self.inventory.sites:
            uses = recording.uses.get(site.blocks[0].name, [])
            if site.quick is None:
                continue
            own = [use for use in uses if use.value.dtype == self.dtype]
            quick = [use for use in own if site.quick.pays(use.value, len(use.value) * _MOST_EXAMPLES)]
            held = [site.quick.holds(use.value.shape[1:]) for use in quick]
            filters += [weights for weights, _ in held[:1]]
            turned += [
                len(use.value) * each + 3 * max(use.shape.numel(), use.value.numel())
                for (_, each), use in zip(held, quick, strict=True)
            ]
        return filters, turned

    def recording_bytes(self, footprint: Footprint, examples: int, cotangents: int, inputs: int | None = None) -> int:
        """What most work holds: a recording, the stacked output gradients, and one backward, or one layer's inputs as
        they are unfolded and rotated.

        Parameters that no rule covers have a graph and gradients of their own. Labels are in float64.

        Args:
            footprint: Of an example.
            examples: In the piece.
            cotangents: At once.
            inputs: Bytes of the layer's inputs; without it those of all examples, twice.
        """
        others = sum(block.size for block in self.inventory.others) * self.item_bytes
        again = footprint.graph + footprint.gradients if others else 0
        each = footprint.graph + footprint.normalised + again + cotangents * (footprint.rows + 2 * others)
        inputs = 2 * examples * footprint.widest if inputs is None else inputs
        passing = max(self.backward_bytes(footprint, examples, cotangents), inputs + examples * footprint.passing)
        return examples * each + passing + self.label_bytes(examples, cotangents)

    def backward_bytes(self, footprint: Footprint, examples: int, cotangents: int) -> int:
        """Output gradients of one backward: of all cotangents, or those of one that are there at a time."""
        if self.stacks_cotangents:
            return examples * footprint.gradients * cotangents
        return examples * max(footprint.streamed, footprint.turned if self._quick else 0)

    def label_bytes(self, examples: int, cotangents: int) -> int:
        """Distributions over labels, and cotangents as they are made and used, in float64."""
        return 8 * examples * self.num_classes * (6 + 2 * cotangents)

    def record(self, piece: Batch) -> Recording:
        """Run the model on a piece, inside `attached`."""
        recording = self._tape.record(piece, self._quick)
        for block in self.recorded:
            recording.check_layout(block)
        return recording

    def backwards(
        self,
        recording: Recording,
        cotangents: Tensor,
        blocks: Sequence[RecordedBlock],
        take: Callable[[RecordedBlock, Backward], None],
    ) -> None:
        """Hand output gradients of cotangents [C, B, K] to ``take``, from as many backwards as suit the device."""
        recording.backwards(cotangents, self.stacks_cotangents, blocks, take)

    def stacked_rows(self, block: KroneckerBlock, recording: Recording, cotangents: int) -> Tensor:
        """Room for the output gradients of all cotangents of a block, [B, G, C, O, T]: the same for every piece."""
        shape = (recording.batch, block.groups, cotangents, block.rows, recording.positions(block))
        return recording.room(f"rows of {block.name}", *shape)

    def other_gradients(self, piece: Batch, cotangents: Tensor) -> dict[str, Tensor]:
        """Per-example gradients [C, B, P] of the parameters that no rule covers."""
        if not self._others:
            return {}
        scales = half_scales(cotangents, next(self.model.parameters()).dtype)
        if scales is None:
            found = other_gradients(self.model, self._others, piece, cotangents)
            return {name: gradient.to(self.dtype) for name, gradient in found.items()}
        found = other_gradients(self.model, self._others, piece, cotangents * scales.unsqueeze(-1))
        check_half(found.values())
        unscale = scales.reciprocal().to(self.dtype).unsqueeze(-1)
        return {name: gradient.to(self.dtype) * unscale for name, gradient in found.items()}


def stacks_cotangents(device: torch.device) -> bool:
    """Whether the cotangents that are worked on at once go through one backward.

    One at a time leaves a GPU idle. On a CPU nothing is gained, and what a backward touches outgrows the cache.
    """
    return device.type == "cuda"


def _can_stack(recording: Recording) -> bool:
    """Whether ``vmap`` can run the model's backward; not if its own code decides by values of gradients, for one."""
    cotangents = torch.zeros(2, *recording.logits.shape, device=recording.device)
    try:
        recording.backward(cotangents)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def working_dtype(model: nn.Module) -> torch.dtype:
    """The precision of canonical forms and factors: float64 for a model that has it, else float32."""
    doubles = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    return torch.float64 if doubles else torch.float32


def _shape(value: Tensor, size: int) -> object:
    """The shape of one example of an input, or of an input that has no batch axis."""
    return tuple(value.shape[1:]) if value.dim() and len(value) == size else tuple(value.shape), value.dtype
