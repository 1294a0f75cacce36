"""The ``ifcomp`` command: the app, the registration of its commands, and error handling."""

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
from typer.core import TyperGroup

from ifcomp._version import __version__
from ifcomp.cli import (
    apply,
    audit,
    bench,
    calibrate,
    demo,
    estimate,
    fit,
    ood,
    predict,
    prune,
    report,
    reproduce,
    score,
    selftest,
)
from ifcomp.cli.output import Outcome, print_message
from ifcomp.errors import IfcompError

#: Exit code for invalid arguments and for every `IfcompError`.
USAGE_ERROR = 2
#: Exit code after Ctrl-C, as in shells.
INTERRUPTED = 130

AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object on standard output; everything else goes to standard error."),
]


class Commands(TyperGroup):
    """The group of all commands. An `IfcompError` or Ctrl-C ends a command with a message, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except IfcompError as error:
            print_message("Error:", "bold red", _with_notes(str(error), error))
            raise typer.Exit(USAGE_ERROR) from error
        except KeyboardInterrupt as interrupt:
            message = _with_notes("Files are either complete or unchanged.", interrupt)
            print_message("Stopped.", "bold red", message)
            raise typer.Exit(INTERRUPTED) from interrupt


def _with_notes(message: str, error: BaseException) -> str:
    return " ".join([message, *getattr(error, "__notes__", [])])


# Commands ------------------------------------------------------------------------------------------------------------


def as_command(function: Callable[..., Outcome]) -> Callable[..., None]:
    """Turn a function that returns an `Outcome` into a typer command with the option ``--json``.

    A parameter whose type is a dataclass becomes one option per field. Standard output receives the outcome only.
    Anything else that is printed, also by the user's model or data, goes to standard error.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if name != "return" and is_dataclass(kind)}

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        as_json = arguments.pop("as_json")
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in fields(group)})
        with redirect_stdout(sys.stderr), warnings.catch_warnings(), _distributed() as is_first_process:
            warnings.showwarning = _print_warning
            outcome = function(**arguments)
        if not is_first_process:
            return
        if as_json:
            typer.echo(outcome.as_json(function.__name__))
        else:
            outcome.show(Console(soft_wrap=False))
        if outcome.exit_code:
            raise typer.Exit(outcome.exit_code)

    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        parameters += _group_parameters(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]
    parameters.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson))
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _group_parameters(group: Any) -> list[inspect.Parameter]:
    """Return one parameter per field of a group of options."""
    hints, kind = get_type_hints(group, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field.name, kind, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]


@contextmanager
def _distributed() -> Iterator[bool]:
    """Join the processes of ``torchrun``, if any. Yields whether this is the process that writes and prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    from ifcomp.distributed import data_parallel
    from ifcomp.io.files import discard_writes

    with data_parallel() as ranks, nullcontext() if ranks.rank == 0 else discard_writes():
        yield ranks.rank == 0


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print_message("Warning:", "bold yellow", str(message))


# The app -------------------------------------------------------------------------------------------------------------

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="[bold]Example:[/bold] ifcomp demo",
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"ifcomp {__version__}")
        raise typer.Exit


@app.callback()
def ifcomp(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Find wrong labels and out-of-distribution inputs, and calibrate predictions, from one fit of a trained
    classifier's curvature.
    """


def _register(function: Callable[..., Any], epilog: str) -> None:
    """Add a command. Its help is the docstring, one line per paragraph, followed by the epilog: an example."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.splitlines()) for paragraph in paragraphs)
    app.command(help=text, epilog=epilog)(function)


# In the order of the help.
_register(as_command(demo.demo), demo.EPILOG)
_register(as_command(estimate.estimate), estimate.EPILOG)
_register(as_command(fit.fit), fit.EPILOG)
_register(as_command(score.score), score.EPILOG)
_register(as_command(audit.audit), audit.EPILOG)
_register(as_command(ood.ood), ood.EPILOG)
_register(as_command(calibrate.calibrate), calibrate.EPILOG)
_register(as_command(predict.predict), predict.EPILOG)
_register(as_command(prune.prune), prune.EPILOG)
_register(as_command(report.report), report.EPILOG)
_register(as_command(apply.apply), apply.EPILOG)
_register(as_command(selftest.selftest), selftest.EPILOG)
_register(as_command(reproduce.reproduce), reproduce.EPILOG)
_register(bench.bench, bench.EPILOG)  # prints tables while it runs, so it returns no outcome
