"""Data by name: ``digits``, ``npz:FILE``, ``folder:DIR``, ``parquet:FILE`` or ``package.module:factory``."""

from ifcomp.sources.opening import open_source
from ifcomp.sources.source import Preview, Source, SourceOptions

__all__ = ["Preview", "Source", "SourceOptions", "open_source"]
