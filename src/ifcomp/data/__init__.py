"""Batches, and data by name: ``digits``, ``npz:FILE``, ``folder:DIR``, ``parquet:FILE``, ``package.module:factory``."""
