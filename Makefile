# Works with Python 3.11 to 3.13 and make alone; the environment in VENV is made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: train report train-lm test test-all lint docs results fleet lock

train: $(VENV)/train.stamp
	$(BIN)/python -m jaxrl_mini.train --seed 7

# The same run, and a page to look at it.
report: $(VENV)/train.stamp
	$(BIN)/python -m jaxrl_mini.train --seed 7 --output runs/seed-7.json --trajectories runs/seed-7.npz --overwrite
	$(BIN)/python -m jaxrl_mini.report runs/seed-7.json runs/seed-7.npz --output runs/report.html

# A random GPT-2 of two blocks, trained to an exact success of 0.95 and more.
train-lm: $(VENV)/train.stamp
	test -e runs/tiny-gpt2 || $(BIN)/python -m jaxrl_mini.tiny_model runs/tiny-gpt2
	$(BIN)/python -m jaxrl_mini.train --backend hf --model runs/tiny-gpt2 --lr 1e-3 --iterations 80

test: $(VENV)/test.stamp lint
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not full"

# These and all that takes long or needs more: Ray, PyTorch, Gymnasium, trackers, a browser. A test that is skipped fails.
test-all: $(VENV)/test-all.stamp lint
	@which chromium chromium-browser google-chrome | grep -q . || { echo "No Chromium: apt-get install chromium"; exit 1; }
	HOSTILE_EXAMPLES=2000 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --no-skips

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# The documentation as a site in build/site, with every link checked.
docs: $(VENV)/docs.stamp
	$(BIN)/python -m mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/train.stamp $(VENV)/test.stamp $(VENV)/test-all.stamp $(VENV)/docs.stamp: pyproject.toml requirements.lock | $(VENV)/bin/python
	@echo "Installing into $(VENV): this takes two minutes or so."
	$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.$(extra)'
	touch $(VENV)/train.stamp $@

$(VENV)/train.stamp: extra = [report]
$(VENV)/test.stamp: extra = [test]
$(VENV)/test-all.stamp: extra = [test-all]
$(VENV)/docs.stamp: extra = [docs]

# The six runs of the README's table.
results: $(VENV)/train.stamp
	for method in grpo rs-sft; do for seed in 7 19 42; do \
	  $(BIN)/python -m jaxrl_mini.train --method $$method --seed $$seed --output results/$$method-seed-$$seed.json || exit 1; \
	done; done

# 10,000 seeds of each method: the README's picture of them and their statistics.
fleet: $(VENV)/test.stamp
	$(BIN)/python -m jaxrl_mini.sweep --method grpo rs-sft --seeds 10000 --history-every 5 --output sweeps/article
	$(BIN)/python -m jaxrl_mini.sweep summary sweeps/article --json | $(BIN)/python -m json.tool > results/fleet/summary.json
	$(BIN)/python -m jaxrl_mini.report sweeps/article --output sweeps/article.html --figures sweeps/figures --overwrite
	cp sweeps/figures/exact_success_rate.png results/fleet/learning-curves.png

# Renews the exact versions from the ranges in pyproject.toml; of PyTorch any build of a version will do.
lock:
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip install --quiet '.[test-all,docs]'
	build/lock/bin/python -m pip freeze --exclude jaxrl_mini | sed 's/+.*//' > requirements.lock
