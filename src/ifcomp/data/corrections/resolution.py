"""Decisions checked against the data that they belong to."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from ifcomp.data.corrections.base import Corrections, LabelledFile, corrected_labels
from ifcomp.data.corrections.classes import ClassLookup
from ifcomp.data.corrections.decisions import Action, Decision
from ifcomp.data.sources.columns import quote
from ifcomp.errors import DataError, IfcompWarning, LabelError
from ifcomp.io.delimited import escape_cell

_OTHER_DATA = "The decisions belong to other data, or were applied already."


def resolve_decisions(
    decisions: Sequence[Decision], data: LabelledFile, path: str, *, by_name: bool | None = None
) -> Corrections:
    """Check all decisions and return the corrections.

    Args:
        decisions: Rows of the file of decisions.
        data: The data that they belong to.
        path: The file of decisions, for messages.
        by_name: How to read a label that is both a class name and the index of another class. None refuses it.

    Raises:
        DataError: If an index is outside the data, the decisions belong to other data, or no example would be left.
        LabelError: If a label is not one of the classes, or the data has no labels.
    """
    lookup = _class_lookup(data, by_name)
    labels: dict[int, int] = {}
    dropped, kept, unchanged = set(), 0, 0
    for decision in decisions:
        where = f"Line {decision.line:,} of '{path}'"
        _check_example(decision, data, lookup, where)
        if decision.action is Action.keep:
            kept += 1
        elif decision.action is Action.drop:
            dropped.add(decision.index)
        else:
            label = _find_class(decision.label, data, lookup, where)
            if data.labels is not None and label == data.labels[decision.index]:
                unchanged += 1
            else:
                labels[decision.index] = label
    if len(dropped) == data.count:
        raise DataError(f"'{path}' drops all {data.count:,} examples of '{data.path}', so none would be left.")
    corrections = Corrections(labels, frozenset(dropped), kept, unchanged)
    _warn_of_empty_classes(corrections, data, lookup)
    return corrections


def _class_lookup(data: LabelledFile, by_name: bool | None) -> ClassLookup:
    if data.class_names is not None:
        return ClassLookup(data.class_names, len(data.class_names), by_name)
    largest = -1 if data.labels is None or not len(data.labels) else int(data.labels.max())
    return ClassLookup(None, largest + 1, by_name)


def _check_example(decision: Decision, data: LabelledFile, lookup: ClassLookup, where: str) -> None:
    """Check that the example exists, and has the label and the name that the decision states."""
    index = decision.index
    if index >= data.count:
        raise DataError(
            f"{where}: there is no index {index:,}. '{data.path}' has {data.count:,} examples, 0 to {data.count - 1:,}."
        )
    if decision.given and data.labels is not None:
        present = int(data.labels[index])
        if _find_class(decision.given, data, lookup, where) != present:
            raise DataError(
                f"{where}: the label of example {index:,} was '{decision.given}', but is '{lookup.describe(present)}' "
                f"in '{data.path}'. {_OTHER_DATA}"
            )
    if decision.name and data.names is not None:
        name = data.names[index]
        if decision.name not in (name, escape_cell(name)):
            raise DataError(
                f"{where}: example {index:,} was '{decision.name[:200]}', but is '{name}' in '{data.path}'. "
                f"{_OTHER_DATA}"
            )


def _find_class(text: str, data: LabelledFile, lookup: ClassLookup, where: str) -> int:
    if data.labels is None:
        remedy = " Name their column with --label-column." if data.path.endswith((".csv", ".parquet")) else ""
        raise LabelError(f"{where}: '{data.path}' has no labels, so examples can be kept and dropped only.{remedy}")
    try:
        return lookup.find(text)
    except ValueError as error:
        raise LabelError(f"{where}: {error}.") from error


def _warn_of_empty_classes(corrections: Corrections, data: LabelledFile, lookup: ClassLookup) -> None:
    """Warn if a class loses its last example."""
    if data.labels is None:
        return
    after = corrected_labels(data.labels, corrections)
    empty = sorted(set(np.unique(data.labels).tolist()) - set(np.unique(after).tolist()))
    if empty:
        names = quote([lookup.describe(label) for label in empty])
        warnings.warn(
            f"No example of class {names} is left. Classes that are numbered by their names get other numbers.",
            IfcompWarning,
            stacklevel=3,
        )
