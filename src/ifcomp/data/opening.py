"""From a name on the command line to a `Source`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ifcomp.data import arrays, factories, folders, tables
from ifcomp.data.source import Source, SourceOptions
from ifcomp.errors import SettingError

_PIXELS = ("mean", "std")

#: The options that each kind of data takes.
OPTIONS: dict[str, tuple[str, ...]] = {
    "digits": ("batch_size",),
    "npz": ("batch_size", *_PIXELS),
    "folder": ("batch_size", "image_size", "grey", *_PIXELS),
    "parquet": ("batch_size", "label_column", "feature_columns"),
    "factory": ("batch_size",),
}

KINDS = "digits, npz:FILE, folder:DIR, parquet:FILE or package.module:factory"


def kind_of(spec: str) -> str:
    """The kind of data that a name stands for, or SettingError."""
    kind, colon, rest = spec.partition(":")
    if "\0" in spec:
        raise SettingError(f"Data must be named as {KINDS}, but {spec!r} has a zero byte in it.")
    if spec == "digits" or (colon and rest and kind in ("npz", "folder", "parquet")):
        return kind
    if colon and kind not in OPTIONS and factories.is_factory(spec):
        return "factory"
    raise SettingError(f"Data must be named as {KINDS}, but is '{spec}'.")


def open_source(
    spec: str,
    options: SourceOptions | None = None,
    *,
    class_names: Sequence[str] | None = None,
    labelled: bool = True,
) -> Source:
    """Open data by its name.

    Args:
        spec: ``digits``, ``npz:FILE``, ``folder:DIR``, ``parquet:FILE`` or ``package.module:factory``.
        options: How to read it.
        class_names: Names of the classes 0 ... K-1 where they are known: labels that are names are numbered by them.
        labelled: Whether a table must have the column of labels that the options name.

    Raises:
        SettingError: If the name or the options mean nothing.
        DataError: If the data cannot be used.
    """
    options, kind = options or SourceOptions(), kind_of(spec)
    wrong = [name for name in options.given() if name not in OPTIONS[kind]]
    if wrong:
        shown = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise SettingError(f"{shown} means nothing for the data '{spec}'.")
    path = os.path.expanduser(spec.partition(":")[2])
    if kind == "digits":
        return arrays.digits(options)
    if kind == "npz":
        return arrays.npz(spec, path, options)
    if kind == "folder":
        return folders.folder(spec, path, options, class_names)
    if kind == "parquet":
        return tables.parquet(spec, path, options, class_names, labelled)
    return factories.factory(spec, options)
