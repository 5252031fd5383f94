# Every target sets itself up; CI runs exactly these (.ci/run).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One thread a rank: two ranks share the two cores of the machines we run on.
export OMP_NUM_THREADS ?= 1

.PHONY: install train test check conformance bench clean

install: $(STAMP)

# torch is pinned to the build we test with; a looser request pulls CUDA packages.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 "numpy>=1.26"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test,bench]"
	touch $@

train: install
	$(BIN)/python -m paceline train $(ARGS)

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

conformance: install
	$(BIN)/python -m tests.conformance $(ARGS)

bench: install
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
