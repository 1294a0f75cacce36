"""Which parameters are covered, and how: every trainable one is in a block, left out by request, or an error."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ifcomp.errors import ModelError, NonFiniteError, SettingError, UncoveredParametersError
from ifcomp.layers.block import Block, IndexedBlock, KroneckerBlock, OtherBlock, RecordedBlock, Site
from ifcomp.layers.registry import Selection, find_rule, qualified, supported_types
from ifcomp.layers.wrappers import check_transparent


@dataclass(frozen=True)
class CoverageRow:
    """One line of the coverage table: a block, or parameters outside every block."""

    name: str
    kind: str
    treatment: str
    parameters: int
    covered: bool


@dataclass(frozen=True)
class Coverage:
    """How many parameters are covered, and how, per layer and in total. ``print`` shows it as a table."""

    rows: tuple[CoverageRow, ...]

    @property
    def total(self) -> int:
        """All parameters of the model, frozen ones included."""
        return sum(row.parameters for row in self.rows)

    @property
    def covered(self) -> int:
        """Parameters in a block."""
        return sum(row.parameters for row in self.rows if row.covered)

    @property
    def fraction(self) -> float:
        """Covered parameters over all parameters."""
        return self.covered / self.total if self.total else 0.0

    def __str__(self) -> str:
        table = [("layer", "kind", "treatment", "parameters")]
        table += [(row.name, row.kind, row.treatment, f"{row.parameters:,}") for row in self.rows]
        widths = [max(len(line[column]) for line in table) for column in range(4)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line[:3], widths, strict=False))
            + "  "
            + line[3].rjust(widths[3])
            for line in table
        ]
        rule = "-" * max(map(len, lines))
        total = f"covered: {self.covered:,} of {self.total:,} parameters ({100 * self.fraction:.1f} %)"
        return "\n".join([lines[0], rule, *lines[1:], rule, total])


@dataclass(frozen=True)
class Inventory:
    """All blocks of a model.

    Attributes:
        sites: Modules to watch, with their blocks.
        others: Parameters that need per-example gradients of their own.
        left_out: What is in no block, and why.
    """

    sites: tuple[Site, ...]
    others: tuple[OtherBlock, ...]
    left_out: tuple[CoverageRow, ...]

    @property
    def recorded(self) -> tuple[RecordedBlock, ...]:
        """Blocks that are read off modules, in the model's order."""
        return tuple(block for site in self.sites for block in site.blocks)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks."""
        return (*self.recorded, *self.others)

    @property
    def coverage(self) -> Coverage:
        """The table of what is covered."""
        rows = [
            CoverageRow(block.name or "(model)", block.kind, treatment(block), block.size, True)
            for block in self.blocks
        ]
        return Coverage((*rows, *self.left_out))


def treatment(block: Block) -> str:
    """How a block's curvature is represented, in words."""
    if isinstance(block, KroneckerBlock):
        return "EKFAC (SUA)" if block.shared_offsets else "EKFAC"
    return "EKFAC (one-hot)" if isinstance(block, IndexedBlock) else "diagonal"


