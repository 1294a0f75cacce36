"""What all commands have in common: groups of options, ``--json``, and how they end."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from ifcomp.cli.output import Outcome, visible

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output; all else goes to standard error.")
]


def command(function: Callable[..., Outcome]) -> Callable[..., None]:
    """Make a typer command of a function that returns an `Outcome`.

    Parameters that are dataclasses become one option a field. Whatever the work prints, the user's own code included,
    goes to standard error, so that standard output holds the outcome and nothing else.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if name != "return" and is_dataclass(kind)}

    @functools.wraps(function)
    def run(**given: Any) -> None:
        as_json = given.pop("as_json")
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        with redirect_stdout(sys.stderr), warnings.catch_warnings(), _with_other_processes() as first:
            warnings.showwarning = _show_warning
            outcome = function(**given)
        if not first:
            return
        if as_json:
            typer.echo(outcome.as_json(function.__name__))
        else:
            outcome.show(Console(soft_wrap=False))
        if outcome.exit_code:
            raise typer.Exit(outcome.exit_code)

    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        parameters += _spread(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]
    parameters.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson))
    ordered = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    return run


@contextmanager
def _with_other_processes() -> Iterator[bool]:
    """Share the work with the processes that torchrun started beside this one; the first of them writes and speaks."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    from ifcomp.distributed import data_parallel
    from ifcomp.io.files import discard_writes

    with data_parallel() as process, nullcontext() if process.rank == 0 else discard_writes():
        yield process.rank == 0


def _spread(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(group)
    ]


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("Warning: ", "bold yellow"), visible(str(message))))
