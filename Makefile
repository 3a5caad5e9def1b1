# `make demo` and `make test` are all that a newcomer needs. Each target installs what is missing first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := .venv-tools
FRAMEWORKS := .venv-frameworks
# Many tests wait for processes, so three fit on two cores.
JOBS ?= 3
PYTEST := $(BIN)/pytest -n $(JOBS) --dist worksteal
# What `make check` runs: tests that start no process and solve no large instance.
FAST := $(addprefix tests/unit/,api documents domain executors forecast kubernetes resharding runtime scheduling \
	telemetry) tests/golden tests/docs tests/test_tidy.py

# Tests start hundreds of Python processes. Some images forbid cached bytecode, and each process would compile the sources.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo pictures check test test-full campaign lint serve bench docs helm console generators frameworks clean

demo: $(VENV)/installed
	$(BIN)/ebbtide demo

# Pictures of the console in docs/images/console. `make pictures PAGE=overview` draws one page.
pictures: $(VENV)/installed
	$(BIN)/python -m tests.console.pictures $(if $(PAGE),--only $(PAGE))

check: lint
	$(PYTEST) -q $(FAST)

test: lint generators
	$(PYTEST)

test-full: lint generators frameworks
	$(PYTEST) --full

# `make campaign SEEDS=0:1000` is resumable; `make campaign CASE=build/campaign/seed-7.json` replays a shrunk failure.
SEEDS ?= 0:100
campaign: $(VENV)/installed
	$(BIN)/python -m tools.fault_campaign $(if $(CASE),--case $(CASE),--seeds $(SEEDS))

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

serve: $(VENV)/installed
	$(BIN)/ebbtide serve

bench: $(VENV)/installed
	$(BIN)/python -m tests.benchmarks

docs: $(VENV)/installed
	$(BIN)/python -m tools.reference_pages
	$(BIN)/zensical build --strict --clean --config-file mkdocs.yml

# The Helm library for the chart's tests. Its wheel declares a newer Python than it needs, so it cannot be a dependency.
helm: $(VENV)/installed
	$(BIN)/python -m pip install --quiet cffi==2.1.1
	$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python helm-sdkpy==0.1.32

$(VENV)/installed: pyproject.toml library/pyproject.toml api/console/package-lock.json
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable library --editable '.[dev]'
	$(MAKE) console
	touch $@

# Generators of API clients, with which tests read the OpenAPI document as users do. Their pins clash with Ebbtide's.
generators: $(TOOLS)/installed

$(TOOLS)/installed: tests/clients/requirements.txt tests/clients/package-lock.json
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --requirement tests/clients/requirements.txt
	npm ci --prefix tests/clients --ignore-scripts --no-fund --no-audit --loglevel=error || echo 'npm failed: no TypeScript client' >&2
	touch $@

# Training frameworks, with which tests run the examples. Their pins clash with Ebbtide's; torch is the same release.
frameworks: $(FRAMEWORKS)/installed

$(FRAMEWORKS)/installed: tests/frameworks/requirements.txt tests/frameworks/constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --constraint tests/frameworks/constraints.txt --requirement tests/frameworks/requirements.txt
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-deps megatron-core==0.16.1  # the last release for Python 3.11
	$(FRAMEWORKS)/bin/python -m pip install --quiet --no-deps --editable library
	touch $@

# Charts of the console and the API reference. Without npm, a checkout shows tables, and no wheel can be built.
# No scripts: one dependency would send statistics.
console:
	npm ci --prefix api/console --ignore-scripts --no-fund --no-audit --loglevel=error || echo 'npm failed: no charts, no API reference' >&2

clean:
	rm -rf $(VENV) $(TOOLS) $(FRAMEWORKS) build api/console/node_modules tests/clients/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis
