"""Benchmarks: timings as ratios of interleaved runs, and the references they are ratios to.

``python -m benchmarks`` (the same as ``make bench`` and ``ifcomp bench``) runs the suites of `benchmarks.suites`, one
file each. ``python -m benchmarks.page`` makes a page from what they wrote, ``python -m benchmarks.profile`` shows where
the time goes.
"""
