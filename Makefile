PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PURELIB := "import sysconfig; print(sysconfig.get_path('purelib'))"
STAMP := $(VENV)/.requirements-installed

.PHONY: setup demo test test-second-tier test-all test-lowest coverage faults soak fuzz mutants zoo lint docs bench clean

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

soak: setup  # 200,000 inputs in one process
	$(BIN)/python tests/faults/soak.py

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

zoo: setup $(VENV)-zoo/.installed  # architectures of other packages; ZOO="'timm/*' --again" selects and repeats
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VENV)-zoo/bin/python -m experiments.zoo.run $(ZOO)

$(VENV)-zoo/.installed: $(STAMP) requirements-zoo.txt  # the packages of $(VENV), and those that only the zoo needs
	test -x $(VENV)-zoo/bin/python || $(PYTHON) -m venv $(VENV)-zoo
	$(BIN)/python -c $(PURELIB) > $$($(VENV)-zoo/bin/python -c $(PURELIB))/shared.pth
	echo $(CURDIR)/src >> $$($(VENV)-zoo/bin/python -c $(PURELIB))/shared.pth
	$(VENV)-zoo/bin/python -m pip install --quiet --no-deps -r requirements-zoo.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-zoo .coverage* site mutants .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
