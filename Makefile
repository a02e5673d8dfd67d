# The two commands of the README: `make demo` and `make test`. Both make their own environment in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Waiting threads sleep: spinning costs up to 9 times the wall time when cores are shared.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-slow test-gpu check lint types contracts format clean

demo: $(VENV)/installed
	$(BIN)/digenrl train quickstart

test: $(VENV)/installed-dev
	$(BIN)/pytest -n 2 --dist loadfile

test-slow: $(VENV)/installed-dev
	$(BIN)/pytest -n 2 --dist loadfile -m slow --timeout 1200

test-gpu: $(VENV)/installed-dev
	$(BIN)/pytest -m gpu

check: lint types contracts test

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

contracts: $(VENV)/installed-dev
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "DigenRL needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Run: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[dev]'
	touch $@ $(VENV)/installed
