"""The table of labels as compact JSON: columns instead of rows, numbers rounded, every preview stored once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ifcomp.report.data import INTEGER_COLUMNS, NUMBER_COLUMNS, Audit, Preview, ReportData
from ifcomp.report.images import thumbnail

#: Significant digits of numbers in the page.
DIGITS = 6
#: What is longer is cut, with an ellipsis.
TEXT_CHARACTERS = 600
VALUE_CHARACTERS = 60
ROW_FIELDS = 16


def table_payload(audit: Audit, data: ReportData) -> dict[str, Any]:
    """Everything the script of the page needs, as JSON types.

    ``columns`` has one list a column, ``previews`` the distinct previews, ``shown`` the position in it by example index
    and ``explanations`` lists of ``[index, influence, label, position or None]`` by example index.
    """
    pool = _Pool()
    shown = {
        index: pool.add(data.previews[index])
        for index in audit.frame["index"].head(data.max_previews).tolist()
        if index in data.previews
    }
    explanations = {
        suspect: [
            [
                int(example.index),
                _number(example.influence),
                int(example.label),
                pool.add(example.preview or data.previews.get(example.index)),
            ]
            for example in examples
        ]
        for suspect, examples in data.explanations.items()
    }
    return {
        "columns": _columns(audit),
        "classes": class_texts(audit, data.class_names),
        "named": data.class_names is not None,
        "previews": pool.previews,
        "shown": shown,
        "explanations": explanations,
    }


def class_texts(audit: Audit, names: tuple[str, ...] | None) -> list[str]:
    """What to call every class, [K]."""
    if names is not None:
        return list(names)
    return [str(label) for label in range(int(audit.frame[["label", "suggested_label"]].to_numpy().max()) + 1)]


def _columns(audit: Audit) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: audit.frame[name].tolist() for name in INTEGER_COLUMNS}
    columns |= {name: [_number(value) for value in audit.frame[name].tolist()] for name in NUMBER_COLUMNS}
    return columns | {"is_suspect": audit.frame["is_suspect"].astype(int).tolist()}


def _number(value: float) -> float | int | str | None:
    """Rounded; what JSON lacks becomes None (not a number) or the text that JavaScript's ``Number`` reads."""
    if not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


class _Pool:
    """Distinct previews in the order in which they came."""

    def __init__(self) -> None:
        self.previews: list[dict[str, Any]] = []
        self._positions: dict[str, int] = {}
        self._known: dict[int, tuple[Preview, int]] = {}

    def add(self, preview: Preview | None) -> int | None:
        """The position of a preview, which is stored unless an equal one is there."""
        if preview is None:
            return None
        if id(preview) not in self._known:  # the preview is kept with its id, which could be used again otherwise
            encoded = _encoded(preview)
            position = self._positions.setdefault(json.dumps(encoded), len(self.previews))
            if position == len(self.previews):
                self.previews.append(encoded)
            self._known[id(preview)] = (preview, position)
        return self._known[id(preview)][1]


def _encoded(preview: Preview) -> dict[str, Any]:
    content: Any
    if preview.kind == "image":
        content = thumbnail(preview.content)
    elif preview.kind == "text":
        content = _cut(preview.content, TEXT_CHARACTERS)
    else:
        content = _fields(preview.content)
    return {"kind": preview.kind, "content": content, "name": preview.name}


def _fields(row: Mapping[Any, Any]) -> list[list[str]]:
    fields = [[_cut(str(name), VALUE_CHARACTERS), _cut(_text(value), VALUE_CHARACTERS)] for name, value in row.items()]
    left = len(fields) - ROW_FIELDS
    return fields if left <= 0 else [*fields[:ROW_FIELDS], ["…", f"{left} more"]]


def _text(value: Any) -> str:
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
