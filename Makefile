# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make .venv first, once.

PYTHON ?= python3
# On a machine without an NVIDIA GPU the CPU build is enough and far smaller; see docs/install.md.
TORCH ?= torch>=2.11,<2.14

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
FETCH := $(BIN)/python scripts/fetch_smollm2.py
# One process per core, each with one thread; the tests of a file stay together, for what they share is slow to make.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: demo test test-all lint clean

demo: $(VENV)/run.stamp
	@model="$$($(FETCH))" && $(BIN)/python examples/demo.py "$$model"

# Without the model, tests that need it say so and are skipped.
test: $(VENV)/dev.stamp
	@ALLOTROPE_SMOLLM2="$$($(FETCH) || true)" $(PYTEST) -m "not slow"

test-all: $(VENV)/dev.stamp
	@ALLOTROPE_SMOLLM2="$$($(FETCH) || true)" $(PYTEST)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

$(VENV)/run.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@echo "making $(VENV) (once, some minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) '$(TORCH)'
	@$(PIP) -e '.[all]' 'openai>=2'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "adding what tests need ..."
	@$(PIP) -e '.[dev]'
	@touch $@
