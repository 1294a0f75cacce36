"""Fuzz targets. A target takes bytes and a scratch folder, and may raise only errors of the library."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fuzz import data, fit_files, models, words
from fuzz.common import blank


@dataclass(frozen=True)
class Target:
    """One fuzz target.

    Attributes:
        run: Function of the bytes and a scratch folder.
        seeds: Function that returns the initial corpus.
        inputs: Number of inputs of a full run.
        max_bytes: Largest size of an input.
    """

    run: Callable[[bytes, Path], None]
    seeds: Callable[[], Iterable[bytes]]
    inputs: int
    max_bytes: int = 4096


TARGETS: dict[str, Target] = {
    "words": Target(words.words, blank, 60_000, 256),
    "command": Target(words.command, blank, 1_500, 256),
    "checkpoint": Target(fit_files.checkpoint, blank, 10_000, 512),
    "record": Target(fit_files.record, blank, 50_000, 512),
    "fit-results": Target(fit_files.fit_results, blank, 50_000, 512),
    "pairs": Target(fit_files.pairs, blank, 15_000, 512),
    "safetensors-header": Target(fit_files.header, blank, 20_000, 512),
    "weights": Target(fit_files.weights, fit_files.weights_seeds, 20_000, 8192),
    "factors": Target(fit_files.factors, fit_files.factors_seeds, 15_000, 8192),
    "torch-pickle": Target(fit_files.torch_pickle, fit_files.pickle_seeds, 15_000, 2048),
    "parquet": Target(data.parquet, data.parquet_seeds, 20_000, 16_384),
    "csv": Target(data.csv, data.csv_seeds, 50_000),
    "decisions": Target(data.decisions, data.decisions_seeds, 50_000, 512),
    "folder": Target(data.folder_of_images, data.image_seeds, 15_000),
    "npz": Target(data.npz, data.npz_seeds, 20_000),
    "factors-content": Target(fit_files.factors_content, blank, 4_000, 256),
    "inventory": Target(models.inventory, blank, 4_000, 128),
    "report": Target(words.report, blank, 500, 512),
    "influence": Target(models.influence, blank, 1_000, 128),
}
