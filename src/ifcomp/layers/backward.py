"""One backward after the other through the graph of a forward pass, asked for layer outputs only.

No weight gradient is ever formed. The place to read is the autograd edge at the moment of the call, so an activation
that works in place afterwards does no harm.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ifcomp.errors import NonFiniteError
from ifcomp.layers.block import RecordedBlock, Use

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


class Graph:
    """What autograd keeps of one forward pass: logits, and where to read the output gradients of every block."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Before the forward pass; dtype is that of its logits until it is known."""
        self.logits: Tensor = torch.empty(0)
        self.precision = dtype
        self.uses: dict[str, list[Use]] = {}
        self._edges: dict[tuple[int, int], tuple[int, GradientEdge]] = {}

    def add(self, name: str, value: Tensor, output: Tensor, part: slice | None) -> None:
        """Note one call of a layer."""
        edge = get_gradient_edge(output)
        self._edges.setdefault(_key(edge), (len(self._edges), edge))
        self.uses.setdefault(name, []).append(Use(value.detach(), edge, part, output.shape, value._version))

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.logits.device

    def used(self, block: RecordedBlock) -> bool:
        """Whether the layer was called at all."""
        return block.name in self.uses

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
            for number in {self.number(use.edge) for use in self.uses[name]}:
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

    def number(self, edge: GradientEdge) -> int:
        """The number of an edge of this graph."""
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
