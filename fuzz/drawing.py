"""Deterministic choices from bytes. Exhausted bytes give the first option."""

import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

#: Numbers and texts that often break parsers.
WHOLE = (0, 1, -1, 2, 7, 255, 2**31, 2**63, -(2**63), 10**30)
NUMBERS = (*WHOLE, 0.0, 0.5, -0.0, 1e-300, 1e300, float("inf"), float("nan"))
WORDS = ("", "a", "0", "..", "../../etc/passwd", "/", "\x00", "\ud800", "\u2028", "=1+1", "9" * 5000, "{{7*7}}", "nan")


class Draw:
    """Source of choices that consumes its bytes from front to back."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def number(self, low: int, high: int) -> int:
        """Return a whole number in low ... high from one byte."""
        return low + self.bytes(1)[0] % (high - low + 1) if self._position < len(self._data) else low

    def choice(self, options: Sequence[T]) -> T:
        """Return one of at most 256 options."""
        return options[self.number(0, len(options) - 1)]

    def bytes(self, count: int) -> bytes:
        """Return the next ``count`` bytes, or all remaining bytes."""
        part = self._data[self._position : self._position + count]
        self._position += len(part)
        return part

    def rest(self) -> bytes:
        """Return all remaining bytes."""
        return self.bytes(len(self._data))

    def text(self) -> str:
        """Return a text that often breaks parsers, or up to 24 arbitrary bytes as text."""
        if self.number(0, 1):
            return self.choice(WORDS)
        return self.bytes(self.number(0, 24)).decode("utf-8", "surrogateescape")

    def json(self, depth: int = 3) -> Any:
        """Return a random JSON value."""
        kind = self.number(0, 7 if depth else 4)
        if kind == 0:
            return None
        if kind == 1:
            return bool(self.number(0, 1))
        if kind in (2, 3):
            return self.choice(NUMBERS)
        if kind == 4:
            return self.text()
        if kind == 5:
            return {self.text(): self.json(depth - 1) for _ in range(self.number(0, 3))}
        if kind == 6:
            return [self.json(depth - 1) for _ in range(self.number(0, 3))]
        return f"@nested {self.choice((10, 900, 1100, 20_000))}"

    def damaged(self, value: Any) -> Any:
        """Return a JSON value with one entry replaced, removed or added."""
        if isinstance(value, dict) and value and self.number(0, 7):
            key = self.choice(list(value))
            match self.number(0, 4):
                case 0:
                    return {name: part for name, part in value.items() if name != key}
                case 1:
                    return {**value, self.text(): self.json()}
            return {**value, key: self.damaged(value[key])}
        if isinstance(value, list) and value and self.number(0, 7):
            index = self.number(0, len(value) - 1)
            return [*value[:index], self.damaged(value[index]), *value[index + 1 :]]
        return self.json()


def as_json(value: Any) -> str:
    """Return JSON text. The value ``@nested N`` becomes N nested lists, deeper than ``json.dumps`` allows."""
    text = json.dumps(value)
    return re.sub(r'"@nested (\d+)"', lambda match: "[" * int(match[1]) + "]" * int(match[1]), text)
