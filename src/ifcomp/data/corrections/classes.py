"""Classes in decisions: a class name or a class index."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ifcomp.data.sources.columns import quote
from ifcomp.io.delimited import escape_cell

_INDEX = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True)
class ClassLookup:
    """Finds the class that a text stands for.

    Attributes:
        names: Names of the classes 0 ... K-1, or None if classes have no names.
        count: Number of classes K.
        by_name: Whether a text that is both a class name and the index of another class is the name. None refuses it.
    """

    names: Sequence[str] | None
    count: int
    by_name: bool | None = None

    def find(self, text: str) -> int:
        """Return the class index.

        Raises:
            ValueError: If no class has this name or index, or the text is ambiguous; contains the reason.
        """
        name = self._find_name(text)
        index = int(text) if _INDEX.fullmatch(text) and int(text) < self.count else None
        if name is not None and index is not None and name != index and self.by_name is None:
            raise ValueError(
                f"'{text}' is the name of class {name} and the index of class {index}. Add --by-name or --by-index"
            )
        first, second = (index, name) if self.by_name is False else (name, index)
        found = second if first is None else first
        if found is None:
            classes = f"0 to {self.count - 1}" if self.names is None else quote(self.names)
            raise ValueError(f"'{text[:40]}' is not one of the classes: {classes}")
        return found

    def describe(self, label: int) -> str:
        """Return the name of a class, or its index if it has none."""
        return self.names[label] if self.names is not None and 0 <= label < len(self.names) else str(label)

    def _find_name(self, text: str) -> int | None:
        """Return the class with this name, as it is or as in tables."""
        return self._numbers.get(text)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        names = {name: number for number, name in enumerate(self.names or ())}
        return {escape_cell(name): number for name, number in names.items()} | names
