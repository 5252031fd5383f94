# Every target sets itself up; CI runs exactly these (.ci/run).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One thread a rank: two ranks share the two cores of the machines we run on.
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes: let Python keep what it has compiled, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE
# Most tests wait for something, so there are more of them at a time than cores.
PYTEST := $(BIN)/python -m pytest -n $(or $(WORKERS),4)

FRAMEWORKS := .venv-frameworks
# The release of torch that `make test-torch` tests with, and its environment.
TORCH ?= 2.15.0
OTHER := .venv-torch-$(TORCH)

.PHONY: install train test test-all test-frameworks test-torch dist check conformance collectives sanitize model soak bench bench-shm bench-control bench-compile bench-compiling bench-tracing bench-host-cost clean

install: $(STAMP)

# torch is pinned to the build we test with; a looser request pulls CUDA packages.
$(STAMP): pyproject.toml setup.py $(wildcard src/paceline/transport/shm/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0 "numpy>=1.26"
	rm -f src/paceline/transport/shm/_kernel.*.so
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test,bench]"
	touch $@

train: install
	$(BIN)/python -m paceline train $(ARGS)

# Every capability, in minutes (tests/lanes.py says how it is chosen).
test: install
	$(PYTEST) --fast

# Every test, and torch's own tests of DDP.
test-all: install
	$(PYTEST)
	$(MAKE) conformance

# Paceline in Lightning, Accelerate, transformers and Ray, in an environment of its own, since these are large.
test-frameworks: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest -n $(or $(WORKERS),2) --override-ini="addopts=-q --strict-markers" tests/frameworks $(ARGS)

$(FRAMEWORKS)/.installed: pyproject.toml setup.py $(wildcard src/paceline/transport/shm/csrc/*)
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 "numpy>=1.26"
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check -e ".[test,frameworks]"
	touch $@

# The tests with another release of torch: `make test-torch TORCH=2.14.1 ARGS="--fast tests/ddp"`. The wheels of an index
# may bring CUDA, 5 GB. torch is asked for by its version each time, so that pip never replaces it.
test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python -c "import torch; assert torch.__version__.split('+')[0] == '$(TORCH)', torch.__version__"
	PYTHONWARNINGS="ignore:paceline was tested" $(OTHER)/bin/python -m pytest -n $(or $(WORKERS),4) \
		-W "ignore:paceline was tested" $(ARGS)

$(OTHER)/.installed: pyproject.toml setup.py $(wildcard src/paceline/transport/shm/csrc/*)
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check torch==$(TORCH) "numpy>=1.26"
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check torch==$(TORCH) -e ".[test,bench]"
	touch $@

# An sdist and a wheel in dist/, checked: twine reads them, and the README's script runs in an environment that has
# nothing else.
dist: install
	$(BIN)/pip install --quiet --disable-pip-version-check build twine
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m tests.release dist

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

conformance: install
	$(BIN)/python -m tests.conformance $(ARGS)

# torch's own tests of collectives, on gloo and on shm; writes docs/transport-conformance.md.
collectives: install
	$(BIN)/python -m tests.conformance --suite collectives

# The C kernel of the transport under ThreadSanitizer and the address and undefined-behaviour sanitizers.
sanitize:
	$(MAKE) -C tests/transport/sanitize

# The transport's protocol, checked exhaustively (needs spin, from Debian).
model: install
	PACELINE_MODEL=full $(BIN)/python -m pytest tests/transport/model

# What is too long for every change.
soak: install
	$(BIN)/python -m tests.transport.killing --runs 200
	$(BIN)/python -m tests.transport.killing_hosts --runs 200
	$(BIN)/python -m tests.transport.fuzz --programs 2000
	$(MAKE) -C tests/transport/sanitize overwrite OVERWRITES=1000000
	$(BIN)/python -m tests.control.fault_scripts --runs 1000
	$(BIN)/python -m tests.control.file_fuzz --files 100000
	$(BIN)/python -m tests.control.mutations --messages 100000
	$(BIN)/python -m tests.control.broken_rank --runs 300
	$(BIN)/python -m tests.run.ends --runs 2000
	$(BIN)/python -m tests.random_training --programs 20000

# The shared-memory transport: all-reduce by size, and training.
bench-shm: install
	$(BIN)/python -m benchmarks.collectives
	$(BIN)/python -m benchmarks --suite shm --out benchmarks/results/shm

# Compiled training: step time by model; graphs, compile time, step time and overlap by bucket size.
bench-compile: install
	$(BIN)/python -m benchmarks --suite compile --budget 20 --launches 2 --out benchmarks/results/compile
	$(BIN)/python -m benchmarks.buckets --out benchmarks/results/compile

# How soon a compiled training starts: each rank compiles, or one does for all.
bench-compiling: install
	$(BIN)/python -m benchmarks.compiling $(ARGS)

# A compiled step with its collectives in the graph, against one with a break at each.
bench-tracing: install
	$(BIN)/python -m benchmarks.tracing $(ARGS)

# What the control channel costs a step.
bench-control: install
	$(BIN)/python -m benchmarks.control $(ARGS)

# What the host does for a step, a parameter at a time, on a device that is not there.
bench-host-cost: install
	$(BIN)/python -m benchmarks.host_cost $(ARGS)

bench: install
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .venv-* build dist src/*.egg-info
