"""Optional packages: how to install one is said where its import fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ifcomp.errors import MissingPackageError


@contextmanager
def needs(package: str, extra: str) -> Iterator[None]:
    """Turn a failing import of a package inside the context into MissingPackageError.

    Args:
        package: As it is called by its users.
        extra: The extra of this library that installs it.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:  # torchvision raises the second where it does not fit torch
        raise MissingPackageError(
            f'{package} cannot be imported ({error}). Install it with: pip install "ifcomp[{extra}]"'
        ) from error
