# One way in for each job. The first use of a target makes $(VENV) and installs what that target needs, once.
#   make test ARGS="tests/data -x"      passes arguments to pytest
#   make demo PYTHON=python3.12         picks the interpreter for a new environment
# MODELFENCE_DATA (a folder of real domains) reaches the tests and benchmarks from the environment.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
# A benchmark is a script in benchmarks/; names that start with an underscore are helpers.
BENCH ?= $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

RUNTIME := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
OLDEST := .venv-oldest
SITE := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-oldest lint types bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

demo: $(RUNTIME) ## train, mask, measure and report on built-in domains, into out/demo
	$(BIN)/modelfence demo --output out/demo --force $(ARGS)

test: $(DEV) ## unit tests and doctests; those on real images need MODELFENCE_DATA
	$(BIN)/python -m pytest -q $(ARGS)

test-oldest: $(OLDEST)/.installed ## the same with the oldest dependencies that pyproject.toml allows, in their own environment
	$(OLDEST)/bin/python -m pytest -q -o filterwarnings=default $(ARGS)

lint: $(DEV) ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

types: $(DEV) ## mypy alone
	$(BIN)/mypy

bench: $(DEV) ## run the scripts in benchmarks/ one after the other, slow (BENCH=... picks)
	@test -n "$(BENCH)" || { echo "make bench: benchmarks/ has no script"; exit 1; }
	@set -e; for script in $(BENCH); do echo "== $$script"; $(BIN)/python "$$script" $(ARGS); done

docs: $(SITE) ## the documentation site, warnings are errors, into docs/_site
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet \
	  --doctree-dir docs/_site/.doctrees docs docs/_site
	@echo "open docs/_site/index.html"

clean: ## remove the demo's output, the built site and caches; other results and .venv stay
	rm -rf out/demo docs/_site docs/api build dist .benchmarks .hypothesis
	rm -rf .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find $(wildcard src tests benchmarks docs) -name __pycache__ -type d -prune -exec rm -rf {} +

# pip learned dependency groups in 25.1; many machines come with an older one.
$(RUNTIME): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("modelfence needs Python 3.11 or newer; make PYTHON=python3.11 names another" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/pip || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing modelfence into $(VENV): PyTorch is large, the first time takes minutes"
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(DEV): $(RUNTIME)
	@echo "installing the development tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --group dev
	@touch $@

$(OLDEST)/.installed: pyproject.toml
	@test -x $(OLDEST)/bin/pip || { echo "making $(OLDEST)"; $(PYTHON) -m venv $(OLDEST); }
	@echo "installing the oldest dependencies into $(OLDEST): PyTorch is large, this takes minutes"
	@$(OLDEST)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(OLDEST)/bin/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*(text.replace(">=", "==") for text in project["dependencies"]), sep="\n")' > $(OLDEST)/constraints.txt
	@$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/constraints.txt --editable . --group dev
	@touch $@

$(SITE): $(RUNTIME)
	@echo "installing the documentation tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --group docs
	@touch $@
