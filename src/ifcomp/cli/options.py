"""Options shared by several commands: single options as annotated types, groups of options as dataclasses.

A command takes a group as one parameter; `ifcomp.cli.main.as_command` turns each of its fields into an option.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import typer

from ifcomp._version import __version__
from ifcomp.errors import SettingError

if TYPE_CHECKING:
    from ifcomp.curvature.factors import Damping, FisherKind
    from ifcomp.data.sources import SourceOptions

Default = TypeVar("Default", bound="Damping | None")

MODEL_FORM = "package.module:factory, a function without arguments; modules in the current folder are found"
DATA_FORM = "digits, npz:FILE, folder:DIR, parquet:FILE, csv:FILE, a path without prefix, or package.module:factory"
_DATA, _MODEL = "Data", "Model and run"

#: Largest number of classes for which ``--fisher auto`` is exact. The exact Fisher has no sampling error, but its cost
#: grows with the number of classes.
EXACT_UP_TO = 100

# Arguments -----------------------------------------------------------------------------------------------------------

RunPath = Annotated[str, typer.Argument(metavar="RUN", help="File written by 'ifcomp fit'.")]
OptionalRunPath = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="File written by 'ifcomp fit'. Without it give --model and --data."),
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help=f"The model: {MODEL_FORM}.")]
FitData = Annotated[str, typer.Argument(metavar="DATA", help=f"The training data: {DATA_FORM}.")]
TrainingData = Annotated[
    str | None,
    typer.Argument(
        metavar="DATA",
        help=f"Labelled data that the model was trained on: {DATA_FORM}.",
        show_default="the training data of the run",
    ),
]

# Single options ------------------------------------------------------------------------------------------------------

Weights = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Weights of the model: a .safetensors or torch.save file, which is never unpickled.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[str, typer.Option(help="Device of the model, such as cpu or cuda:0.", rich_help_panel=_MODEL)]
DampingText = Annotated[
    str | None,
    typer.Option(
        "--damping",
        metavar="NUMBER",
        help="Damping, added to the curvature: a number, or relative:0.1 for a multiple of the mean of each layer.",
    ),
]
Alpha = Annotated[float, typer.Option(min=0, help="Weight of an example, relative to one training example.")]
Probes = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Estimate complexity from this number of random probes instead of all labels; faster for many classes.",
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Memory limit, such as 8GB, model and data not included. Results do not depend on it."
    ),
]
CheckpointEvery = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Interval at which progress is saved in OUT.partial. Repeating the command resumes from there.",
    ),
]
LabelColumn = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Label column of a table.", show_default="label", rich_help_panel=_DATA),
]
Layers = Annotated[
    str | None,
    typer.Option(metavar="A,B,C", help="Layers to cover: last, or names and patterns such as 'fc*'. Default: all."),
]
SkipUncovered = Annotated[
    bool,
    typer.Option("--skip-uncovered", help="Skip parameters of unsupported layers instead of ending with an error."),
]


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"ifcomp {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", "-V", help="Show the version and exit.", callback=_show_version, is_eager=True)
]


class Sua(StrEnum):
    """Values of ``--sua``: whether all offsets of a convolution kernel share one eigenbasis of the inputs."""

    auto = "auto"
    yes = "yes"
    no = "no"

    def setting(self) -> Literal["auto"] | bool:
        """Return the argument ``sua`` of `IFComp`."""
        return "auto" if self is Sua.auto else self is Sua.yes


class Fisher(StrEnum):
    """Values of ``--fisher``: the labels over which the curvature is averaged."""

    auto = "auto"
    exact = "exact"
    sampled = "sampled"
    empirical = "empirical"

    def setting(self, num_classes: int) -> FisherKind:
        """Return the argument ``fisher`` of `IFComp`. Auto is exact for up to `EXACT_UP_TO` classes, else sampled."""
        if self is Fisher.auto:
            return "exact" if num_classes <= EXACT_UP_TO else "sampled"
        return cast("FisherKind", self.value)


# Groups of options ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOptions:
    """The model of a run. None stands for the value in the record of the run."""

    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help=f"The model: {MODEL_FORM}.", show_default="that of the run", rich_help_panel=_MODEL
        ),
    ] = None
    weights: Weights = None
    device: Device = "cpu"
    trust_run: Annotated[
        bool,
        typer.Option(
            "--trust-run",
            envvar="IFCOMP_TRUST_RUN",
            help="Import the code and open the files that the run names, even if you did not write it.",
            rich_help_panel=_MODEL,
        ),
    ] = False


@dataclass(frozen=True)
class DataOptions:
    """Options for reading data. None stands for the default."""

    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Examples per batch. Results do not depend on it.",
            show_default="128",
            rich_help_panel=_DATA,
        ),
    ] = None
    image_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Resize the images of a folder to this height and width in pixels.", rich_help_panel=_DATA
        ),
    ] = None
    grey: Annotated[
        bool | None,
        typer.Option(
            "--grey/--colour",
            help="Read images with one channel or three.",
            show_default="colour",
            rich_help_panel=_DATA,
        ),
    ] = None
    mean: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C", help="Mean per channel, to subtract; channels are in 0 ... 1.", rich_help_panel=_DATA
        ),
    ] = None
    std: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Standard deviation per channel, to divide by.", rich_help_panel=_DATA),
    ] = None
    label_column: LabelColumn = None
    feature_columns: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="Feature columns of a table, in the order of the model's inputs.",
            show_default="those of the training data, or all others",
            rich_help_panel=_DATA,
        ),
    ] = None

    def parse(self) -> SourceOptions:
        """Return the options for `ifcomp.data.sources.open_source`."""
        from ifcomp.data.sources import SourceOptions

        return SourceOptions(
            batch_size=self.batch_size,
            image_size=self.image_size,
            grey=self.grey,
            mean=parse_numbers("--mean", self.mean),
            std=parse_numbers("--std", self.std),
            label_column=self.label_column,
            feature_columns=parse_names(self.feature_columns),
        )


def command_line(name: str, *arguments: str, **settings: Any) -> str:
    """Return a command for the shell, quoted.

    Args:
        name: Name of the command.
        *arguments: Its arguments. Upper-case placeholders such as DATA stay as they are.
        **settings: Groups of options (dataclasses) or single options by name. Options that are None or False, and
            those of a group that have their default, are left out.
    """
    words = ["ifcomp", name, *arguments]
    for key, value in settings.items():
        if is_dataclass(value):
            for field in fields(value):
                given = getattr(value, field.name)
                words += [] if given == field.default else _option_words(field.name, given)
        else:
            words += _option_words(key, value)
    return shlex.join(words)


def _option_words(name: str, value: Any) -> list[str]:
    if name == "grey" and value is not None:
        return ["--grey" if value else "--colour"]
    flag = f"--{name.replace('_', '-')}"
    if value is None or value is False:
        return []
    return [flag] if value is True else [flag, str(value)]


# Text on the command line --------------------------------------------------------------------------------------------


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """Parse ``a,b,c``."""
    return None if text is None else tuple(part.strip() for part in text.split(","))


def parse_layers(text: str | None) -> str | tuple[str, ...] | None:
    """Parse ``last``, or names and patterns separated by commas."""
    return text if text == "last" else parse_names(text)


def parse_numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """Parse ``0.1,0.2``; the name of the option is for the error message."""
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SettingError(f"{option} takes numbers separated by commas, but got '{text}'.") from error


def parse_damping(text: str | None, default: Default) -> Damping | Default:
    """Parse and check a number or ``relative:0.1``; None gives the default."""
    from ifcomp.curvature.factors import Relative, check_damping

    if text is None:
        return default
    kind, colon, number = text.rpartition(":")
    try:
        value = float(number)
    except ValueError:
        kind = "invalid"
    if kind not in ("", "relative") or (colon and not kind):
        raise SettingError(f"--damping must be a number such as 1e-12, or relative:0.1, but is '{text}'.")
    return check_damping(Relative(value) if kind else value)


def format_damping(damping: Damping) -> str:
    """Return the text that `parse_damping` reads."""
    from ifcomp.curvature.factors import Relative

    return f"relative:{damping.multiple:g}" if isinstance(damping, Relative) else f"{damping:g}"
