PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test check bench docs slow clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 10

$(STAMP): constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "net2gp needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT= $(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(STAMP) ## train a small network, turn it into a GP, write figures and a page
	$(BIN)/net2gp demo

test: check ## lint, types, import order, then all quick tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses=2 --dist=worksteal --durations=15

check: $(STAMP) ## lint, types and import order only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

slow: $(STAMP) ## the long reproductions
	$(BIN)/python -m pytest -q -m slow

bench: $(STAMP) ## speed and memory, side by side with the peers; then caches and solvers
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/limits.py
	$(BIN)/python benchmarks/limit_predictions.py
	$(BIN)/python benchmarks/laplace_torch.py
	NET2GP_DATA=$${NET2GP_DATA:-$(realpath ../shared/data)} OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/solvers.py

docs: $(STAMP) ## the documentation with its examples, into site/, and a check of its links
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]' --no-build-isolation
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/check_links.py site

clean: ## remove everything that make created
	rm -rf $(VENV) .venv-peers site demo_output build
