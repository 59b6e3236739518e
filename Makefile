# Everything here needs only Python 3.11 or later with venv and pip, git and make.
# The first command makes .venv and installs into it; it is made again when its inputs change.

PYTHON ?= python3
PYTEST_ARGS ?= -n logical --maxprocesses 4 --dist loadfile
DEMO_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=
CHAOS_ARGS ?=
SOAK_ARGS ?=
FUZZ_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
BENCH_VENV := .bench-venv
BENCH := $(BENCH_VENV)/bin/python
BENCH_STAMP := $(BENCH_VENV)/installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint format coverage compatibility docs dist bench bench-full gpu chaos soak fuzz clean

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "discod needs Python 3.11 or later, and $(PYTHON) is not; try: make PYTHON=python3.11" >&2; \
	  exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## Train a small GPT with and without discod, and compare (3 minutes)
	$(BIN)/python -m examples.demo $(DEMO_ARGS)

test: lint  ## Lint, type check and run all tests, as CI does
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)  ## Check style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## Put the code into the project's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(STAMP)  ## Run all tests, and show which lines no test reached
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(PYTEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing --skip-covered

compatibility: $(STAMP)  ## Measure the forms under DDP, FSDP2 and TP, and write docs/compatibility.md
	$(BIN)/python -m tests.compatibility

docs: $(STAMP)  ## Build the documentation site into site/; warnings are errors
	rm -rf site
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs . site
	@echo "open site/index.html"

dist: $(STAMP)  ## Build sdist and wheel into dist/, and check them
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

$(BENCH_STAMP): pyproject.toml constraints.txt tests/benchmarks/peers.py
	rm -rf $(BENCH_VENV)
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH) -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e '.[torch]' 'matplotlib>=3.10' ninja setuptools wheel
	$(BENCH) -m tests.benchmarks.peers
	@touch $@

bench: $(BENCH_STAMP)  ## Measure discod against its peers, shortly, into bench-results/ (10 minutes)
	PATH="$(CURDIR)/$(BENCH_VENV)/bin:$$PATH" $(BENCH) -m tests.benchmarks $(BENCH_ARGS)

bench-full: $(BENCH_STAMP)  ## The same in full, into docs/benchmarks/ and docs/benchmarks.md
	PATH="$(CURDIR)/$(BENCH_VENV)/bin:$$PATH" $(BENCH) -m tests.benchmarks --full \
	  --out docs/benchmarks $(BENCH_ARGS)

gpu: $(STAMP)  ## Check and measure discod on a GPU (5 minutes; GPU_ARGS="--device cpu --quick" without)
	$(BIN)/python -m tests.gpu $(GPU_ARGS)

chaos: $(STAMP)  ## Train while a seeded adversary kills, stops, fills and breaks things (10 minutes)
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

soak: $(STAMP)  ## Use it at random for an hour, and see that nothing grows
	$(BIN)/python -m tests.soak --out soak-results $(SOAK_ARGS)

fuzz: $(STAMP)  ## Fuzz all that reads what clients send (some minutes; FUZZ_ARGS="--help")
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris==3.0.0
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

clean:  ## Remove .venv and all caches
	rm -rf $(VENV) $(BENCH_VENV) bench-results .mypy_cache .ruff_cache .pytest_cache .hypothesis htmlcov build dist site
	rm -f .coverage .coverage.*
	find . -name __pycache__ -prune -exec rm -rf {} +
