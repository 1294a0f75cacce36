"""`Source`: named data as batches that can be gone over again and again, and what can be shown of an example."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

from numpy.typing import NDArray
from torch import Tensor

from ifcomp.data.batches import as_batches
from ifcomp.errors import SettingError

if TYPE_CHECKING:
    from ifcomp.report import Preview

DEFAULT_BATCH_SIZE = 128
LARGEST_BATCH = 2**31 - 1

#: Side of a resized image in pixels.
LARGEST_IMAGE = 2**14

#: Values of a row that a preview shows at most.
VALUES_SHOWN = 24


@dataclass(frozen=True, eq=False)
class Batches:
    """Examples in order, in batches; iterating starts anew each time.

    Attributes:
        fetch: Gives the inputs and the labels, if any, of the examples from start to stop.
        count: Number of examples.
        batch_size: Examples in a batch; the last may have fewer.
        labelled: Whether to yield ``(x, y)`` or ``x``.
    """

    fetch: Callable[[int, int], tuple[Tensor, Tensor | None]]
    count: int
    batch_size: int
    labelled: bool = True

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self.count, self.batch_size):
            x, y = self.fetch(start, min(start + self.batch_size, self.count))
            yield x if y is None or not self.labelled else (x, y)


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """The batches of a user's own data without their labels."""

    data: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        return (batch.kwargs or batch.args[0] for batch in as_batches(self.data))


class SizedUnlabelled(Unlabelled):
    """The same of data that knows how many batches it has."""

    def __len__(self) -> int:
        return len(cast(Sized, self.data))


@dataclass(frozen=True, eq=False)
class Source:
    """Data as it was named on the command line, opened.

    Attributes:
        spec: The name as it was typed.
        data: Re-iterable batches: ``(x, y)``, ``x``, or what a factory gives.
        previews: Gives what can be shown of some examples.
        labels: All labels [N] where they are known before a pass over the data, else None.
        class_names: Names of the classes 0 ... K-1 where they are known, else None.
        names: What each example is called, such as the path of its file, else None.
    """

    spec: str
    data: Iterable[Any]
    previews: Callable[[Sequence[int]], list[Preview]]
    labels: Tensor | None = None
    class_names: tuple[str, ...] | None = None
    names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        """Number of examples. A factory's data is gone over once to count them."""
        if isinstance(self.data, Batches):
            return self.data.count
        return sum(batch.size for batch in as_batches(self.data))

    def batches(self) -> Iterable[Any]:
        """What `IFComp.fit` and `IFComp.score` take."""
        return self.data

    def unlabelled(self) -> Source:
        """The same inputs without labels: those of other classes than the model's mean nothing to it."""
        if isinstance(self.data, Batches):
            return replace(self, data=replace(self.data, labelled=False), labels=None, class_names=None)
        without = (SizedUnlabelled if isinstance(self.data, Sized) else Unlabelled)(self.data)
        return replace(self, data=without, class_names=None)

    def preview(self, indices: Iterable[int]) -> list[Preview]:
        """What to show of the examples at the given positions, in that order."""
        return self.previews(list(indices))


@dataclass(frozen=True)
class SourceOptions:
    """How data is read. None stands for the default; what a kind of data does not take is refused.

    Attributes:
        batch_size: Examples at once; results do not depend on it.
        image_size: Resize images to so many pixels in height and width.
        grey: Images with one channel instead of three.
        mean: Subtracted from every channel of images with values in 0 ... 1.
        std: Divides every channel after that.
        label_column: Of a table; "label" by default, if there is one.
        feature_columns: Of a table; all others by default.
    """

    batch_size: int | None = None
    image_size: int | None = None
    grey: bool | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    label_column: str | None = None
    feature_columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        for name, value, most in (
            ("batch size", self.batch_size, LARGEST_BATCH),
            ("image size", self.image_size, LARGEST_IMAGE),
        ):
            if value is not None and not (_is_whole(value) and 1 <= value <= most):
                raise SettingError(f"The {name} must be a whole number from 1 to {most:,}, but is {value!r}.")
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if numbers is not None and not (isinstance(numbers, tuple) and all(map(_is_finite, numbers))):
                raise SettingError(f"--{name} takes finite numbers, but got {numbers!r}.")
        texts = (self.label_column, *(self.feature_columns or ()))
        if not (self.grey in (None, True, False) and all(text is None or isinstance(text, str) for text in texts)):
            raise SettingError("Columns are named by text, and grey is either true or false.")
        if self.std is not None and not all(value > 0 for value in self.std):
            raise SettingError(f"Every standard deviation must be above 0, but they are {_listed(self.std)}.")

    @property
    def examples_at_once(self) -> int:
        """The batch size, or its default."""
        return self.batch_size or DEFAULT_BATCH_SIZE

    def given(self) -> dict[str, Any]:
        """The options that are set."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def or_else(self, other: SourceOptions, allowed: Iterable[str]) -> SourceOptions:
        """These options, and those of ``other`` in ``allowed`` that are not set here."""
        inherited = {name: value for name, value in other.given().items() if name in set(allowed)}
        return SourceOptions(**{**inherited, **self.given()})


def preview_of(index: int, x: NDArray[Any], columns: Sequence[str] = ()) -> Preview:
    """How one input looks: images, [C, H, W], [H, W, C] or [H, W], as such, anything else as its first values."""
    from ifcomp.report import Preview  # slow to import, and only needed to show something

    name = f"row {index}"
    if x.dtype.kind == "f" and _is_image(x.shape):
        return Preview("image", x, name)
    values = x.reshape(-1)[:VALUES_SHOWN].tolist()
    if x.dtype.kind != "f":
        return Preview("text", " ".join(map(str, values)) + (" ..." if x.size > VALUES_SHOWN else ""), name)
    return Preview("row", dict(zip(columns or map(str, range(x.size)), values, strict=False)), name)


def _is_image(shape: Sequence[int]) -> bool:
    if len(shape) == 3 and {shape[0], shape[-1]} & {1, 3}:
        return min(sorted(shape)[1:]) > 1
    return len(shape) == 2 and min(shape) > 3


def readable(text: str) -> str:
    """A name as it can be shown and written: what is no character, as in file names not in UTF-8, is an escape."""
    return str(text).encode("utf-8", "backslashreplace").decode()


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
