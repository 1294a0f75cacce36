PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.requirements-installed

.PHONY: setup demo test test-second-tier test-all test-lowest coverage faults fuzz mutants lint docs bench clean

setup: $(STAMP)

$(STAMP): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $(STAMP)

demo: setup
	$(BIN)/ifcomp demo

test: setup  # everything that guards correctness
	$(BIN)/python -m pytest -n 2 -m "not second_tier"

test-second-tier: setup  # browser, faults, hostile files, experiments, examples, benchmarks
	$(BIN)/python -m pytest -n 2 -m second_tier

test-all: test test-second-tier

test-lowest:  # the lowest version of every dependency, in an environment of its own
	test -x $(VENV)-lowest/bin/python || $(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet -r requirements-lowest.txt -e .
	$(VENV)-lowest/bin/python -m pytest -n 2

coverage: setup  # of lines and branches, commands and distributed processes included
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n 2
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

faults: setup
	$(BIN)/python tests/faults/kill_many.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/prose.py

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: setup
	$(BIN)/ifcomp bench

fuzz: setup  # needs atheris: .venv/bin/python -m pip install atheris==3.0.0
	$(BIN)/python -m fuzz

mutants: setup  # needs mutmut: .venv/bin/python -m pip install mutmut==3.8.0
	$(BIN)/python tests/mutation/run.py

clean:
	rm -rf $(VENV) $(VENV)-lowest .coverage* site mutants .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
