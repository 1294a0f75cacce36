"""Architectures by the package that defines them."""

from collections.abc import Iterator, Sequence
from importlib import import_module

from experiments.torchvision_shim import declare_missing_operators
from experiments.zoo.entry import Entry

#: Modules whose architectures need torch only.
PLAIN = ("plain_vectors", "plain_images", "plain_sequences")
PACKAGES = ("torchvision_models", "timm_models", "timm_transformers", "transformers_models", "peft_models")


def load_entries(modules: Sequence[str] = (*PLAIN, *PACKAGES)) -> Iterator[Entry]:
    """Iterate over the architectures of modules. A module is imported when its first architecture is reached."""
    declare_missing_operators()
    for name in modules:
        yield from import_module(f"{__name__}.{name}").ENTRIES
