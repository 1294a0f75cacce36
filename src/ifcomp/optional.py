"""Import errors of optional packages that name the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ifcomp.errors import MissingPackageError


@contextmanager
def requires_package(package: str, extra: str) -> Iterator[None]:
    """Convert a failed import inside the context to MissingPackageError.

    Args:
        package: Name of the package.
        extra: Extra of ifcomp that installs the package.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision built for another torch
        raise MissingPackageError(
            f"{package} cannot be imported ({error}). Install it with: pip install 'ifcomp[{extra}]'"
        ) from error