def take_inventory(model: nn.Module, selection: Selection, demoted: Iterable[str] = ()) -> Inventory:
    """Sort every parameter of a model into a block or a reason.

    Args:
        model: The classifier.
        selection: What the user wants covered.
        demoted: Names of blocks whose rule turned out not to hold in this model: all parameters of their modules
        become other
            parameters.

    Raises:
        UncoveredParametersError: Lists all parameters that cannot be covered.
        ModelError: If no parameter is trainable.
        NonFiniteError: If a parameter or buffer is not finite.
    """
    check_model(model)
    owned = [
        (qualified(prefix, name), parameter)
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    offenders = dict(_offences(model))
    trainable = {name: parameter for name, parameter in owned if parameter.requires_grad}
    if not owned:
        raise ModelError(
            "No parameter is in the model: it has none, torch.jit.freeze made them constants, or its layers are "
            "quantised. Give the model that was trained."
        )
    if not trainable:
        raise ModelError(
            "No parameter of the model is trainable, all are frozen. Call model.requires_grad_(True) first."
        )
    if offenders and not selection.skip_uncovered:
        raise _uncovered(offenders, {name: parameter.numel() for name, parameter in owned})

    tied = {name for name, count in _uses(owned).items() if count > 1}
    sites = _sites(model, selection, tied, set(demoted), set(offenders))
    claimed = {name for site in sites for block in site.blocks for name in block.parameters}
    others = tuple(
        OtherBlock(name, "tied parameter" if name in tied else "parameter", (name,), parameter.numel())
        for name, parameter in _unique(trainable).items()
        if name not in claimed and name not in offenders
    )
    left_out = [
        CoverageRow(name, "-", "frozen", parameter.numel(), False)
        for name, parameter in _unique(dict(owned)).items()
        if not parameter.requires_grad
    ]
    left_out += [
        CoverageRow(name, "-", f"skipped: {reason}", trainable[name].numel(), False)
        for name, reason in offenders.items()
    ]
    return Inventory(tuple(sites), others, tuple(left_out))


def _uses(owned: list[tuple[str, nn.Parameter]]) -> Mapping[str, int]:
    """How many owners each parameter has."""
    counts = Counter(id(parameter) for _, parameter in owned)
    return {name: counts[id(parameter)] for name, parameter in owned}


def _unique(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The first name of each parameter."""
    seen: set[int] = set()
    return {
        name: parameter
        for name, parameter in parameters.items()
        if not (id(parameter) in seen or seen.add(id(parameter)))  # type: ignore[func-returns-value]
    }


def _sites(
    model: nn.Module, selection: Selection, tied: set[str], demoted: set[str], offenders: set[str]
) -> list[Site]:
    sites: list[Site] = []
    for name, module in model.named_modules():
        rule = find_rule(module)
        site = rule(name, module, selection) if rule is not None else None
        if site is None:
            continue
        names = {block.name for block in site.blocks}
        parameters = {parameter for block in site.blocks for parameter in block.parameters}
        if not (names & demoted or parameters & tied or parameters & offenders):
            sites.append(site)
    inside = {
        id(child) for site in sites if site.forward for child in site.module.modules() if child is not site.module
    }
    return [site for site in sites if id(site.module) not in inside]


def _offences(model: nn.Module) -> Iterable[tuple[str, str]]:
    """Trainable parameters that no rule and no per-example gradient can treat, with the reason."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.is_complex():
                yield qualified(prefix, name), "complex numbers"
            elif isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                yield qualified(prefix, name), "max_norm changes the weights in the forward pass"


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


def check_model(model: nn.Module) -> None:
    """Raise ModelError or NonFiniteError for a model that cannot be used whatever the data is."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    check_transparent(model)  # first: torch 2.4 takes sharded parameters for uninitialised ones
    lazy = [name for name, value in tensors if isinstance(value, UninitializedParameter | UninitializedBuffer)]
    if lazy:
        raise ModelError(f"The model is not initialised yet: {', '.join(lazy)}. Run one batch through the model first.")
    if any(value.is_inference() for _, value in tensors):
        raise ModelError(
            "The model was made in inference mode, where autograd cannot follow it. Build and load it outside "
            "torch.inference_mode()."
        )
    mixing = [
        name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.running_mean is None
    ]
    if mixing:
        raise ModelError(
            f"BatchNorm with track_running_stats=False ({', '.join(mixing)}) lets the logits of an example depend on "
            "the other examples of its batch, so examples have no gradients of their own. Use running statistics."
        )
    wrong = [
        name
        for name, value in tensors
        if (value.is_floating_point() or value.is_complex()) and not torch.isfinite(value.detach()).all()
    ]
    if wrong:
        raise NonFiniteError(f"The model has NaN or infinite values in {', '.join(wrong)}. Load a sound checkpoint.")


def untouched_norms(model: nn.Module) -> list[str]:
    """Names of normalisations whose running statistics are those of a new layer: mean 0 and variance 1."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
        and module.running_mean is not None
        and module.running_var is not None
        and not module.running_mean.any()
        and bool((module.running_var == 1).all())
    ]


def restrict(
    inventory: Inventory, layers: str | tuple[str, ...] | None, complete: Inventory, order: Sequence[str] | None = None
) -> Inventory:
    """Keep only the blocks that ``layers`` names.

    Args:
        inventory: The blocks, some perhaps demoted to other parameters.
        layers: None for all; ``"last"``; or names and shell-style patterns.
        complete: The inventory before anything was demoted: what the names mean.
        order: Names of the recorded blocks in the order in which they run, where that is known; else as defined.

    Raises:
        SettingError: If a pattern matches nothing.
    """
    if layers is None:
        return inventory
    chosen = [block for block in complete.blocks if block.name in _chosen(complete, layers, order)]
    names = {block.name for block in chosen}
    parameters = {name for block in chosen for name in block.parameters}
    others = {block.name for block in inventory.others if block.name in names or block.name in parameters}
    recorded = {block.name for block in inventory.recorded if block.name in names}
    return keep_blocks(inventory, recorded | others)


def with_known(model: nn.Module, selection: Selection, known: Collection[str]) -> tuple[Inventory, set[str]]:
    """The blocks that factors exist for, and the names of those that were demoted when the factors were made.

    Args:
        model: The classifier.
        selection: What was covered.
        known: Names of the blocks of the factors.
    """
    complete = take_inventory(model, selection)
    demoted = {
        block.name
        for block in complete.recorded
        if block.name not in known and any(name in known for name in block.parameters)
    }
    return keep_blocks(take_inventory(model, selection, demoted), known), demoted


def keep_blocks(inventory: Inventory, names: Collection[str]) -> Inventory:
    """Only the blocks of these names."""
    sites = [replace(site, blocks=tuple(b for b in site.blocks if b.name in names)) for site in inventory.sites]
    left_out = [
        CoverageRow(block.name, block.kind, "not in layers=", block.size, False)
        for block in inventory.blocks
        if block.name not in names
    ]
    return Inventory(
        tuple(site for site in sites if site.blocks),
        tuple(block for block in inventory.others if block.name in names),
        (*inventory.left_out, *left_out),
    )


def _chosen(inventory: Inventory, layers: str | tuple[str, ...], order: Sequence[str] | None) -> set[str]:
    names = [block.name for block in inventory.blocks]
    if layers == "last":
        weights = {block.name for block in inventory.recorded if isinstance(block, KroneckerBlock) and block.has_weight}
        running = [name for name in (names if order is None else order) if name in weights]
        if not running:
            raise SettingError(f"layers='last' selects nothing: no layer has a weight matrix among {', '.join(names)}.")
        return {running[-1]}
    patterns = [layers] if isinstance(layers, str) else list(layers)
    matches = {pattern: [pattern] if pattern in names else fnmatch.filter(names, pattern) for pattern in patterns}
    unmatched = [pattern for pattern, found in matches.items() if not found]
    if unmatched or not patterns:
        raise SettingError(f"layers={unmatched} match no layer. There are: 'last', {', '.join(names)}.")
    return {name for found in matches.values() for name in found}
