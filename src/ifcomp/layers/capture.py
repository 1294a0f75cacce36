"""Run the model once, then read the gradient of every layer output for as many cotangents as wanted.

The forward pass runs in eval mode, so examples are independent and one ordinary backward of the batch gives every
example's own output gradients at once. Backward is asked for layer outputs only: no weight gradient is ever formed.
The place to read is the autograd edge at the moment of the call, so an activation that works in place afterwards does
no harm.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ifcomp.batches import Batch, run_model
from ifcomp.errors import ModelError, NonFiniteError
from ifcomp.layers.block import IndexedBlock, KroneckerBlock, Layout, NormBlock, RecordedBlock, Site, Use
from ifcomp.layers.room import Room
from ifcomp.layers.wrappers import uncompiled

#: Half precision has its numbers between 2^-24 and 2^16: the largest of a cotangent is brought to this power of two, so
#: that those on the way back stay inside.
_HALF_EXPONENT = 8


@dataclass(frozen=True)
class Gradients:
    """Output gradients of one cotangent.

    Attributes:
        values: By the number of the edge of a recording; None, or not there, where nothing depends on it.
        unscale: What those of each example are to be multiplied by, [B]; None is 1.
        vmapped: Whether ``vmap`` runs over them, which knows not every operation.
    """

    values: Mapping[int, Tensor | None]
    unscale: Tensor | None = None
    vmapped: bool = False


@dataclass(frozen=True)
class Backward:
    """One backward of C' cotangents.

    Attributes:
        which: Of all that there are.
        gradients: Of the one cotangent, or of all of them with a first axis [C'].
        stacked: Whether they have this axis.
    """

    which: slice
    gradients: Gradients
    stacked: bool

    def each(self, read: Callable[[Gradients], Tensor]) -> Tensor:
        """What a function gives for every cotangent, [C', ...]; one call for all of them."""
        if not self.stacked:
            return read(self.gradients).unsqueeze(0)
        values = {number: value for number, value in self.gradients.values.items() if value is not None}
        unscale = self.gradients.unscale
        axes = 0, None if unscale is None else 0
        found: Tensor = torch.vmap(lambda own, factor: read(Gradients(own, factor, vmapped=True)), axes)(
            values, unscale
        )
        return found


def half_scales(cotangents: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Powers of two by which to multiply cotangents [..., B, K] for a backward in half precision, [..., B].

    A confident model's residuals ``p - e_y`` are below what half precision can hold. Examples are independent, so
    each may have its own scale. None for precisions with the range of float32.
    """
    if dtype != torch.float16:
        return None
    exponent = torch.frexp(cotangents.double().abs().amax(-1)).exponent
    return torch.exp2((_HALF_EXPONENT - exponent).double())


class Recording:
    """What one forward pass left: logits, and for every block its inputs and where to read its output gradients."""

    def __init__(self, batch: int, layouts: Mapping[str, Layout], dtype: torch.dtype, room: Room) -> None:
        self.batch = batch
        self.layouts = layouts
        self.dtype = dtype
        self._room = room
        self.logits: Tensor = torch.empty(0)
        self.precision = dtype
        self.uses: dict[str, list[Use]] = {}
        self._edges: dict[tuple[int, int], tuple[int, GradientEdge]] = {}
        self._normalised: dict[tuple[int, Layout], Tensor] = {}

    def add(self, name: str, value: Tensor, output: Tensor, part: slice | None) -> None:
        """Note one call of a layer."""
        edge = get_gradient_edge(output)
        self._edges.setdefault(_key(edge), (len(self._edges), edge))
        self.uses.setdefault(name, []).append(Use(value.detach(), edge, part, output.shape, value._version))

    def backwards(
        self,
        cotangents: Tensor,
        together: bool,
        blocks: Sequence[RecordedBlock],
        take: Callable[[RecordedBlock, Backward], None],
    ) -> None:
        """Gradients of ``sum(logits * cotangent)`` for cotangents [C, B, K]: one backward after the other, or together.

        Together, ``vmap`` puts the cotangents beside the batch in every operation of one backward; the forward pass
        is there once.

        Args:
            cotangents: [C, B, K].
            together: Whether in one backward.
            blocks: Those that are wanted; what was not used is left out.
            take: Called once for each of them and every backward.
        """
        if together:
            found = Backward(slice(0, len(cotangents)), self.backward(cotangents), stacked=True)
            for block in filter(self.used, blocks):
                take(block, found)
            return
        for index, cotangent in enumerate(cotangents):
            self.stream(cotangent, blocks, partial(_hand_on, take, slice(index, index + 1)))

    def backward(self, cotangent: Tensor) -> Gradients:
        """Gradients of ``sum(logits * cotangent)`` at every layer output; of all together for cotangents [C, B, K]."""
        edges = [edge for _, edge in self._edges.values()]
        cotangent, unscale = self._scaled(cotangent)
        found = self._run(cotangent, edges)
        if unscale is not None:
            check_half(found)
        return Gradients(dict(enumerate(found)), unscale)

    def stream(
        self, cotangent: Tensor, blocks: Iterable[RecordedBlock], take: Callable[[RecordedBlock, Gradients], None]
    ) -> None:
        """Gradients of one cotangent, handed on block by block, as soon as backward has reached all uses of a block.

        They are gone after that, and so their memory is used again and again, and is still in the cache.

        Args:
            cotangent: [B, K].
            blocks: Those that are wanted; what was not used is left out.
            take: Called once for each of them.
        """
        waiting = {block.name: block for block in blocks if block.name in self.uses}
        users: dict[int, list[str]] = {}
        for name in waiting:
            for number in {self._number(use.edge) for use in self.uses[name]}:
                users.setdefault(number, []).append(name)
        missing = Counter(name for names in users.values() for name in names)
        values: dict[int, Tensor | None] = {}
        finite: list[Tensor] = []
        cotangent, unscale = self._scaled(cotangent)

        def arrive(number: int, value: Tensor | None) -> None:
            if unscale is not None and value is not None:
                finite.append(value.isfinite().all())
            values[number] = value
            for name in users[number]:
                missing[name] -= 1
                if not missing[name]:
                    take(waiting.pop(name), Gradients(values, unscale))
            for other in [other for other in values if not any(name in waiting for name in users[other])]:
                del values[other]

        with ExitStack() as undo:
            for number, edge in self._edges.values():
                if number in users and number not in self._ends:
                    hook = edge.node.register_prehook(_arriving(arrive, number, edge.output_nr))
                    undo.callback(hook.remove)
            ends = {number: edge for number, edge in self._edges.values() if number in self._ends}
            for number, value in zip(ends, self._run(cotangent, list(ends.values())), strict=True):
                if number in users:
                    arrive(number, value)
        _check_finite(finite)
        for block in waiting.values():
            take(block, Gradients(values, unscale))

    def _run(self, cotangent: Tensor, edges: list[GradientEdge]) -> tuple[Tensor | None, ...]:
        if not edges:
            return ()
        pull = _pull_one if cotangent.dim() == 2 else _pull_stacked
        return pull(self.logits, edges, cotangent.to(self.logits.dtype))

    def _scaled(self, cotangent: Tensor) -> tuple[Tensor, Tensor | None]:
        """A cotangent in the range of half precision, and what its gradients are to be multiplied by."""
        scales = half_scales(cotangent, self.precision)
        return (cotangent, None) if scales is None else (cotangent * scales.unsqueeze(-1), scales.reciprocal())

    def _number(self, edge: GradientEdge) -> int:
        return self._edges[_key(edge)][0]

    @cached_property
    def _ends(self) -> set[int]:
        """Numbers of the edges below which there is no other: backward goes as far as these and passes all others."""
        nodes = {edge.node for _, edge in self._edges.values()}
        leads: dict[Node, bool] = {}

        def below(node: Node) -> list[Node]:
            return [lower for lower, _ in node.next_functions if lower is not None]

        stack = list(nodes)
        while stack:
            node = stack[-1]
            unknown = [lower for lower in below(node) if lower not in leads]
            if node not in leads and unknown:
                stack += unknown
            else:
                stack.pop()
                leads[node] = any(lower in nodes or leads[lower] for lower in below(node))
        return {number for number, edge in self._edges.values() if not leads[edge.node]}

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.logits.device

    def room(self, name: str, *shape: int) -> Tensor:
        """Memory for an intermediate result, with whatever was there before: see `Room`."""
        return self._room.take(name, shape, self.device)

    def used(self, block: RecordedBlock) -> bool:
        """Whether the layer was called at all."""
        return block.name in self.uses

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
            gradient = gradients.values.get(self._number(use.edge))
            if gradient is None:
                gradient = self.logits.new_zeros(use.shape)
            gradient = gradient if use.part is None else gradient[..., use.part]
            rows = layout.by_example(gradient, block.output_axes(gradient), self.batch).to(self.dtype)
            if gradients.unscale is not None:
                rows = rows * gradients.unscale.to(self.dtype).view(-1, *[1] * (rows.dim() - 1))
            found.append(rows)
        return found

    def columns(self, block: KroneckerBlock, examples: slice = slice(None)) -> Tensor:
        """Canonical inputs a [B, G, J, T] of a Kronecker block, the bias included; of some examples of the batch."""
        count = len(range(self.batch)[examples])
        if not block.has_weight:
            return torch.ones(count, block.groups, 1, self.positions(block), dtype=self.dtype, device=self.device)
        rows = (value[examples].to(self.dtype).flatten(0, 1) for value in self.inputs(block))
        columns = _concatenate([_positions_last(block.positions(each), count) for each in rows])
        if not block.has_bias:
            return columns
        ones = columns.new_ones(columns.shape[0], columns.shape[1], 1, columns.shape[3])
        return torch.cat([columns, ones], 2)

    def rotated_windows(self, block: KroneckerBlock, basis: Tensor, examples: slice) -> Tensor:
        """Inputs of a block with shared offsets, channels in their basis [G, C, C], as [B, G, T, J], the bias included.

        J is in the order of `KroneckerBlock.by_offset`. The next call overwrites what this one returns.
        """
        values = [value[examples].to(self.dtype) for value in self.inputs(block)]  # [B, R, features...]
        found = self.room("windows", len(values[0]), block.groups, self.positions(block), block.columns)
        start = 0
        for value in values:
            windows = block.rotated_windows(value.flatten(0, 1), basis)  # [B R, G, *positions, *kernel, C]
            windows = windows.unflatten(0, value.shape[:2]).transpose(1, 2)
            inner = windows.dim() // 2 + 1  # of G and each axis of positions one, of C and each axis of the kernel one
            size = windows.shape[2:inner].numel()
            part = found[:, :, start : start + size, : block.columns - block.has_bias]
            part.unflatten(3, windows.shape[inner:]).unflatten(2, windows.shape[2:inner]).copy_(windows)
            start += size
        if block.has_bias:
            found[..., -1] = 1
        return found

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


def _pull_one(logits: Tensor, edges: list[GradientEdge], cotangent: Tensor) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(logits, edges, cotangent, retain_graph=True, allow_unused=True)


def _pull_stacked(logits: Tensor, edges: list[GradientEdge], cotangents: Tensor) -> tuple[Tensor | None, ...]:
    reached: list[int] = []

    def pull(cotangent: Tensor) -> tuple[Tensor, ...]:
        found = dict(enumerate(_pull_one(logits, edges, cotangent)))
        reached[:] = [index for index, gradient in found.items() if gradient is not None]
        return tuple(gradient for gradient in found.values() if gradient is not None)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)  # fused attention is looped over
        stacked = dict(zip(reached, torch.vmap(pull)(cotangents), strict=True))
    return tuple(stacked.get(index) for index in range(len(edges)))


def check_half(gradients: Iterable[Tensor | None]) -> None:
    """Raise NonFiniteError if a backward in half precision left its range."""
    _check_finite([gradient.isfinite().all() for gradient in gradients if gradient is not None])


def _check_finite(finite: list[Tensor]) -> None:
    if finite and not torch.stack(finite).all():  # waits for the device once
        raise NonFiniteError(
            "Gradients overflow in float16, whose largest number is 65,504. Use model.float() or model.bfloat16(), and "
            "inputs of the same type."
        )


def _hand_on(
    take: Callable[[RecordedBlock, Backward], None], which: slice, block: RecordedBlock, gradients: Gradients
) -> None:
    take(block, Backward(which, gradients, stacked=False))


def _arriving(arrive: Callable[[int, Tensor | None], None], number: int, output: int) -> Callable[..., None]:
    return lambda gradients: arrive(number, gradients[output])


def _key(edge: GradientEdge) -> tuple[int, int]:
    return id(edge.node), edge.output_nr


def _positions_last(rows: Tensor, batch: int) -> Tensor:
    """[B*R, G, J, T] to [B, G, J, R*T]."""
    if rows.shape[0] == batch:
        return rows
    by_example: Tensor = rows.unflatten(0, (batch, -1))
    return by_example.permute(0, 2, 3, 1, 4).flatten(3)


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class Tape:
    """Watches the sites of a model while it runs."""

    def __init__(
        self, model: nn.Module, sites: tuple[Site, ...], layouts: Mapping[str, Layout], dtype: torch.dtype
    ) -> None:
        """Prepare, without touching the model yet.

        Args:
            model: The classifier.
            sites: What to watch.
            layouts: Where each block's batch axis is.
            dtype: In which precision canonical forms are given.
        """
        self.model = model
        self.sites = sites
        self.layouts = layouts
        self.dtype = dtype
        self.room = Room(dtype)
        self._recording: Recording | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Eval mode and all hooks for the length of the context; then the model is as it was."""
        with ExitStack() as undo:
            undo.enter_context(evaluating(self.model))
            undo.enter_context(uncompiled(self.model))
            for site in self.sites:
                if site.forward is None:
                    hook = site.module.register_forward_hook(self._hook(site), prepend=True, with_kwargs=True)
                    undo.callback(hook.remove)
                else:
                    site.module.forward = self._stand_in(site)
                    undo.callback(delattr, site.module, "forward")
            yield

    def record(self, batch: Batch) -> Recording:
        """Run the model on a batch inside `attached`."""
        recording = Recording(batch.size, self.layouts, self.dtype, self.room)
        self._recording = recording
        try:
            with torch.inference_mode(False), torch.enable_grad():  # whatever the loader's own modes are
                recording.logits, recording.precision = _run_cast(self.model, batch)
        finally:
            self._recording = None
        for site in self.sites:
            for block in site.blocks:
                recording.check_unchanged(block)
        return recording

    def _emit(self, site: Site, parts: Mapping[str, slice | None], value: Tensor, output: Tensor) -> Tensor:
        recording = self._recording
        if recording is None or not output.requires_grad:
            return output
        names = [block.name for block in site.blocks if block.name in parts]
        if recording.batch > 1 and any(self.layouts.get(name) is Layout.SHARED for name in names):
            value = value.expand(recording.batch, *value.shape[1:])
            output = output.expand(recording.batch, *output.shape[1:])
        for name in names:
            recording.add(name, value, output, parts[name])
        return output

    def _hook(self, site: Site) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            return self._emit(site, {site.blocks[0].name: None}, args[0] if args else kwargs["input"], output)

        return hook

    def _stand_in(self, site: Site) -> Callable[..., object]:
        def emit(parts: dict[str, slice | None], value: Tensor, output: Tensor) -> Tensor:
            return self._emit(site, parts, value, output)

        def forward(*args: Any, **kwargs: Any) -> object:
            assert site.forward is not None
            return site.forward(emit, *args, **kwargs)

        return forward


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The precision of the ``torch.autocast`` that the user is in; None outside of it."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _run_cast(model: nn.Module, batch: Batch) -> tuple[Tensor, torch.dtype]:
    """Logits, and the precision of a backward from them: that of the ``torch.autocast`` around, if there is one.

    Its copies of weights are not kept: those made without a graph, by a call before this one, would cut this one's.
    """
    device = next(model.parameters()).device
    cast = autocast_dtype(device)
    with torch.autocast(device.type, cast, enabled=cast is not None, cache_enabled=False):
        logits = run_model(model, batch)
    return logits, cast or logits.dtype


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode; afterwards each in the mode it had, and with the weights it had.

    An embedding with ``max_norm`` changes its weights whenever it is used.
    """
    training = [module for module in model.modules() if module.training]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    kept = [(module, module.weight.detach().clone()) for module in embeddings if module.max_norm is not None]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for embedding, weight in kept:
            embedding.weight.detach().copy_(weight)
