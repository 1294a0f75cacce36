"""Coverage-guided fuzzing of all code that reads untrusted files or text.

``python -m fuzz`` runs all targets; it needs ``pip install atheris``. The tests run the same targets for a few inputs.
"""
