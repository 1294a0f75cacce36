"""`SourceOptions`: how named data is read."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from ifcomp.errors import SettingError

DEFAULT_BATCH_SIZE = 128
MAX_BATCH_SIZE = 2**31 - 1

#: Largest side of a resized image in pixels.
MAX_IMAGE_SIZE = 2**14


@dataclass(frozen=True)
class SourceOptions:
    """Options for reading named data. None stands for the default. `open_source` refuses options that do not apply.

    Attributes:
        batch_size: Examples per batch. Results do not depend on it.
        image_size: Height and width in pixels to which images are resized.
        grey: Whether images have one channel instead of three.
        mean: Mean per channel, subtracted from images with values in 0 ... 1.
        std: Standard deviation per channel, by which images are divided after that.
        label_column: Column of a table with the labels; by default "label", if it exists.
        feature_columns: Columns of a table with the features, in the order of the inputs; by default all others.
    """

    batch_size: int | None = None
    image_size: int | None = None
    grey: bool | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    label_column: str | None = None
    feature_columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Validate types and ranges."""
        for name, value, largest in (
            ("batch size", self.batch_size, MAX_BATCH_SIZE),
            ("image size", self.image_size, MAX_IMAGE_SIZE),
        ):
            if value is not None and not (_is_integer(value) and 1 <= value <= largest):
                raise SettingError(f"The {name} must be a whole number from 1 to {largest:,}, but is {value!r}.")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and not (isinstance(values, tuple) and all(map(_is_finite, values))):
                raise SettingError(f"--{name} takes finite numbers, but got {values!r}.")
        columns = (self.label_column, *(self.feature_columns or ()))
        if not all(column is None or isinstance(column, str) for column in columns):
            raise SettingError(f"Names of columns must be strings, but are {columns!r}.")
        if self.grey not in (None, True, False):
            raise SettingError(f"grey must be True or False, but is {self.grey!r}.")
        if self.std is not None and not all(value > 0 for value in self.std):
            raise SettingError(f"Every standard deviation must be above 0, but they are {_join(self.std)}.")

    @property
    def batch_size_or_default(self) -> int:
        """The batch size, or the default of 128."""
        return self.batch_size or DEFAULT_BATCH_SIZE

    def given(self) -> dict[str, Any]:
        """Return the options that are not None, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def with_defaults(self, defaults: SourceOptions, allowed: Iterable[str]) -> SourceOptions:
        """Fill options that are None from ``defaults``, for the names in ``allowed``."""
        inherited = {name: value for name, value in defaults.given().items() if name in set(allowed)}
        return SourceOptions(**{**inherited, **self.given()})


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _join(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
