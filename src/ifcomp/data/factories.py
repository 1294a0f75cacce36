"""Factories: functions of the user that are named as ``package.module:factory``.

Calling one runs the user's code. Only names that the user typed are called.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ifcomp.errors import IfcompError, SettingError


def is_factory_name(spec: str) -> bool:
    """Whether a name has the form ``package.module:factory``."""
    module, _, attribute = spec.partition(":")
    return all(part.isidentifier() for part in [*module.split("."), attribute])


def call_factory(
    spec: str,
    what: str,
    error: type[IfcompError],
    instances: type | tuple[type, ...] = (),
    *,
    folder: str = os.curdir,
) -> Any:
    """Import ``package.module``, installed or in a folder, and call ``factory`` without arguments.

    Args:
        spec: ``package.module:factory``.
        what: What the factory returns, for messages.
        error: Type of the error that is raised if the import or the call fails.
        instances: Types of attributes that are returned as they are instead of being called.
        folder: Folder in which the module is looked for if it is not installed.

    Raises:
        SettingError: If the name has another form.
    """
    if not is_factory_name(spec):
        raise SettingError(f"The {what} must be named as package.module:factory, but is '{spec}'.{_hint(spec)}")
    module_name, _, attribute = spec.partition(":")
    try:
        with _last_on_path(folder):
            value = getattr(importlib.import_module(module_name), attribute)
            return value if isinstance(value, instances) else value()
    except (Exception, SystemExit) as problem:
        raise error(_explain(spec, what, problem)) from problem


@contextmanager
def _last_on_path(folder: str) -> Iterator[None]:
    """Append a folder to ``sys.path``, so that its files never replace installed modules, and remove it at the end."""
    entry = os.path.abspath(folder)
    importlib.invalidate_caches()
    sys.path.append(entry)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's module may have removed it
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(entry)]


def _hint(spec: str) -> str:
    """Return the likely name of the module of a file."""
    file = spec.partition(":")[0]
    if not file.endswith(".py"):
        return ""
    module = os.path.normpath(file).removesuffix(".py").replace(os.sep, ".")
    return f" Did you mean {module}:{spec.partition(':')[2] or 'FUNCTION'}?"


def _explain(spec: str, what: str, problem: BaseException) -> str:
    module_name, _, attribute = spec.partition(":")
    if isinstance(problem, ModuleNotFoundError) and problem.name and f"{module_name}.".startswith(f"{problem.name}."):
        return (
            f"There is no module '{problem.name}' for the {what} '{spec}', neither in the current folder nor "
            f"installed.{_hint(spec)}"
        )
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if "importlib" not in frame.filename]
    if not frames and isinstance(problem, AttributeError):
        file = getattr(sys.modules.get(module_name), "__file__", None)
        where = f" ({file})" if file else ""
        return f"Module '{module_name}'{where} has no '{attribute}', but the {what} was named '{spec}'."
    if not frames and isinstance(problem, TypeError):
        return f"'{spec}' cannot be called without arguments to create the {what} ({problem})."
    where = f" in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else ""
    return f"'{spec}' failed to create the {what}: {type(problem).__name__}: {problem}{where}."
