"""Which module types have an exact rule, and how a module finds its own.

A rule is a function ``rule(name, module, options) -> Site | None``, registered for its module types. A subclass uses
the rule of its nearest registered base as long as it keeps that base's ``forward``: with another ``forward`` the rule
could be wrong, so its parameters are treated as *other* parameters instead, which is always exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ifcomp.errors import SettingError
from ifcomp.layers.block import Site

Sua = Literal["auto"] | bool


@dataclass(frozen=True)
class Selection:
    """Which parameters the user wants covered, and how.

    Attributes:
        layers: None for all; ``"last"``; or names and shell-style patterns of blocks.
        sua: Share one input basis over the offsets of a convolution kernel: always, never, or where it saves much.
        skip_uncovered: Leave out what cannot be covered instead of raising.
    """

    layers: str | tuple[str, ...] | None = None
    sua: Sua = "auto"
    skip_uncovered: bool = False

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        if not (isinstance(self.sua, bool) or self.sua == "auto"):
            raise SettingError(f"sua must be True, False or 'auto', but is {self.sua!r}.")
        named = (self.layers,) if isinstance(self.layers, str) else self.layers
        if named is not None and not (isinstance(named, tuple) and all(isinstance(name, str) for name in named)):
            raise SettingError(f"layers must be None, 'last', or names and patterns, but is {self.layers!r}.")


Rule = Callable[[str, nn.Module, Selection], Site | None]

_RULES: dict[type[nn.Module], Rule] = {}


def register(*module_types: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Make a function the rule of these module types."""

    def decorate(rule: Rule) -> Rule:
        for module_type in module_types:
            _RULES[module_type] = rule
        return rule

    return decorate


def find_rule(module: nn.Module) -> Rule | None:
    """The rule of the nearest registered base whose ``forward`` the module still has, or None."""
    if "forward" in vars(module):
        return None
    for base in type(module).__mro__:
        rule = _RULES.get(base)
        if rule is not None:
            return rule if _forward(type(module)) is _forward(base) else None
    return None


def _forward(module_type: type) -> object:
    return getattr(module_type, "forward", None)


def supported_types() -> list[str]:
    """Names of all module types with a rule, sorted."""
    return sorted(module_type.__name__ for module_type in _RULES)


def trainable(module: nn.Module, *names: str) -> list[str]:
    """Which of these names are trainable parameters of the module itself (not parametrised, not frozen)."""
    own = module._parameters
    return [name for name in names if (parameter := own.get(name)) is not None and parameter.requires_grad]


def qualified(prefix: str, name: str) -> str:
    """``prefix.name``, or ``name`` at the root."""
    return f"{prefix}.{name}" if prefix else name
