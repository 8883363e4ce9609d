# Works with Python 3.11 to 3.13 and make alone; the environment in VENV is made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: train test lint lock

train: $(VENV)/train.stamp
	$(BIN)/python -m jaxrl_mini.train --seed 7

test: $(VENV)/test.stamp lint
	$(BIN)/python -m pytest

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

$(VENV)/train.stamp: pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable .
	touch $@

$(VENV)/test.stamp: $(VENV)/train.stamp
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[test]'
	touch $@

# Renews the exact versions from the ranges in pyproject.toml.
lock:
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip install --quiet '.[test]'
	build/lock/bin/python -m pip freeze --exclude jaxrl_mini > requirements.lock
