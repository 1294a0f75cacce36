"""Factories: functions of the user that are named as ``package.module:factory``.

Calling one runs the user's code. Only names that the user typed are called.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from ifcomp.errors import IfcompError, SettingError


def is_factory_name(spec: str) -> bool:
    """Whether a name has the form ``package.module:factory``."""
    module, _, attribute = spec.partition(":")
    return all(part.isidentifier() for part in [*module.split("."), attribute])


def call_factory(spec: str, what: str, error: type[IfcompError], instances: type | tuple[type, ...] = ()) -> Any:
    """Import ``package.module``, also from the current folder, and call ``factory`` without arguments.

    Args:
        spec: ``package.module:factory``.
        what: What the factory returns, for messages.
        error: Type of the error that is raised if the import or the call fails.
        instances: Types of attributes that are returned as they are instead of being called.

    Raises:
        SettingError: If the name has another form.
    """
    if not is_factory_name(spec):
        raise SettingError(f"The {what} must be named as package.module:factory, but is '{spec}'.")
    module_name, _, attribute = spec.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value = getattr(importlib.import_module(module_name), attribute)
        return value if isinstance(value, instances) else value()
    except (Exception, SystemExit) as problem:
        raise error(_explain(spec, what, problem)) from problem


def _explain(spec: str, what: str, problem: BaseException) -> str:
    module_name, _, attribute = spec.partition(":")
    if isinstance(problem, ModuleNotFoundError) and problem.name and f"{module_name}.".startswith(f"{problem.name}."):
        return (
            f"There is no module '{problem.name}' for the {what} '{spec}', neither in the current folder nor installed."
        )
    frames = [frame for frame in traceback.extract_tb(problem.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if "importlib" not in frame.filename]
    if not frames and isinstance(problem, AttributeError):
        return f"Module '{module_name}' has no '{attribute}', but the {what} was named '{spec}'."
    if not frames and isinstance(problem, TypeError):
        return f"'{spec}' cannot be called without arguments to create the {what} ({problem})."
    where = f" in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else ""
    return f"'{spec}' failed to create the {what}: {type(problem).__name__}: {problem}{where}."
