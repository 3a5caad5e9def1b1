# `make demo` and `make test` are all a newcomer needs; each installs what is missing first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: demo test lint pytest test-full serve bench helm console clean

demo: $(VENV)/installed
	$(BIN)/ebbtide demo

test: lint pytest

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

pytest: $(VENV)/installed
	$(BIN)/pytest -n $(JOBS) --dist worksteal

test-full: $(VENV)/installed
	$(BIN)/pytest -n $(JOBS) --dist worksteal --full

serve: $(VENV)/installed
	$(BIN)/ebbtide serve

bench: $(VENV)/installed
	$(BIN)/python -m tests.benchmarks

# Helm as a library, for the tests of the chart, which are skipped without it. Its wheel asks for a newer Python than it
# needs, so that it cannot stand among the dependencies.
helm: $(VENV)/installed
	$(BIN)/python -m pip install --quiet cffi==2.1.1
	$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python helm-sdkpy==0.1.32

$(VENV)/installed: pyproject.toml api/console/package-lock.json
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(MAKE) console
	touch $@

# The library that the console draws its charts with. Where npm is missing the console says so in their place.
console:
	npm ci --prefix api/console --no-fund --no-audit --loglevel=error || echo 'npm failed: the console draws no charts' >&2

clean:
	rm -rf $(VENV) api/console/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis
