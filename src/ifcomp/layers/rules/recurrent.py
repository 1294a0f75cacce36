"""Recurrent modules: the projections of each layer and direction are linear blocks.

The module applies its parameters inside one function. While it is recorded its ``forward`` is replaced. The replacement
computes the states step by step without autograd. Then the projections of all steps are affine maps of known values,
and `Cell.connect` adds the gradient of the recurrence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ifcomp.blocks.kronecker import KroneckerBlock
from ifcomp.blocks.kronecker_inputs import KroneckerShape
from ifcomp.layers.layer import Emit, TrackedModule
from ifcomp.layers.registry import qualified_name, trainable_names
from ifcomp.layers.rules.linear import LinearLayer
from ifcomp.layers.rules.packing import clear, has_batch_order, pack, reverse, unpack

#: The hidden state, and for an LSTM the cell state.
States = tuple[Tensor, ...]


class Cell(ABC):
    """One step of a recurrent module, without its projections.

    Attributes:
        maps: The projections of each affine map; the last contains "hh". Projections that the module adds have the
            same output gradients and are one map of both inputs.
    """

    maps: tuple[tuple[str, ...], ...]

    @abstractmethod
    def step(self, projected: States, states: States) -> States:
        """The next states [B, H].

        Args:
            projected: The output of every map, [B, gates * H] each.
            states: States before the step, [B, H] each.
        """

    @abstractmethod
    def connect(self, projected: States, initial: States, states: States, weight: Tensor) -> States:
        """The given states, as differentiable functions of projections and initial states.

        Args:
            projected: The output of every map, [B, T, gates * H] each.
            initial: Initial states, [B, H] each.
            states: States after every step, [B, T, H] each.
            weight: Weight of the recurrent projection, [gates * H, H], a constant here.
        """


@dataclass(frozen=True)
class RecurrentLayer(LinearLayer):
    """A projection of a recurrent module. After the end of a packed sequence its inputs are zero.

    Attributes:
        ones: Number of trailing columns of ones.
        is_reverse: Whether the sequence is read from its end.
    """

    ones: int = 0
    is_reverse: bool = False

    def features(self, value: Tensor, kept: Tensor | None) -> Tensor | None:
        known = self.kept_positions(value)
        if known is None and kept is not None:
            known = kept.flip(1) if self.is_reverse else kept
        return super().features(value, known)

    def kept_positions(self, value: Tensor) -> Tensor | None:
        """Positions up to the last one that is not zero; None if no sequence ends before the others."""
        is_nonzero = value[..., : value.shape[-1] - self.ones].any(2)
        kept = is_nonzero.flip(1).int().cummax(1).values.flip(1).bool()
        return None if kept.all() else kept


@dataclass(frozen=True)
class AffineMap:
    """The sum of projections of one layer and direction.

    Attributes:
        name: Name of the block.
        suffix: Suffix of the parameters.
        projections: "ih", "hh" or both.
        trainable: Names of the trainable parameters in the module, weights before biases.
    """

    name: str
    suffix: str
    projections: tuple[str, ...]
    trainable: tuple[str, ...]

    def value(self, sources: Mapping[str, Tensor]) -> Tensor:
        """Inputs [B, T, J] of trainable weights, and 1 for the first of two trainable biases."""
        weights = [part for part in self.projections if f"weight_{part}_{self.suffix}" in self.trainable]
        columns = [sources[part] for part in weights]
        if len(self.trainable) - len(weights) > 1:
            columns.append(torch.ones_like(sources["hh"][..., :1]))
        return torch.cat(columns, -1) if columns else sources["hh"]

    def output(self, module: nn.RNNBase, sources: Mapping[str, Tensor]) -> Tensor:
        """The sum of the projections of the sources."""
        terms = [self._project(module, part, sources[part]) for part in self.projections]
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def _project(self, module: nn.RNNBase, part: str, value: Tensor) -> Tensor:
        bias = getattr(module, f"bias_{part}_{self.suffix}") if module.bias else None
        return F.linear(value, getattr(module, f"weight_{part}_{self.suffix}"), bias)

    def layer(self, prefix: str, module: nn.RNNBase) -> RecurrentLayer:
        """The layer of the map."""
        columns = sum(module.get_parameter(name).numel() for name in self.trainable)
        outputs = len(module.get_parameter(self.trainable[0]))
        has_bias = any(name.startswith("bias") for name in self.trainable)
        shape = KroneckerShape(1, outputs, columns // outputs, offsets=1, has_bias=has_bias)
        parameters = tuple(qualified_name(prefix, name) for name in self.trainable)
        block = KroneckerBlock(self.name, module.mode.lower(), parameters, columns, shape)
        biases = sum(name.startswith("bias") for name in self.trainable)
        return RecurrentLayer(
            block,
            has_weight=shape.in_features > has_bias,
            ones=max(0, biases - 1),
            is_reverse=self.suffix.endswith("_reverse"),
        )


@dataclass(frozen=True)
class Direction:
    """One direction of one layer.

    Attributes:
        suffix: Suffix of its parameters.
        is_reverse: Whether it reads the sequence from its end.
        maps: Its affine maps.
    """

    suffix: str
    is_reverse: bool
    maps: tuple[AffineMap, ...]


def tracked_recurrence(name: str, module: nn.RNNBase, cell: Cell) -> TrackedModule | None:
    """One Kronecker block for each affine map. None for a module that projects its hidden state.

    Inputs in another order than the batch are not recorded.
    """
    if module.proj_size:
        return None
    directions = _directions(name, module, cell)
    maps = [affine for direction in directions for affine in direction.maps if affine.trainable]

    def forward(emit: Emit, input: Tensor | PackedSequence, hx: Tensor | States | None = None) -> object:
        if not has_batch_order(input) or (module.training and module.dropout):
            return type(module).forward(module, input, hx)
        return run(module, cell, directions, emit, input, hx)

    return TrackedModule(module, tuple(affine.layer(name, module) for affine in maps), forward) if maps else None


def _directions(name: str, module: nn.RNNBase, cell: Cell) -> list[Direction]:
    """All directions in the order of the final states: those of the first layer, then those of the next."""
    directions = []
    for index in range(module.num_layers):
        for is_reverse in (False, True)[: 1 + module.bidirectional]:
            suffix = f"l{index}{'_reverse' if is_reverse else ''}"
            maps = []
            for parts in cell.maps:
                names = [f"{kind}_{part}_{suffix}" for kind in ("weight", "bias") for part in parts]
                block = suffix if len(parts) > 1 else f"{parts[0]}_{suffix}"
                trainable = tuple(trainable_names(module, *names))
                maps.append(AffineMap(qualified_name(name, block), suffix, parts, trainable))
            directions.append(Direction(suffix, is_reverse, tuple(maps)))
    return directions


def run(
    module: nn.RNNBase,
    cell: Cell,
    directions: list[Direction],
    emit: Emit,
    input: Tensor | PackedSequence,
    hx: Tensor | States | None = None,
) -> tuple[Tensor | PackedSequence, Tensor | States]:
    """Compute ``module.forward`` and report its affine maps. Examples are in the order of the batch."""
    values, lengths = unpack(input, module.batch_first)
    if hx is None:
        zeros = values.new_zeros(len(directions), len(values), module.hidden_size)
        hx = (zeros, zeros) if isinstance(module, nn.LSTM) else zeros
    given = (hx,) if isinstance(hx, Tensor) else hx
    outputs, finals = [], []
    for index, direction in enumerate(directions):
        initial = tuple(state[index] for state in given)
        output, final = _run_direction(module, cell, direction, emit, values, initial, lengths)
        outputs.append(output)
        finals.append(final)
        if len(outputs) == 1 + module.bidirectional:
            values, outputs = torch.cat(outputs, -1), []
    stacked = tuple(torch.stack(state) for state in zip(*finals, strict=True))
    return pack(values, input, module.batch_first), stacked if len(stacked) > 1 else stacked[0]


def _run_direction(
    module: nn.RNNBase,
    cell: Cell,
    direction: Direction,
    emit: Emit,
    values: Tensor,
    initial: States,
    lengths: Tensor | None,
) -> tuple[Tensor, States]:
    """Outputs [B, T, H] and final states [B, H]. Outputs after the end of a sequence are zero."""
    values = reverse(values, lengths) if direction.is_reverse else values
    weight = getattr(module, f"weight_hh_{direction.suffix}")
    with torch.no_grad():
        states = _scan(module, cell, direction, values, initial)
        previous = torch.cat([initial[0].unsqueeze(1).to(states[0]), states[0][:, :-1]], 1)
        previous = clear(previous, lengths)
    sources = {"ih": values, "hh": previous}
    projected = tuple(
        emit({affine.name: None}, affine.value(sources), affine.output(module, sources)) for affine in direction.maps
    )
    initial = tuple(state.to(projected[0].dtype) for state in initial)
    states = cell.connect(projected, initial, states, weight.detach().to(projected[0].dtype))
    outputs = clear(states[0], lengths)
    if lengths is None:
        final = tuple(state[:, -1] for state in states)
    else:
        final = tuple(state[torch.arange(len(state), device=state.device), lengths - 1] for state in states)
    return (reverse(outputs, lengths) if direction.is_reverse else outputs), final


def _scan(module: nn.RNNBase, cell: Cell, direction: Direction, values: Tensor, initial: States) -> States:
    """States after every step, [B, T, H] each."""
    weight = getattr(module, f"weight_hh_{direction.suffix}")
    sources = {"ih": values, "hh": torch.zeros_like(initial[0]).unsqueeze(1)}
    without_states = [affine.output(module, sources).expand(-1, values.shape[1], -1) for affine in direction.maps]
    states = tuple(state.to(without_states[0].dtype) for state in initial)
    steps = []
    for projected in zip(*(part.unbind(1) for part in without_states), strict=True):
        states = cell.step((*projected[:-1], projected[-1] + F.linear(states[0], weight)), states)
        steps.append(states)
    return tuple(torch.stack(state, 1) for state in zip(*steps, strict=True))
