"""Benchmarks: timings as ratios of interleaved runs, and the references they are ratios to."""
