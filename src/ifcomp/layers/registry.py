"""The registry of layer rules.

A rule is a function ``rule(name, module, selection) -> TrackedModule | None``, registered for its module types. A
subclass uses the rule of its nearest registered base. If it has another ``forward``, its layer is recorded by the
functions that use its parameters (`ifcomp.layers.functions`), and verification decides whether the rule holds.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Literal

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ifcomp.errors import SettingError
from ifcomp.layers import rules
from ifcomp.layers.layer import TrackedModule

Sua = Literal["auto"] | bool

#: Largest number of outputs of the last layer for which the outputs have an eigenbasis. Its memory grows with the
#: square of the number of classes, and the time of its eigendecomposition with the cube.
MAX_OUTPUT_BASIS = 4096


@dataclass(frozen=True)
class Selection:
    """Which parameters the user wants covered, and how.

    Attributes:
        layers: None for all; ``"last"``; or names and shell-style patterns of blocks.
        sua: Share one input basis over the offsets of a convolution kernel: always, never, or where it saves much.
        skip_uncovered: Leave out what cannot be covered instead of raising.
        max_output_basis: Largest number of outputs of the last layer with an output eigenbasis; the identity beyond.
    """

    layers: str | tuple[str, ...] | None = None
    sua: Sua = "auto"
    skip_uncovered: bool = False
    max_output_basis: int = MAX_OUTPUT_BASIS

    def __post_init__(self) -> None:
        """Validate the settings."""
        if not (isinstance(self.sua, bool) or self.sua == "auto"):
            raise SettingError(f"sua must be True, False or 'auto', but is {self.sua!r}.")
        if isinstance(self.max_output_basis, bool) or not isinstance(self.max_output_basis, int):
            raise SettingError(f"max_output_basis must be a whole number, but is {self.max_output_basis!r}.")
        named = (self.layers,) if isinstance(self.layers, str) else self.layers
        if named is not None and not (isinstance(named, tuple) and all(isinstance(name, str) for name in named)):
            raise SettingError(f"layers must be None, 'last', or names and patterns, but is {self.layers!r}.")


Rule = Callable[[str, nn.Module, Selection], TrackedModule | None]

_RULES: dict[type[nn.Module] | str, Rule] = {}


def register(*module_types: type[nn.Module] | str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of module types.

    Args:
        module_types: Types, or their full names for types of packages that are not imported.
    """

    def decorate(rule: Rule) -> Rule:
        for module_type in module_types:
            _RULES[module_type] = rule
        return rule

    return decorate


@cache
def _load_rules() -> None:
    """Import every file of `ifcomp.layers.rules`."""
    for found in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
        import_module(found.name)


def find_rule(module: nn.Module) -> tuple[Rule | None, bool]:
    """Return the rule of the nearest registered base, and whether the module has the ``forward`` of that base."""
    _load_rules()
    for base in type(module).__mro__:
        rule = _RULES.get(base) or _RULES.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            return rule, "forward" not in vars(module) and _forward(type(module)) is _forward(base)
    return None, False


def _forward(module_type: type) -> object:
    return getattr(module_type, "forward", None)


def supported_types() -> list[str]:
    """Names of all module types with a rule, sorted."""
    _load_rules()
    return sorted(name.rpartition(".")[2] if isinstance(name, str) else name.__name__ for name in _RULES)


def trainable_names(module: nn.Module, *names: str) -> list[str]:
    """The given names that are trainable parameters of the module itself (not parametrised, not frozen)."""
    parameters = module._parameters
    return [name for name in names if (value := parameters.get(name)) is not None and value.requires_grad]


def argument_names(module: nn.Module) -> list[str]:
    """The names among ``weight`` and ``bias`` that are trainable or computed from trainable parameters."""
    return [
        name
        for name in ("weight", "bias")
        if trainable_names(module, name) or any(value.requires_grad for value in sources(module, name).values())
    ]


def sources(module: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Parameters from which a parametrised attribute is computed, by name within the module.

    These are the originals of ``torch.nn.utils.parametrize``, or parameters such as ``weight_g`` and ``weight_v`` of
    ``torch.nn.utils.weight_norm``.
    """
    if name in module._parameters:
        return {}
    if is_parametrized(module, name):
        prefix = f"parametrizations.{name}"
        return {f"{prefix}.{key}": value for key, value in module.get_submodule(prefix).named_parameters()}
    return {
        key: value
        for key, value in module._parameters.items()
        if value is not None and key.startswith(f"{name}_") and isinstance(getattr(module, name, None), Tensor)
    }


def qualified_name(prefix: str, name: str) -> str:
    """``prefix.name``, or ``name`` at the root."""
    return f"{prefix}.{name}" if prefix else name
