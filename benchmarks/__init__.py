"""Benchmarks: interleaved timings of the library and of references.

``python -m benchmarks`` (the same as ``make bench`` and ``ifcomp bench``) runs the suites of `benchmarks.suites`, one
module per suite. ``python -m benchmarks.page`` writes the results as a Markdown page.
"""
