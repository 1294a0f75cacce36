"""Options that several commands share, each written once: single ones as annotated types, groups as dataclasses.

A group is a parameter of a command like any other; `command.command` spreads it over the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ifcomp.errors import SettingError

if TYPE_CHECKING:
    from ifcomp.curvature.factors import Damping
    from ifcomp.data.sources import SourceOptions

MODEL_FORM = "package.module:factory, a function without arguments; the current folder counts"
DATA_FORM = "digits, npz:FILE, folder:DIR, parquet:FILE or package.module:factory"
_DATA, _MODEL = "How the data is read", "Model and run"

Run = Annotated[str, typer.Argument(metavar="RUN", help="File that 'ifcomp fit' wrote.")]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Weights of the model: .safetensors, or a file of torch.save, of which only tensors are read.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda:0.", rich_help_panel=_MODEL)]
DampingText = Annotated[
    str | None,
    typer.Option(
        "--damping",
        metavar="NUMBER",
        help="Added to the curvature: relative:0.1 for a multiple of each layer's mean, or a number.",
    ),
]
Alpha = Annotated[float, typer.Option(min=0, help="Weight of an example beside a training example.")]
Probes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Estimate complexity from so many random directions instead of all labels: quick for many classes."
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Hold no more than this beside model and data, such as 8GB; same results."),
]

CheckpointEvery = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="How often what is done so far is saved in OUT.partial; the same command goes on from there.",
    ),
]

Layers = Annotated[
    str | None, typer.Option(metavar="A,B,C", help="Only these: last, or names and patterns such as 'fc*'.")
]

TrainingData = Annotated[
    str | None,
    typer.Argument(
        metavar="DATA",
        help=f"Labelled data that the model was trained on: {DATA_FORM}.",
        show_default="the training data of the run",
    ),
]
NoiseRate = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Share of wrong labels, if known: as many are suspects.",
        show_default="suspects are labels that the model contradicts",
    ),
]
Fraction = Annotated[float | None, typer.Option(min=0, max=1, help="Share of labels to call suspects instead.")]


class Sua(StrEnum):
    """One input basis for all offsets of a convolution kernel."""

    auto = "auto"
    yes = "yes"
    no = "no"


class Fisher(StrEnum):
    """Whose labels the curvature is averaged over."""

    auto = "auto"
    exact = "exact"
    sampled = "sampled"
    empirical = "empirical"


@dataclass(frozen=True)
class ModelChoice:
    """Which model a run belongs to; what is None is taken from the run's record."""

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
            help="Import and open what the run's record names, though you did not write it in this folder.",
            rich_help_panel=_MODEL,
        ),
    ] = False


@dataclass(frozen=True)
class DataChoice:
    """How data is read."""

    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Examples at once; changes no result.", show_default="128", rich_help_panel=_DATA),
    ] = None
    image_size: Annotated[
        int | None,
        typer.Option(min=1, help="Resize images of a folder to so many pixels, squared.", rich_help_panel=_DATA),
    ] = None
    grey: Annotated[
        bool | None,
        typer.Option("--grey/--colour", help="One channel or three.", show_default="colour", rich_help_panel=_DATA),
    ] = None
    mean: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Subtracted from each channel in 0 ... 1.", rich_help_panel=_DATA),
    ] = None
    std: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Divides each channel after that.", rich_help_panel=_DATA)
    ] = None
    label_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of a Parquet file.", show_default="label", rich_help_panel=_DATA),
    ] = None
    feature_columns: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Of a Parquet file.", show_default="all others", rich_help_panel=_DATA),
    ] = None

    def parsed(self) -> SourceOptions:
        """As `open_source` takes them."""
        from ifcomp.data.sources import SourceOptions

        return SourceOptions(
            batch_size=self.batch_size,
            image_size=self.image_size,
            grey=self.grey,
            mean=numbers("--mean", self.mean),
            std=numbers("--std", self.std),
            label_column=self.label_column,
            feature_columns=names(self.feature_columns),
        )


def names(text: str | None) -> tuple[str, ...] | None:
    """``a,b,c`` as a tuple."""
    return None if text is None else tuple(part.strip() for part in text.split(","))


def layers(text: str | None) -> str | tuple[str, ...] | None:
    """``last``, or names and patterns with commas between them."""
    return text if text == "last" else names(text)


def sua(wanted: Sua) -> Literal["auto"] | bool:
    """As `IFComp` takes it."""
    return "auto" if wanted is Sua.auto else wanted is Sua.yes


def numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """``0.1,0.2`` as a tuple, or SettingError."""
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SettingError(f"{option} takes numbers with commas between them, but got '{text}'.") from error


def damping(text: str | None) -> Damping | None:
    """``relative:0.1`` or a number, checked; None is left to the caller."""
    from ifcomp.curvature.factors import Relative, check_damping

    if text is None:
        return None
    kind, colon, rest = text.rpartition(":")
    try:
        value = float(rest)
    except ValueError:
        kind = "wrong"
    if kind not in ("", "relative") or (colon and not kind):
        raise SettingError(f"--damping must be a number such as 1e-12, or relative:0.1, but is '{text}'.")
    return check_damping(Relative(value) if kind else value)


def damping_text(value: Damping) -> str:
    """A damping as it is typed."""
    from ifcomp.curvature.factors import Relative

    return f"relative:{value.multiple:g}" if isinstance(value, Relative) else f"{value:g}"
