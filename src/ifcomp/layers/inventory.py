"""The inventory: every trainable parameter is in a block, left out on request, or an error."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ifcomp.blocks.block import Block
from ifcomp.blocks.diagonal import DiagonalBlock
from ifcomp.errors import ModelError, SettingError, UncoveredParametersError
from ifcomp.layers.bare import BareParameterLayer
from ifcomp.layers.coverage import Coverage, CoverageRow
from ifcomp.layers.layer import Layer, TrackedModule
from ifcomp.layers.model_checks import check_model
from ifcomp.layers.registry import Selection, find_rule, qualified_name, sources, supported_types


@dataclass(frozen=True)
class Inventory:
    """All blocks of a model.

    Attributes:
        tracked: Modules that the recorder hooks, with their layers.
        bare: Parameters that are used without a module.
        others: Blocks of parameters without a layer rule.
        left_out: Parameters outside of all blocks, with the reason.
        sizes: Number of elements of every parameter.
    """

    tracked: tuple[TrackedModule, ...]
    bare: tuple[Layer, ...]
    others: tuple[Block, ...]
    left_out: tuple[CoverageRow, ...]
    sizes: Mapping[str, int]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers: those of modules in the order of the model, then parameters that are used without a module."""
        return (*(layer for tracked in self.tracked for layer in tracked.layers), *self.bare)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks."""
        return (*(layer.block for layer in self.layers), *self.others)

    @property
    def coverage(self) -> Coverage:
        """The coverage table."""
        return Coverage((*(self._row(block, block.treatment, True) for block in self.blocks), *self.left_out))

    def demote(self, names: Collection[str]) -> Inventory:
        """Replace the blocks of modules by one diagonal block per parameter.

        Args:
            names: Names of blocks. All blocks of their modules are demoted.
        """
        demoted = [tracked for tracked in self.tracked if any(layer.name in names for layer in tracked.layers)]
        parameters = [name for tracked in demoted for layer in tracked.layers for name in layer.block.parameters]
        others: list[Block] = [
            DiagonalBlock(name, "parameter", (name,), self.sizes[name]) for name in dict.fromkeys(parameters)
        ]
        others += [layer.block for layer in self.bare if layer.name in names]
        kept = [tracked.restrict(() if tracked in demoted else tracked.layers) for tracked in self.tracked]
        return replace(
            self,
            tracked=tuple(filter(None, kept)),
            bare=tuple(layer for layer in self.bare if layer.name not in names),
            others=(*self.others, *others),
        )

    def by_function(self, names: Collection[str]) -> Inventory:
        """Record modules by the functions that use their weights, where that is possible.

        The bias becomes a bare parameter, because the parent module may use another bias.

        Args:
            names: Names of blocks of modules that are not called.
        """
        tracked, bare = [], list(self.bare)
        for module in self.tracked:
            function = None
            if not module.by_function and any(layer.name in names for layer in module.layers):
                weights = module.restrict(layer.without_bias() for layer in module.layers)
                function = None if weights is None else as_function(weights)
            if function is not None:
                kept = {name for layer in function.layers for name in layer.block.parameters}
                rest = [name for layer in module.layers for name in layer.block.parameters if name not in kept]
                bare += [bare_layer(name, self.sizes[name]) for name in rest]
            tracked.append(function or module)
        return replace(self, tracked=tuple(tracked), bare=tuple(bare))

    def keep(self, names: Collection[str]) -> Inventory:
        """Keep only the blocks with these names."""
        tracked = [module.restrict(layer for layer in module.layers if layer.name in names) for module in self.tracked]
        left_out = [self._row(block, "not in layers=", False) for block in self.blocks if block.name not in names]
        return replace(
            self,
            tracked=tuple(filter(None, tracked)),
            bare=tuple(layer for layer in self.bare if layer.name in names),
            others=tuple(block for block in self.others if block.name in names),
            left_out=(*self.left_out, *left_out),
        )

    def _row(self, block: Block, treatment: str, covered: bool) -> CoverageRow:
        """A row of the coverage table. The size of an effective weight is that of the parameters behind it."""
        effective = any(layer.arguments and layer.block is block for layer in self.layers)
        size = sum(self.sizes[name] for name in block.parameters) if effective else block.size
        return CoverageRow(_printed(block.name), block.kind, treatment, size, covered)

    def demote_to(self, names: Collection[str]) -> Inventory:
        """Demote blocks that the factors contain only as diagonal blocks of single parameters."""
        split = {
            layer.name
            for layer in self.layers
            if layer.name in names and any(other in names for other in layer.block.parameters if other != layer.name)
        }
        return self.by_function(split).demote(
            {
                layer.name
                for layer in self.layers
                if layer.name not in names and any(parameter in names for parameter in layer.block.parameters)
            }
        )

    def select(self, layers: str | tuple[str, ...] | None, order: Sequence[str] | None = None) -> set[str]:
        """Names of the blocks, and of their parameters, that ``layers`` selects.

        The name of a parameter selects its blocks. If they are demoted, it selects the parameter alone.

        Args:
            layers: None for all; ``"last"``; or names and shell-style patterns.
            order: Names of the layers in the order of the forward pass; None for the order of definition.

        Raises:
            SettingError: If a pattern matches nothing.
        """
        chosen = {block.name for block in self.blocks} if layers is None else _matching(self, layers, order)
        whole = {name for block in self.blocks if block.name in chosen for name in (block.name, *block.parameters)}
        return chosen | whole | {block.name for block in self.blocks if not chosen.isdisjoint(block.parameters)}


def take_inventory(model: nn.Module, selection: Selection) -> Inventory:
    """Assign every parameter of a model to a block, or give the reason why it is in none.

    Args:
        model: The classifier.
        selection: Which parameters the user wants covered, and how.

    Raises:
        UncoveredParametersError: Lists all parameters that cannot be covered.
        ModelError: If no parameter is trainable.
        NonFiniteError: If a parameter or buffer is not finite.
    """
    check_model(model)
    owned = [
        (qualified_name(prefix, name), parameter)
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    trainable = {name: parameter for name, parameter in owned if parameter.requires_grad}
    _check_trainable(owned, trainable)
    sizes = {name: parameter.numel() for name, parameter in owned}
    offenders = dict(_offenders(model))
    if offenders and not selection.skip_uncovered:
        raise _uncovered(offenders, sizes)
    owners = Counter(id(parameter) for _, parameter in owned)
    tied = {name for name, parameter in owned if owners[id(parameter)] > 1}
    tracked = _limit_last_output_basis(
        _tracked_modules(model, selection, tied | set(offenders)), selection.max_output_basis
    )
    claimed = {name for module in tracked for layer in module.layers for name in layer.block.parameters}
    rest = [name for name in _unique(trainable) if name not in claimed and name not in offenders]
    others = [DiagonalBlock(name, "tied parameter", (name,), sizes[name]) for name in rest if name in tied]
    frozen = {name: parameter for name, parameter in owned if not parameter.requires_grad}
    left_out = [CoverageRow(name, "-", "frozen", sizes[name], False) for name in _unique(frozen)]
    left_out += [CoverageRow(name, "-", f"skipped: {reason}", sizes[name], False) for name, reason in offenders.items()]
    bare = tuple(bare_layer(name, sizes[name]) for name in rest if name not in tied)
    return Inventory(tuple(tracked), bare, tuple(others), tuple(left_out), sizes)


def bare_layer(name: str, size: int) -> BareParameterLayer:
    """The layer of a parameter that is used without a module."""
    return BareParameterLayer(DiagonalBlock(name, "parameter", (name,), size), has_weight=False)


def _check_trainable(owned: Sequence[tuple[str, nn.Parameter]], trainable: Mapping[str, nn.Parameter]) -> None:
    if not owned:
        raise ModelError(
            "The model has no parameters. Possible causes: torch.jit.freeze made them constants, or its layers are "
            "quantised. Give the model that was trained."
        )
    if not trainable:
        raise ModelError(
            "No parameter of the model is trainable, all are frozen. Call model.requires_grad_(True) first."
        )


def _unique(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The first name of each parameter."""
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        first.setdefault(id(parameter), name)
    return list(first.values())


