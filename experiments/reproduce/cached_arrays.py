"""Arrays of a study in the cache: each is computed once, and kept in the folder IFCOMP_CACHE."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.runs import cache_folder
from ifcomp.io.files import atomic_write

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class CachedArrays:
    """A folder with one .npz file per name.

    Attributes:
        folder: The folder.
    """

    folder: Path

    @classmethod
    def of(cls, study: str, identity: Mapping[str, Any]) -> CachedArrays:
        """Return the folder of everything that the arrays depend on, except the software.

        Args:
            study: Name of the study.
            identity: JSON-serialisable settings.
        """
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        folder = cache_folder() / f"{study}-arrays" / digest
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def get(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> Arrays:
        """Return the arrays of a name; compute and store them first if they are missing."""
        path = self.folder / f"{name}.npz"
        if not path.exists():
            arrays = compute()
            with atomic_write(path) as scratch, scratch.open("wb") as file:
                np.savez(file, **arrays)
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive)
