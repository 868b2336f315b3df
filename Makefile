# Everything is installed into .venv, with the versions of constraints.txt. `make help` lists what there is to make.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
# a process for each core, up to four; conftest.py gives each one thread
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses=4

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-device test-browser test-ray lint format docs results-docs results-docs-check bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 28

demo: $(VENV)/.dev ## SCR beside ER and fine-tuning on Split Digits: table, demo/picture.png, demo/report.md
	$(BIN)/scr demo --out demo

test: $(VENV)/.dev ## the tests, without the slow ones and those that need data or a GPU
	$(PYTEST)

test-slow: $(VENV)/.dev ## the slow tests too, and those on real data (under SCRLEARN_DATA)
	$(PYTEST) -m "not device"

test-device: $(VENV)/.dev ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m device

test-browser: $(VENV)/.browser ## the tests of the service's page, in Chromium; SCRLEARN_SCREENSHOTS=docs/images takes its pictures
	$(BIN)/python -m pytest -m browser tests/service

test-ray: $(VENV)/.ray ## the tests on a Ray cluster that they start here
	$(BIN)/python -m pytest -m "slow or not slow" tests/experiments/test_ray_executor.py tests/service/test_service_ray.py

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.dev ## let ruff put things in order
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.docs ## the documentation, into site/
	$(BIN)/mkdocs build --strict

results-docs: $(VENV)/.dev ## docs/results.md, its pictures and the README's results, from results/
	$(BIN)/python -m scrlearn.experiments.report.docs

results-docs-check: $(VENV)/.dev ## whether those are what results/ gives
	$(BIN)/python -m scrlearn.experiments.report.docs --check

bench: $(VENV)/.dev ## speed and memory on this machine
	@for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean: ## remove what was made, the environment too
	rm -rf $(VENV) build dist site demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@python=""; \
	for name in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
	  if command -v $$name >/dev/null && $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=$$name; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "Python 3.11 or newer is needed and was not found. Install it, or say where it is: make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; \
	fi; \
	echo "Creating $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "The environment could not be created. On Debian and Ubuntu the package python3-venv is needed." >&2; \
	  exit 1; \
	}

# a stamp for each set of packages: installed again when what is needed changes
$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.ray: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/.browser: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	@touch $@
