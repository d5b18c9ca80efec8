# Two commands do all set-up on a machine with Python 3.11 to 3.13: `make run` and `make test`.

PYTHON ?= python3
VENV ?= .venv
ARGS ?= recipe=llm-tiny
PYTEST_ARGS ?=
GPU_ARGS ?=
ONLY ?=
# Test processes at once: most of a test's time is spent waiting for workers to start and to end.
JOBS ?= 4
# Where to take torch from; empty: wherever pip looks.
TORCH_INDEX ?=

BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' constraints.txt)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DELETE_ON_ERROR:
.PHONY: help run test test-slow test-all compiled bench gpu gpu-wheels lint types fmt docs frames site wheel constraints clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  make run ARGS="recipe=llm-1b plugin=gemini"     other arguments of `colotrain run`'
	@echo '  make test PYTEST_ARGS="tests/unit -x"           other arguments of pytest'
	@echo '  make run PYTHON=python3.12                      another Python'
	@echo '  make run TORCH_INDEX=https://download.pytorch.org/whl/cpu   torch without CUDA'

run: $(VENV)/.core ## install, then train the smallest recipe (or ARGS)
	$(BIN)/colotrain run $(ARGS)

test: lint types compiled ## install, then every check, and every test that is not slow
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(PYTEST_ARGS)

test-slow: compiled ## the slow tests alone: whole matrices, new processes, several hosts, SLURM's jobs, minutes
	$(BIN)/python -m pytest -n $(JOBS) -m slow $(PYTEST_ARGS)

test-all: lint types compiled ## every check, and every test
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

# Where PYTHONDONTWRITEBYTECODE is set, each process of a test would compile what it imports anew.
compiled: $(VENV)/.dev
	@$(BIN)/python -m compileall -q colotrain tests

lint: $(VENV)/.dev ## ruff: mistakes and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev ## mypy
	$(BIN)/mypy

bench: $(VENV)/.core ## colotrain beside what else trains; writes bench.json and bench.md
	$(INSTALL) accelerate lightning ninja setuptools wheel
	DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation deepspeed
	$(BIN)/python benchmarks/compare.py

# With the machine's own Python and torch: nothing is installed but what gpu-wheels prepared.
gpu: ## on a GPU: what is right, how fast, and whether the plan is true (GPU_ARGS="--device cpu" tries it)
	$(PYTHON) benchmarks/gpu $(GPU_ARGS) $(if $(ONLY),--only $(ONLY))

gpu-wheels: $(VENV)/.torch ## put into build/gpu-wheels what a machine without an index may lack
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -c constraints.txt \
	  -w build/gpu-wheels hydra-core omegaconf antlr4-python3-runtime pytest pluggy iniconfig

fmt: $(VENV)/.dev ## rewrite the code as ruff formats it
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.core ## write the reference in docs/configuration.md anew
	$(BIN)/python scripts/write_reference.py

frames: $(VENV)/.dev ## write tests/unit/golden/frames anew: what commands show, letter by letter
	UPDATE_FRAMES=1 $(BIN)/python -m pytest -q tests/unit/show/test_golden_frames.py

site: $(VENV)/.dev ## build the documentation as a site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

wheel: $(VENV)/.dev ## build dist/colotrain-*.whl
	$(BIN)/python -m build --wheel --no-isolation

constraints: $(VENV)/.dev ## choose versions that fit one another, for all extras and Pythons, and write constraints.txt
	cp constraints.txt constraints.new
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11.5 --all-extras --no-header --no-annotate \
	  --output-file constraints.new pyproject.toml
	{ sed -n '/^#/p' constraints.txt; sed -E '/^(nvidia|cuda|triton)/d' constraints.new; } > constraints.chosen
	rm constraints.new && mv constraints.chosen constraints.txt

clean: ## remove build outputs and caches (the environment stays: rm -r .venv)
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache
	find colotrain tests -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo 'error: $(PYTHON): expected Python 3.11 to 3.13; name one: make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo 'error: $(PYTHON) cannot make an environment; install it: apt install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch comes first and by its pin: a range could fetch another build, and gigabytes of CUDA with it.
# Without its dependencies: an index that has torch need not have those; the next step adds them.
$(VENV)/.torch: constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

$(VENV)/.core: pyproject.toml $(VENV)/.torch
	$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.core $@
