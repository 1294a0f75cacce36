"""Fuzzing: bytes that a coverage-guided fuzzer makes up, given to everything that reads files or words of others.

``python -m fuzz`` runs all targets; it needs ``pip install atheris``. The same targets run for a moment with the tests.
"""
