"""Data opened by name: ``digits``, ``npz:FILE``, ``folder:DIR``, ``parquet:FILE``, ``csv:FILE`` or a factory.

Each kind of data is one file with one function, which takes a `SourceRequest` and returns a `Source`. A new kind is one
more file and one more entry of `KINDS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ifcomp.data.factories import is_factory_name
from ifcomp.data.sources.base import IndexedBatches, Source, SourceRequest
from ifcomp.data.sources.csv import open_csv
from ifcomp.data.sources.digits import open_digits
from ifcomp.data.sources.factory import open_factory
from ifcomp.data.sources.npz import open_npz
from ifcomp.data.sources.options import SourceOptions
from ifcomp.errors import SettingError

__all__ = ["IndexedBatches", "Source", "SourceOptions", "complete_name", "open_source", "source_kind"]


@dataclass(frozen=True)
class SourceKind:
    """A kind of named data.

    Attributes:
        form: How its names are written.
        open: Opens data of this kind.
        options: Names of the `SourceOptions` that apply.
    """

    form: str
    open: Callable[[SourceRequest], Source]
    options: tuple[str, ...]


def _open_folder(request: SourceRequest) -> Source:
    """Open a folder of images. Pillow is imported only when it is needed."""
    from ifcomp.data.sources.folder import open_folder

    return open_folder(request)


def _open_parquet(request: SourceRequest) -> Source:
    """Open a Parquet file. pyarrow is optional, so it is imported only when it is needed."""
    from ifcomp.data.sources.parquet import open_parquet

    return open_parquet(request)


#: Kinds of data by the part of their names before the colon.
KINDS: dict[str, SourceKind] = {
    "digits": SourceKind("digits", open_digits, ("batch_size",)),
    "npz": SourceKind("npz:FILE", open_npz, ("batch_size", "mean", "std")),
    "folder": SourceKind("folder:DIR", _open_folder, ("batch_size", "image_size", "grey", "mean", "std")),
    "parquet": SourceKind("parquet:FILE", _open_parquet, ("batch_size", "label_column", "feature_columns")),
    "csv": SourceKind("csv:FILE", open_csv, ("batch_size", "label_column", "feature_columns")),
}

#: All names without such a prefix.
FACTORY = SourceKind("package.module:factory", open_factory, ("batch_size",))

#: Prefix of a path by its suffix.
PREFIXES = {".npz": "npz", ".parquet": "parquet", ".csv": "csv"}

#: All forms of names, for messages.
FORMS = f"{', '.join(kind.form for kind in KINDS.values())} or {FACTORY.form}"


def complete_name(spec: str) -> str:
    """Return the name with its prefix: a folder is ``folder:DIR``, and the suffix of a file is its prefix.

    Names with a prefix, ``digits`` and names of factories are returned as they are.

    Raises:
        SettingError: If a path without a prefix does not exist, or has another suffix.
    """
    if "\0" in spec:
        raise SettingError(f"Data must be named as {FORMS}, but {spec!r} contains a zero byte.")
    if spec.partition(":")[0] in KINDS or is_factory_name(spec):
        return spec
    path = os.path.expanduser(spec)
    prefix = "folder" if os.path.isdir(path) else PREFIXES.get(os.path.splitext(path)[1].lower())
    if prefix and os.path.exists(path):
        return f"{prefix}:{spec}"
    if prefix:
        raise SettingError(f"There is no file '{spec}'. Data must be named as {FORMS}.")
    if os.path.exists(path):
        names = " or ".join(f"{name}:{spec}" for name in PREFIXES.values())
        raise SettingError(f"The format of '{spec}' is unknown. Did you mean {names}?")
    raise SettingError(f"Data must be named as {FORMS}, but is '{spec}', which is no file or folder either.")


def source_kind(spec: str) -> SourceKind:
    """Return the kind of data that a complete name stands for.

    Raises:
        SettingError: If the name has none of the forms.
    """
    prefix, _, path = spec.partition(":")
    kind = KINDS.get(prefix)
    if kind is None and is_factory_name(spec):
        return FACTORY
    if kind is not None and (path if ":" in kind.form else spec == prefix):
        return kind
    raise SettingError(f"Data must be named as {FORMS}, but is '{spec}'.")


def open_source(
    spec: str,
    options: SourceOptions | None = None,
    *,
    class_names: Sequence[str] | None = None,
    labelled: bool = True,
    folder: str = os.curdir,
) -> Source:
    """Open data by its name.

    Args:
        spec: ``digits``, ``npz:FILE``, ``folder:DIR``, ``parquet:FILE``, ``csv:FILE``, ``package.module:factory`` or a
            path that `complete_name` recognises.
        options: How to read the data.
        class_names: Names of the classes 0 ... K-1 if known. Labels given as names are numbered accordingly.
        labelled: Whether a table must have the label column named in the options.
        folder: Folder in which the module of a factory is looked for if it is not installed.

    Raises:
        SettingError: If the name has none of the forms, or an option does not apply.
        DataError: If the data cannot be used.
        MissingPackageError: If the data is a Parquet file and pyarrow is not installed.
    """
    spec = complete_name(spec)
    options, kind = options or SourceOptions(), source_kind(spec)
    invalid = [f"--{name.replace('_', '-')}" for name in options.given() if name not in kind.options]
    if invalid:
        raise SettingError(f"{', '.join(invalid)} does not apply to the data '{spec}'.")
    path = os.path.expanduser(spec.partition(":")[2])
    names = tuple(class_names) if class_names else None
    return kind.open(SourceRequest(spec, path, options, names, labelled, folder))
