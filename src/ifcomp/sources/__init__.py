"""Data by name: ``digits``, ``npz:FILE``, ``folder:DIR``, ``parquet:FILE`` or ``package.module:factory``."""

from ifcomp.sources.opening import open_source
from ifcomp.sources.source import Source, SourceOptions

__all__ = ["Source", "SourceOptions", "open_source"]
