# Everything a fresh machine needs is here: a Python (3.10 to 3.13), make, and one of the commands below.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test drills test-recipes lint types format docs lock setup clean

ARGS ?=
PYTHON ?=

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

help: ## Show this list
	@echo 'make train ARGS="model=cnn seed=1"   any override of conf/ goes into ARGS'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

train: $(READY) ## Set up if needed, then train (defaults: digits, mlp, this machine)
	@exec $(RUN) train.py $(ARGS)

test: $(READY) ## Set up if needed, then run the tests, two files at a time (ARGS="tests/test_plan.py -x": just those)
	@exec $(RUN) -m pytest $(or $(ARGS),-n 2 --dist loadfile)

drills: $(READY) ## Set up if needed, then the long tests: faults by the dozen, whole pages of the docs
	@exec $(RUN) -m pytest -m drill $(or $(ARGS),-n 2 --dist load)

test-recipes: $(READY) ## Set up if needed, then test recipes of other frameworks (install those first: pip install -e '.[lightning]')
	@exec $(RUN) -m pytest -m recipes $(or $(ARGS),tests/recipes)

lint: $(READY) ## Check style and formatting
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

types: $(READY) ## Check types
	@$(RUN) -m mypy

format: $(READY) ## Fix style and formatting
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

docs: $(READY) ## Regenerate docs/configuration.md from the schema
	@$(RUN) docs/generate.py

lock: $(READY) ## Choose new versions for requirements.lock, within pyproject.toml
	@$(RUN) -m uv pip compile pyproject.toml --extra dev --universal --python-version 3.10 --upgrade --quiet \
		--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" --output-file requirements.lock

setup: $(READY) ## Only set up: .venv with the versions of requirements.lock

clean: ## Remove the environment and caches; results in outputs/ and data stay
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
	@find . -name __pycache__ -type d -not -path './outputs/*' -prune -exec rm -rf {} +

# The first usable Python: one that starts (a version manager's shim may not), has venv and is of a supported version.
CANDIDATES := $(or $(PYTHON),python3 python python3.13 python3.12 python3.11 python3.10)
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))

$(VENV)/pyvenv.cfg:
	@for python in $(CANDIDATES); do \
		if "$$python" -c '$(USABLE)' >/dev/null 2>&1; then \
			echo "Setting up $(VENV) with $$("$$python" --version): some minutes and 6 GB, once."; \
			exec "$$python" -m venv --clear $(VENV); \
		fi; \
	done; \
	echo 'Manta needs Python 3.10 to 3.13 with its venv module; tried: $(CANDIDATES).' >&2; \
	echo 'Name one: make <command> PYTHON=/path/to/python3.11 (on Debian and Ubuntu: apt install python3-venv).' >&2; \
	exit 1

# Two steps, so that an edit of pyproject.toml does not look at 200 packages again.
$(VENV)/.locked: requirements.lock | $(VENV)/pyvenv.cfg
	@$(RUN) -m pip install --disable-pip-version-check --no-input -r requirements.lock
	@touch $@

$(READY): pyproject.toml $(VENV)/.locked
	@$(RUN) -m pip install --disable-pip-version-check --no-input --quiet --no-deps --editable .
	@touch $@