def _tracked_modules(model: nn.Module, selection: Selection, excluded: set[str]) -> list[TrackedModule]:
    """Modules with a rule, except those with excluded parameters and those inside a module with a replaced forward."""
    found: list[TrackedModule] = []
    for name, module in model.named_modules():
        rule, is_inherited = find_rule(module)
        tracked = rule(name, module, selection) if rule is not None else None
        if tracked is not None and (not is_inherited or sources(module, "weight") or sources(module, "bias")):
            tracked = as_function(tracked)
        if tracked is None:
            continue
        parameters = {parameter for layer in tracked.layers for parameter in layer.block.parameters}
        kept = tracked.restrict(() if parameters & excluded else tracked.layers)
        if kept is not None:
            found.append(kept)
    inside = {
        id(child)
        for tracked in found
        if tracked.forward
        for child in tracked.module.modules()
        if child is not tracked.module
    }
    return [tracked for tracked in found if id(tracked.module) not in inside]


def _limit_last_output_basis(tracked: Sequence[TrackedModule], maximum: int) -> list[TrackedModule]:
    """Give the last weight layer, in the order of definition, the identity as output basis if it is too wide."""
    weights = [
        layer for module in tracked for layer in module.layers if layer.has_weight and layer.block.has_eigenbasis
    ]
    if not weights:
        return list(tracked)
    limited = replace(weights[-1], block=weights[-1].block.limit_output_basis(maximum))
    return [
        replace(module, layers=tuple(limited if layer is weights[-1] else layer for layer in module.layers))
        for module in tracked
    ]


