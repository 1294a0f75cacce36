"""The table of labels as compact JSON: one list per column, rounded numbers, each preview stored once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from ifcomp.report.data import INTEGER_COLUMNS, NUMBER_COLUMNS, OPTIONAL_COLUMNS, Audit, ReportData
from ifcomp.report.examples import Preview
from ifcomp.report.images import thumbnail

#: Significant digits of numbers.
DIGITS = 6
#: Longest texts and values, and most fields of a row, that a preview shows in full.
TEXT_CHARACTERS = 600
VALUE_CHARACTERS = 60
ROW_FIELDS = 16

#: Largest number of characters of the name of a suspect without a preview.
NAME_CHARACTERS = 200


def table_payload(audit: Audit, data: ReportData) -> dict[str, Any]:
    """Return the data of the page's script, as JSON types.

    ``columns`` contains one list per column, most suspicious label first, ``previews`` the distinct previews, and
    ``shown`` the position of the preview by example index. ``explanations`` contains lists of
    ``[index, influence, label, position or None]`` by example index, ``neighbours`` lists of
    ``[layer, weight, [[index, label, position or None], ...], labels of all neighbours]``. ``names`` contains the file
    names or texts of suspects without a preview by example index. If ``exports_names``, decisions contain the names of
    the examples: those of a folder are compared with its files. ``key`` identifies the report: the same audit has the
    same key, and decisions in the browser are stored under it.
    """
    store = _PreviewStore()
    shown = {
        index: store.add(data.previews[index])
        for index in audit.ranked["index"].head(data.max_previews).tolist()
        if index in data.previews
    }
    explanations = {
        suspect: [
            [
                int(example.index),
                _number(example.influence),
                int(example.label),
                store.add(example.preview or data.previews.get(example.index)),
            ]
            for example in examples
        ]
        for suspect, examples in data.explanations.items()
    }
    neighbours = {
        suspect: [
            [
                layer.layer,
                _number(layer.weight),
                [[int(example.index), int(example.label), store.add(example.preview)] for example in layer.examples],
                [int(label) for label in layer.labels or (example.label for example in layer.examples)],
            ]
            for layer in layers
        ]
        for suspect, layers in data.neighbours.items()
    }
    columns, classes = _columns(audit), class_texts(audit, data.class_names)
    identity = json.dumps([data.title, classes, [columns[name] for name in INTEGER_COLUMNS]])
    return {
        "key": hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:16],
        "columns": columns,
        "classes": classes,
        "named": data.class_names is not None,
        "previews": store.previews,
        "shown": shown,
        "names": _names(audit, shown),
        "exports_names": "folder:" in data.apply_command,
        "explanations": explanations,
        "neighbours": neighbours,
    }


def class_texts(audit: Audit, names: tuple[str, ...] | None) -> list[str]:
    """Return the names of the classes, or their numbers if there are no names, [K]."""
    if names is not None:
        return list(names)
    return [str(label) for label in range(int(audit.frame[["label", "suggested"]].to_numpy().max()) + 1)]


def _names(audit: Audit, shown: Mapping[int, int | None]) -> dict[int, str]:
    """Return the names of the suspects without a preview by index, if examples have names."""
    frame = audit.ranked
    if "name" not in frame.columns:
        return {}
    rows = frame[frame["is_suspect"].astype(bool) & ~frame["index"].isin(list(shown))]
    return {
        int(index): _truncate(str(name), NAME_CHARACTERS)
        for index, name in zip(rows["index"], rows["name"], strict=True)
    }


def preview_content(preview: Preview) -> dict[str, Any]:
    """Return kind, name and content of a preview: a data URI, a text, or pairs of names and values."""
    content: Any
    if preview.kind == "image":
        content = thumbnail(preview.content)
    elif preview.kind == "text":
        content = _truncate(preview.content, TEXT_CHARACTERS)
    else:
        content = _fields(preview.content)
    return {"kind": preview.kind, "content": content, "name": preview.name}


def _columns(audit: Audit) -> dict[str, list[Any]]:
    """Return the columns of the page by name, most suspicious label first. ``rank`` counts from 1."""
    frame = audit.ranked
    numbers = (*NUMBER_COLUMNS, *(name for name in OPTIONAL_COLUMNS if name in frame.columns))
    return {
        "rank": list(range(1, len(frame) + 1)),
        **{name: frame[name].tolist() for name in INTEGER_COLUMNS},
        **{name: [_number(value) for value in frame[name].tolist()] for name in numbers},
        "is_suspect": frame["is_suspect"].astype(int).tolist(),
    }


def _number(value: float) -> float | int | str | None:
    """Round a number. NaN becomes None, infinity a text that JavaScript's ``Number`` parses."""
    if not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded


class _PreviewStore:
    """Distinct previews in the order in which they were added."""

    def __init__(self) -> None:
        self.previews: list[dict[str, Any]] = []
        self._by_content: dict[str, int] = {}
        self._by_id: dict[int, tuple[Preview, int]] = {}

    def add(self, preview: Preview | None) -> int | None:
        """Store a preview unless an equal one is stored, and return its position."""
        if preview is None:
            return None
        if id(preview) not in self._by_id:  # keeps the preview alive, so that its id stays unique
            encoded = preview_content(preview)
            position = self._by_content.setdefault(json.dumps(encoded), len(self.previews))
            if position == len(self.previews):
                self.previews.append(encoded)
            self._by_id[id(preview)] = (preview, position)
        return self._by_id[id(preview)][1]


def _fields(row: Mapping[Any, Any]) -> list[list[str]]:
    fields = [[_truncate(text, VALUE_CHARACTERS) for text in (str(name), _text(value))] for name, value in row.items()]
    more = len(fields) - ROW_FIELDS
    return fields if more <= 0 else [*fields[:ROW_FIELDS], ["…", f"{more} more"]]


def _text(value: Any) -> str:
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)


def _truncate(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
