"""Decisions from bytes: the same bytes always give the same ones, and no bytes left give the first choice."""

import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

#: Numbers on which parsers have stumbled.
WHOLE = (0, 1, -1, 2, 7, 255, 2**31, 2**63, -(2**63), 10**30)
NUMBERS = (*WHOLE, 0.0, 0.5, -0.0, 1e-300, 1e300, float("inf"), float("nan"))
WORDS = ("", "a", "0", "..", "../../etc/passwd", "/", "\x00", "\ud800", "\u2028", "=1+1", "9" * 5000, "{{7*7}}", "nan")


class Draw:
    """Reads its bytes from front to back."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, low: int, high: int) -> int:
        """A whole number from low to high, of one byte."""
        return low + self.bytes(1)[0] % (high - low + 1) if self._at < len(self._data) else low

    def choice(self, options: Sequence[T]) -> T:
        """One of at most 256 options."""
        return options[self.number(0, len(options) - 1)]

    def bytes(self, count: int) -> bytes:
        """So many bytes, or what is left."""
        found = self._data[self._at : self._at + count]
        self._at += len(found)
        return found

    def rest(self) -> bytes:
        """All that is left."""
        return self.bytes(len(self._data))

    def text(self) -> str:
        """A known nuisance, or some characters of any kind."""
        if self.number(0, 1):
            return self.choice(WORDS)
        return self.bytes(self.number(0, 24)).decode("utf-8", "surrogateescape")

    def json(self, depth: int = 3) -> Any:
        """A value of any type that JSON has."""
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
        """A JSON value with one place replaced, removed or added."""
        if isinstance(value, dict) and value and self.number(0, 7):
            key = self.choice(list(value))
            match self.number(0, 4):
                case 0:
                    return {name: part for name, part in value.items() if name != key}
                case 1:
                    return {**value, self.text(): self.json()}
            return {**value, key: self.damaged(value[key])}
        if isinstance(value, list) and value and self.number(0, 7):
            at = self.number(0, len(value) - 1)
            return [*value[:at], self.damaged(value[at]), *value[at + 1 :]]
        return self.json()


def as_json(value: Any) -> str:
    """JSON, with lists in lists where a value asks for them; deeper than Python itself could write."""
    text = json.dumps(value)
    return re.sub(r'"@nested (\d+)"', lambda found: "[" * int(found[1]) + "]" * int(found[1]), text)
