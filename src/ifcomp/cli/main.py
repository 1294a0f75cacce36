"""The ``ifcomp`` command: the app, the registration of its commands, and error handling."""

from __future__ import annotations

import functools
import inspect
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperGroup

from ifcomp.cli import (
    apply,
    audit,
    bench,
    calibrate,
    demo,
    estimate,
    explain,
    fit,
    ood,
    options,
    predict,
    prune,
    report,
    reproduce,
    score,
    selftest,
)
from ifcomp.cli.output import Outcome, error_json, one_line, print_message
from ifcomp.errors import DataError, IfcompError
from ifcomp.progress import hide_progress

#: Exit code for invalid arguments and for every `IfcompError`.
USAGE_ERROR = 2
#: Exit code after Ctrl-C, as in shells.
INTERRUPTED = 130
#: Start of the note on an exception of the model's code; see `ifcomp.layers.forward.run_model`.
MODEL_FAILED = "The model failed on"

_CLICK_ERROR: Any = typer.BadParameter.__mro__[2]  # ClickException; typer has a copy of click since 0.26


AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object on standard output; everything else goes to standard error."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer and warnings.")]


class Commands(TyperGroup):
    """The group of all commands. Errors end a command with one message, or one JSON object, without a traceback."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line. With ``standalone_mode`` the process ends with the exit code."""
        words = sys.argv[1:] if args is None else list(args)
        if standalone_mode and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for terminals whose encoding lacks a character
        is_json = "--json" in words
        try:
            settings = {"obj": {"is_json": is_json}, **extra}
            result = super().main(args, prog_name, complete_var, False, windows_expand_args, **settings)
            code = result if isinstance(result, int) else 0
        except _CLICK_ERROR as error:
            code = _report_usage_error(error, is_json)
        if standalone_mode:
            sys.exit(code)
        return code

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except IfcompError as error:
            message = one_line(str(error)) if isinstance(error, DataError) else str(error)  # names in data
            _report_error(ctx, error, "Error:", message, USAGE_ERROR)
            raise typer.Exit(USAGE_ERROR) from error
        except KeyboardInterrupt as interrupt:
            _report_error(ctx, interrupt, "Stopped.", "Files are either complete or unchanged.", INTERRUPTED)
            raise typer.Exit(INTERRUPTED) from interrupt
        except Exception as error:
            if not any(MODEL_FAILED in note for note in getattr(error, "__notes__", [])):
                raise  # an error of the library, or of the user's data
            _report_error(ctx, error, "Error:", f"{type(error).__name__}: {error}.", USAGE_ERROR)
            raise typer.Exit(USAGE_ERROR) from error


def _report_error(ctx: Any, error: BaseException, title: str, message: str, code: int) -> None:
    text = " ".join([message, *getattr(error, "__notes__", [])])
    if ctx.obj["is_json"]:
        typer.echo(error_json(ctx.invoked_subcommand, error, text, code))
    else:
        print_message(title, "bold red", text)


def _report_usage_error(error: Any, is_json: bool) -> int:
    """Report an error of the command line itself, such as an unknown option. Returns the exit code."""
    ctx = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return USAGE_ERROR
    message = error.format_message()
    message += "" if message.endswith((".", "?")) else "."
    if is_json:
        command = None if ctx is None or ctx.parent is None else ctx.info_name
        typer.echo(error_json(command, error, message, USAGE_ERROR))
    else:
        hint = "" if ctx is None else f" See '{ctx.command_path} -h'."
        print_message("Error:", "bold red", f"{message}{hint}")
    return USAGE_ERROR


# Commands ------------------------------------------------------------------------------------------------------------


def as_command(function: Callable[..., Outcome]) -> Callable[..., None]:
    """Turn a function that returns an `Outcome` into a typer command with ``--json``, ``--quiet`` and ``--version``.

    A parameter whose type is a dataclass becomes one option per field. Standard output receives the outcome only.
    Anything else that is printed, also by the user's model or data, goes to standard error.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if name != "return" and is_dataclass(kind)}

    @functools.wraps(function)
    def run(ctx: typer.Context, **arguments: Any) -> None:
        as_json, quiet = arguments.pop("as_json"), arguments.pop("quiet") or ctx.find_root().params["quiet"]
        del arguments["version"]
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in fields(group)})
        with _output_of_user_code(quiet), warnings.catch_warnings(), _distributed() as is_first_process:
            warnings.showwarning = _print_warning
            outcome = function(**arguments)
        if not is_first_process:
            return
        if as_json:
            typer.echo(outcome.as_json(function.__name__))
        else:
            outcome.show(Console(soft_wrap=False), quiet=quiet)
        if outcome.exit_code:
            raise typer.Exit(outcome.exit_code)

    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        parameters += _group_parameters(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]
    for name, option in (("as_json", AsJson), ("quiet", Quiet), ("version", options.Version)):
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option))
    parameters.append(inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
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
def _output_of_user_code(quiet: bool) -> Iterator[None]:
    """Send what is printed to standard error, or nowhere. Quiet commands show no progress bars either."""
    if not quiet:
        with redirect_stdout(sys.stderr):
            yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), hide_progress():
        yield


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
    print_message("Warning:", "bold yellow", one_line(str(message)))


# The app -------------------------------------------------------------------------------------------------------------

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="[bold]Example:[/bold] ifcomp demo",
)


@app.callback()
def ifcomp(
    quiet: Quiet = False,
    version: options.Version = False,
) -> None:
    """Find wrong labels, detect out-of-distribution inputs and calibrate the predictions of a trained classifier."""


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
_register(as_command(explain.explain), explain.EPILOG)
_register(as_command(report.report), report.EPILOG)
_register(as_command(apply.apply), apply.EPILOG)
_register(as_command(selftest.selftest), selftest.EPILOG)
_register(as_command(reproduce.reproduce), reproduce.EPILOG)
_register(as_command(bench.bench), bench.EPILOG)
