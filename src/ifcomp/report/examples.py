"""Examples in a report: previews, influential training examples, and nearest neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ifcomp.errors import DataError, SettingError

PreviewKind = Literal["image", "text", "row"]


@dataclass(frozen=True)
class Preview:
    """The display of an example.

    Attributes:
        kind: "image", "text" or "row".
        content: A path, Pillow image or array ([H, W], [H, W, C] or [C, H, W]; floats in 0 ... 1, integers in
            0 ... 255) for an image; a string for a text; a mapping of column names to values for a row.
        name: File name or other identifier; shown and searched.
    """

    kind: PreviewKind
    content: Any
    name: str = ""

    def __post_init__(self) -> None:
        """Check kind and content."""
        if self.kind not in get_args(PreviewKind):
            raise SettingError(f"The kind of a preview must be one of {get_args(PreviewKind)}, but is {self.kind!r}.")
        if self.kind == "text" and not isinstance(self.content, str):
            raise DataError(f"The content of a text preview must be a string, but is {type(self.content).__name__}.")
        if self.kind == "row" and not isinstance(self.content, Mapping):
            raise DataError(f"The content of a row preview must be a mapping, but is {type(self.content).__name__}.")


@dataclass(frozen=True)
class TrainingExample:
    """A training example that supports or contradicts the label of a suspect.

    Attributes:
        index: Position in the training data.
        influence: Positive if it supports the given label of the suspect, negative if it contradicts it.
        label: Label of the training example.
        preview: Preview of the training example; None stands for the preview of its index, if any.
    """

    index: int
    influence: float
    label: int
    preview: Preview | None = None


@dataclass(frozen=True)
class Neighbour:
    """One of the nearest examples of a suspect.

    Attributes:
        index: Position in the reference of the audit.
        label: Given label of the neighbour.
        preview: Preview of the neighbour, or None.
    """

    index: int
    label: int
    preview: Preview | None = None


@dataclass(frozen=True)
class LayerNeighbours:
    """Nearest examples of a suspect in one layer.

    Attributes:
        layer: Name of the layer.
        weight: Weight of their votes in the pool, from 0 to 1.
        examples: The neighbours to show, nearest first.
        labels: Given labels of all nearest examples that the audit keeps. Empty stands for those of the examples.
    """

    layer: str
    weight: float
    examples: tuple[Neighbour, ...]
    labels: tuple[int, ...] = ()


@dataclass(frozen=True)
class OODExample:
    """An input that the detector flags.

    Attributes:
        data: Name of its data.
        index: Position in this data.
        score: Score of the detector.
        prediction: Class that the model predicts.
        confidence: Its softmax probability.
        preview: Preview of the input, or None.
        nearest: Nearest training examples, nearest first.
    """

    data: str
    index: int
    score: float
    prediction: int
    confidence: float
    preview: Preview | None = None
    nearest: tuple[Neighbour, ...] = ()
