# `make demo` and `make test` do all their own set-up. `make help` lists the rest.

VENV ?= .venv
# The first Python 3.11 or 3.12 on the path; name another with `make PYTHON=...`.
PYTHON ?= $(shell for p in python3 python python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
RUN := $(VENV)/bin/python
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 8 ] && echo 8 || echo $$n)
TESTS ?= tests
# One thread a worker, or they fight for the cores. A file stays with one worker, which makes its fixtures once.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(JOBS) --dist loadfile
ARGS ?=

.PHONY: help setup browser demo test test-all lint format clean

help:
	@echo "make demo      SmolLM2-135M compiled with backend=\"dsi\" beside eager and torch.compile's default"
	@echo "make test      lint, then the test suite"
	@echo "make test-all  the slow tests too"
	@echo "make lint      ruff, mypy, import-linter"
	@echo "make format    ruff's formatter and safe fixes"
	@echo "make clean     remove the virtual environment and what was built"

setup:
	@if [ -z "$(PYTHON)" ]; then echo "dsi needs Python 3.11 or 3.12, and none was found on the path: make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@$(PYTHON) scripts/setup.py $(VENV)

demo: setup
	@$(RUN) -m bench.demo $(ARGS)

browser: setup
	@$(RUN) scripts/browser.py

test: lint browser
	$(PYTEST) $(ARGS) $(TESTS)

test-all: lint browser
	$(PYTEST) -m "slow or not slow" $(ARGS) $(TESTS)

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	@$(RUN) scripts/package_tree.py build/tree
	MYPYPATH=build/tree $(RUN) -m mypy -p dsi
	cd build/tree && ../../$(RUN) -c "from importlinter.cli import lint_imports_command; lint_imports_command()" ../../pyproject.toml

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV) $(VENV).lock build dist *.egg-info out
