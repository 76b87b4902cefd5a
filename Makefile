# `make demo` and `make test` install everything they need: the first time from the network, then offline.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
VENV ?= .venv
WORKERS ?= 8
# The first interpreter that is new enough and runs (a version manager's shim on PATH may not run), first among those that
# can create environments. The system's go before others: distributions build with profile-guided optimization, version
# managers do not, and tests take a quarter less CPU.
PYTHON ?= $(shell for module in ensurepip sys; do for p in {/usr/bin/,}python3.{11,12,13} python3; do \
	$$p -c "import sys, $$module; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && echo $$p && exit; done; done)
# A hash of the files that define the installation: when they change, the stamps below are out of date.
KEY := $(shell cat constraints.txt pyproject.toml | sha256sum | cut -c1-16)
PIP_STAMP := $(VENV)/.installed-pip-$(KEY)
RUN_STAMP := $(VENV)/.installed-run-$(KEY)
DEV_STAMP := $(VENV)/.installed-dev-$(KEY)
BENCH_STAMP := $(VENV)/.installed-bench-$(KEY)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
# What programs import is compiled by importing it once: a fifth of all source, most of which nothing here uses. With
# PYTHONDONTWRITEBYTECODE, or as a user who cannot write to the environment, every start would compile it again.
# torch._dynamo, with sympy, is what each DistributedDataParallel imports.
COMPILE := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c
# Tests mostly wait, so files run in parallel; each worker has its own test nodes.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help demo test suite tests lint bytecode bench bench-faults clean system-packages

help:
	@echo "make demo    set up, then run the workflow on simulated nodes: reserve, train with DDP, release; then the board"
	@echo "make test    set up (system packages too, as root or with sudo), then run every check and test"
	@echo "make lint    ruff, mypy, import contracts, the agent's Python 3.6 syntax"
	@echo "make bench   the measurements of bench/ (about thirteen minutes on an idle machine)"
	@echo "make bench-faults  every fault of a launch beside torchrun, and healthy runs (about forty minutes; not in CI)"
	@echo "make clean   remove everything that the above created"

demo: $(RUN_STAMP)
	@$(BIN)/gpuboard demo

# apt, pip and compiling at the same time, once there is an interpreter (which may need apt itself). mypy takes half a
# minute on one processor: lint runs beside apt and the tests.
test: $(BIN)/python
	@$(MAKE) --no-print-directory -j4 lint suite

suite: system-packages bytecode
	$(PYTEST)

tests: bytecode
	$(PYTEST)

# Compiles the tests once; else every worker would at its start. pytest reports what fails here.
bytecode: $(RUN_STAMP) $(DEV_STAMP)
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vermin --target=3.6- --no-tips --violations gpuboard/agent

bench: system-packages $(BENCH_STAMP)
	$(BIN)/python bench/run.py

bench-faults: system-packages $(RUN_STAMP) $(DEV_STAMP)
	$(BIN)/python bench/run.py faults faults-healthy

system-packages:
	@.ci/system-packages

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find gpuboard tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "gpuboard needs Python 3.11 or later, and none is on PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || .ci/system-packages venv "$(PYTHON)"
	$(PYTHON) -m venv $(VENV)

# hatchling is installed first, so that building gpuboard needs no index and uses the pinned version.
$(PIP_STAMP): | $(BIN)/python
	@echo "installing into $(VENV); the first time this downloads PyTorch, which takes a while"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[torch]'
	@rm -f $(VENV)/.installed-pip-*
	@touch $@

$(RUN_STAMP): $(PIP_STAMP)
	@$(COMPILE) 'import gpuboard.board.app, asyncssh, torch.distributed.run, torch._dynamo, torch.optim, torch.utils.data'
	@$(BIN)/python -m compileall -q gpuboard
	@rm -f $(VENV)/.installed-run-*
	@touch $@

$(DEV_STAMP): $(PIP_STAMP)
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@$(COMPILE) 'import aiohttp, hypothesis, paramiko, pytest, xdist'
	@rm -f $(VENV)/.installed-dev-*
	@touch $@

# Without --no-build-isolation: gpustat is a source package with its own build requirements.
$(BENCH_STAMP): $(DEV_STAMP)
	@$(PIP) --editable '.[bench]'
	@$(BIN)/python -m compileall -qq -j0 $(VENV)/lib || true  # the peers' starts are measured; some files are for other Pythons
	@rm -f $(VENV)/.installed-bench-*
	@touch $@
