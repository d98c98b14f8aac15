# make demo     converts the bundled tiny checkpoint and generates from it
# make test     the test suite, then parity with the reference models
# make check    all that CI runs, in CI's order
#
# Each target creates its environment in .venv when it has to. `make TARGET PYTHON=/path/python`
# uses an environment that is already there and asks no package registry for anything.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
SHELL := /bin/bash

VENV ?= .venv
EXTRAS ?= test,parity,convert
WORKERS ?= 2
CONSTRAINTS ?= constraints/ci.txt
PYTEST_FLAGS ?=

# The interpreter that .venv is made from: the first one that is new enough and can make one.
CAN_MAKE_VENV := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
BASE_PYTHON ?= $(shell for p in python3.11 python3.12 python3 python3.13 python3.14 python; do \
    if $$p -c '$(CAN_MAKE_VENV)' >/dev/null 2>&1; then echo $$p; break; fi; done)

ifdef PYTHON
PY := $(PYTHON)
BASE :=
DEV :=
else
PY := $(VENV)/bin/python
BASE := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
endif

# Lets a given environment, which need not have the package installed, find it.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS)
LINTED := .
WHEEL_VENV := build/wheel-venv

.PHONY: help
help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

.PHONY: venv
venv: $(DEV) ## The development environment, in .venv

$(VENV)/.python:
	@test -n "$(BASE_PYTHON)" || { echo "No Python >= 3.11 that can make an environment (module" \
	    "venv) is on PATH: install one, or give it as BASE_PYTHON=/path/to/python." >&2; exit 1; }
	$(BASE_PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/.python
	$(PIP_INSTALL) --editable .
	@touch $@

# Depends on the same files and not on .installed: one call to pip resolves everything.
$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/.python
	$(PIP_INSTALL) --editable '.[$(EXTRAS)]'
	@touch $(VENV)/.installed $@

.PHONY: demo
demo: $(BASE) ## Convert the bundled tiny checkpoint and generate from it
	$(PY) -m convert assets/tiny-sdar build/tiny-sdar --force
	$(PY) examples/demo.py

.PHONY: format
format: $(DEV) ## Format, and fix what can be fixed
	$(PY) -m ruff format $(LINTED)
	$(PY) -m ruff check --fix $(LINTED)

.PHONY: lint
lint: $(DEV) ## Format check and lint
	$(PY) -m ruff format --check $(LINTED)
	$(PY) -m ruff check $(LINTED)

.PHONY: types
types: $(DEV) ## Static types
	$(PY) -m pyright --pythonpath "$$($(PY) -c 'import sys; print(sys.executable)')"

.PHONY: test
test: ## The test suite, then parity
	@$(MAKE) --no-print-directory test-suite
	@$(MAKE) --no-print-directory parity

.PHONY: test-suite
test-suite: $(DEV) ## The test suite without parity
	$(PY) -m pytest -n $(WORKERS) --dist loadfile -m "not gpu and not parity" $(PYTEST_FLAGS)

.PHONY: parity
parity: $(DEV) ## Comparison with torch and transformers
	@$(PY) -c "import torch, transformers"
	$(PY) -m pytest -n $(WORKERS) --dist loadfile -m "parity and not gpu" tests $(PYTEST_FLAGS)

.PHONY: test-gpu
test-gpu: $(DEV) ## GPU tests, on a machine with one and with the extra `cuda`
	HERALD_TEST_GPU=1 $(PY) -m pytest -m gpu tests $(PYTEST_FLAGS)

# Runs outside the checkout and without PYTHONPATH, so that only the wheel can be imported.
.PHONY: wheel-check
wheel-check: $(DEV) ## Build the wheel, install it in a fresh environment and try it
	rm -rf build/dist $(WHEEL_VENV)
	$(PY) -m build --outdir build/dist .
	$(PY) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) build/dist/*.whl
	$(WHEEL_VENV)/bin/python -m pip check
	unset PYTHONPATH && cd $(WHEEL_VENV) && bin/herald --help >/dev/null \
	    && bin/herald-convert --help >/dev/null \
	    && bin/python -c "import herald_jax, pallas_kernels, convert, sys; \
	        assert sys.prefix in herald_jax.__file__, herald_jax.__file__; \
	        assert not {'torch', 'transformers'} & set(sys.modules)"
	@echo "The wheel installs, imports and runs without torch."

.PHONY: docs
docs: ## API pages in build/docs (needs the extra `docs`)
	$(PY) -m pdoc --docformat google --output-directory build/docs herald_jax pallas_kernels convert

.PHONY: check
check: ## All that CI runs
	.ci/run

.PHONY: clean
clean: ## Remove the environment and everything built
	rm -rf build dist $(VENV) .pytest_cache .ruff_cache .hypothesis
