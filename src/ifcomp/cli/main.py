"""The ``ifcomp`` command: one file a command, registered at the end of this one."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from ifcomp._version import __version__
from ifcomp.cli import audit, bench, calibrate, demo, estimate, fit, ood, predict, prune, report, reproduce, score
from ifcomp.cli.output import visible
from ifcomp.errors import IfcompError

#: Exit code of a command that was used wrongly or given something that it cannot work with.
USAGE_ERROR = 2
#: Exit code of a command that was interrupted from the keyboard, as shells have it.
INTERRUPTED = 130


class Commands(TyperGroup):
    """All commands; errors that the library raises on purpose end them with a message instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except IfcompError as error:
            _tell("Error: ", " ".join([str(error), *getattr(error, "__notes__", [])]))
            raise typer.Exit(USAGE_ERROR) from error
        except KeyboardInterrupt as interrupt:
            notes = getattr(interrupt, "__notes__", [])
            _tell("Stopped. ", " ".join(["Files are either complete or as they were before.", *notes]))
            raise typer.Exit(INTERRUPTED) from interrupt


def _tell(title: str, words: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text.assemble((title, "bold red"), visible(words)))


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="[bold]Example:[/bold] ifcomp demo",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ifcomp {__version__}")
        raise typer.Exit


@app.callback()
def ifcomp(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """How far to trust a prediction, which labels are wrong, which inputs are new: from one fit of a trained
    classifier's curvature.
    """


# The commands, in the order of the help. A command is a function in a file of its own, and its EPILOG the example that
# its help ends with.
app.command(epilog=demo.EPILOG)(demo.demo)
app.command(epilog=estimate.EPILOG)(estimate.estimate)
app.command(epilog=fit.EPILOG)(fit.fit)
app.command(epilog=score.EPILOG)(score.score)
app.command(epilog=audit.EPILOG)(audit.audit)
app.command(epilog=ood.EPILOG)(ood.ood)
app.command(epilog=calibrate.EPILOG)(calibrate.calibrate)
app.command(epilog=predict.EPILOG)(predict.predict)
app.command(epilog=prune.EPILOG)(prune.prune)
app.command(epilog=report.EPILOG)(report.report)
app.command(epilog=reproduce.EPILOG)(reproduce.reproduce)
app.command(epilog=bench.EPILOG)(bench.bench)