def as_function(tracked: TrackedModule) -> TrackedModule | None:
    """Record the layer of a module by the functions that use its parameters; None if that is not possible.

    The block has all trainable parameters of the module: a weight can be computed from several of them.
    """
    layer = tracked.layers[0] if len(tracked.layers) == 1 else None
    variant = layer.by_function() if layer is not None else None
    if (
        layer is None
        or variant is None
        or any(name.rpartition(".")[0] != layer.name for name in layer.block.parameters)
    ):
        return None
    module = tracked.module
    arguments = tuple(name.rpartition(".")[2] for name in layer.block.parameters)
    computed = {**sources(module, "weight"), **sources(module, "bias")}
    trainable = {**{name: value for name, value in module._parameters.items() if value is not None}, **computed}
    names = [name for name, value in trainable.items() if value.requires_grad and (name != "bias" or name in arguments)]
    parameters = tuple(qualified_name(layer.name, name) for name in sorted(names, key=lambda name: name == "bias"))
    block = replace(layer.block, parameters=parameters)
    return TrackedModule(module, (replace(variant, block=block, arguments=arguments),), by_function=True)


def _matching(inventory: Inventory, layers: str | tuple[str, ...], order: Sequence[str] | None) -> set[str]:
    """Names of the blocks and of the single parameters that ``layers`` selects."""
    names = [block.name for block in inventory.blocks]
    parameters = {name for block in inventory.blocks for name in block.parameters}
    if layers == "last":
        weights = {layer.name for layer in inventory.layers if layer.has_weight and layer.block.has_eigenbasis}
        called = [name for name in (names if order is None else order) if name in weights]
        if not called:
            raise SettingError(f"layers='last' selects nothing: no layer has a weight matrix among {', '.join(names)}.")
        return {called[-1]}
    patterns = [layers] if isinstance(layers, str) else list(layers)
    patterns = ["" if pattern == _printed("") else pattern for pattern in patterns]
    matches = {
        pattern: [pattern] if pattern in names or pattern in parameters else fnmatch.filter(names, pattern)
        for pattern in patterns
    }
    unmatched = [pattern for pattern, matched in matches.items() if not matched]
    uncovered = [row for row in inventory.left_out if any(_names(pattern, row.name) for pattern in unmatched)]
    if uncovered:
        reasons = ", ".join(f"{row.name} ({row.treatment})" for row in uncovered)
        raise SettingError(f"layers={unmatched} match parameters that are not covered: {reasons}. Leave them out.")
    if unmatched or not patterns:
        names = list(map(_printed, names))
        raise SettingError(f"layers={unmatched} match no layer. There are: 'last', {', '.join(names)}.")
    return {name for matched in matches.values() for name in matched}


def _printed(name: str) -> str:
    """The name of a block in tables; the block of the model itself has no name."""
    return name or "(model)"


def _names(pattern: str, parameter: str) -> bool:
    """Whether a pattern matches a parameter or the module that it is in."""
    return fnmatch.fnmatchcase(parameter, pattern) or parameter == pattern or parameter.startswith(f"{pattern}.")


def _offenders(model: nn.Module) -> Iterable[tuple[str, str]]:
    """Trainable parameters that cannot be covered at all, with the reason."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.is_complex():
                yield qualified_name(prefix, name), "complex numbers"
            elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                yield qualified_name(prefix, name), "max_norm changes the weights in the forward pass"


def _uncovered(offenders: Mapping[str, str], sizes: Mapping[str, int]) -> UncoveredParametersError:
    total = sum(sizes.values())
    lines = [
        f"  {name}: {sizes[name]:,} parameters ({100 * sizes[name] / total:.2f} %), {reason}"
        for name, reason in offenders.items()
    ]
    return UncoveredParametersError(
        "These trainable parameters cannot be covered:\n"
        + "\n".join(lines)
        + "\nFreeze them with requires_grad_(False), or pass skip_uncovered=True to leave them out. "
        + f"Layers with an exact rule: {', '.join(supported_types())}; other parameters get a diagonal block."
    )
