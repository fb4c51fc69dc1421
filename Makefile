# `make quickstart` and `make test` set up what they need, in .venv, from nothing but Python and this checkout.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
THREADS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: setup quickstart quickstart-control test lint fmt docs unit examples smollm2 clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[tasks,gguf,dev]"
	touch $(STAMP)

quickstart: setup
	rm -rf runs/quickstart
	$(BIN)/headrace train examples/quickstart/quickstart.toml

quickstart-control: setup
	rm -rf runs/quickstart-control
	$(BIN)/headrace train examples/quickstart/quickstart.toml --set run.name=quickstart-control --set scoring.shuffle=true

test: lint unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: setup
	$(THREADS) $(BIN)/pytest

# Every shipped TOML but the quickstart's, for two versions; fetches the real model that one of them trains.
examples: setup
	$(THREADS) $(BIN)/python tests/shipped_examples.py

smollm2: setup
	$(BIN)/python examples/smollm2/fetch.py
	rm -rf runs/smollm2
	$(BIN)/headrace train examples/smollm2/smollm2.toml

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	$(BIN)/python docs/make_configuration.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
