# Everything here sets itself up: a fresh machine needs make and Python 3.11 or newer.
#
#   make demo [MODEL=path-or-hub-id]   store, restart, resume: both times side by side
#   make test                          the whole test suite
#   make test-oldest                   the storage tests and every model under the oldest mlx-lm
#   make lint                          ruff, mypy, import rules
#   make bench                         the benchmarks, each with its peers

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
OLDEST_MLX_LM := 0.32.0
MODEL ?=
ARGS ?=

.PHONY: demo test test-oldest lint bench clean

demo: $(VENV)/test.stamp
	$(BIN)/python examples/demo.py $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(ARGS)

# Stores that the oldest mlx-lm wrote are resumed under the newest as well.
test-oldest: $(VENV)/test.stamp $(OLDEST)/test.stamp
	$(OLDEST)/bin/python -m pytest tests/caches tests/codecs tests/conformance tests/hooks tests/prefixstore $(ARGS)
	KVKEEP_FIRST_PYTHON=$(OLDEST)/bin/python $(BIN)/python -m pytest \
	  tests/prefixstore/test_restart.py $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/test.stamp
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) $(OLDEST) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvkeep needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: its ensurepip module is missing." >&2; \
	  echo "On Debian and Ubuntu: apt-get install python3-venv; or name another Python with PYTHON=." >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/test.stamp: pyproject.toml kvkeep/_version.py | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

$(OLDEST)/test.stamp: pyproject.toml kvkeep/_version.py $(VENV)/test.stamp
	$(BIN)/python -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --editable '.[test]' 'mlx-lm==$(OLDEST_MLX_LM)' \
	  "mlx==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("mlx"))')"
	@touch $@

$(VENV)/dev.stamp: pyproject.toml kvkeep/_version.py | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/test.stamp
