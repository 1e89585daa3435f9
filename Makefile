# make demo   set up, then train three models on virtual nodes that come and go, on this machine, in two minutes
# make test   set up, then all tests, and beside them lint, types and import rules: what every change must pass
# make test-fast  only the tests that need no other process: two minutes
# make test-deep  the same with many more examples of each property
# make check  only lint, types and import rules
# make setup  build .venv only
# make soak   set up, then disturb elastic jobs for half an hour (MINUTES=30), or by so many faults (FAULTS=2000)
# make soak SOAK=--flows  the same while the state flows to newcomers: these, and those that send it, are killed
# make soak-live  the same for the whole live system: nodes, agents, workers and the controller are killed
# make soak-ranks  40 events for nodes with two ranks under a real controller: ranks, agents and nodes go (EVENTS=40)
# make soak-gpu   disturb two trainings on one GPU, NCCL between their ranks; with the torch of $PYTHON, sets nothing up
# make owners  train as two Unix users on a real Slurm, and measure what a node costs that changes its owner; needs root
# make soak-frameworks  tests with Transformers, Accelerate, trackers and DDP scripts, each in an environment of its own
# make matrix set up, then run what users write on nodes that come and go, and put the verdicts into docs/elastic.md
# make wheel  build the package into dist/, to be installed into an environment of your own with pip; sets nothing up
# make docs   set up, then build the documentation into site/, to be read offline
# make durations  run all tests and note how long they take: the longest are started first
# make format rewrite the code in the project's style
.DEFAULT_GOAL := help
SHELL := /bin/bash
export PYTHON ?= python3
BIN := .venv/bin
JOBS ?= auto
# Many tests wait for processes or for time to pass: more of them run at once than there are cores.
OVERLAP ?= $(shell expr $$(nproc) + 2)
FAST := not (slurm or browser or waits or docs)
PYTEST := $(BIN)/pytest -n $(OVERLAP) --dist loadgroup --no-loadscope-reorder
# With it, every process would compile all modules again, and there are hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# What runs beside the tests.
export CHECK ?= $(MAKE) --no-print-directory check

MINUTES ?= 30
EVENTS ?= 40

.PHONY: help setup demo test test-fast test-deep durations check soak soak-live soak-ranks soak-gpu soak-frameworks owners matrix wheel docs format clean

help:
	@sed -n 's/^# make /make /p' Makefile

setup:
	@bash scripts/setup.sh

demo:
	@bash scripts/setup.sh demo
	@$(BIN)/bftrainer demo $(DEMO)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/house.py

test: setup
	@bash scripts/test.sh "$(CHECK)" $(PYTEST)

test-fast: setup
	$(PYTEST) -m "$(FAST)"

test-deep: setup
	$(BIN)/pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder -m "$(FAST)" --hypothesis-profile deep

durations: setup
	$(PYTEST) --junitxml build/tests.xml
	$(BIN)/python scripts/durations.py build/tests.xml

soak: setup
	PYTHONPATH=tests $(BIN)/python tests/elastic/soak.py --jobs $(JOBS) $(if $(FAULTS),--faults $(FAULTS),--minutes $(MINUTES)) $(SOAK)

soak-live: setup
	PYTHONPATH=tests $(BIN)/python -m support.cluster.chaos --minutes $(MINUTES)

soak-ranks: setup
	PYTHONPATH=tests $(BIN)/python -m support.cluster.chaos --ranks-per-node 2 --nodes 3 --events $(EVENTS) $(SOAK)

owners: setup
	PYTHONPATH=tests $(BIN)/pytest -s -p no:cacheprovider tests/slurm/owners_live.py tests/slurm/owners_attacked.py
	$(BIN)/python benchmarks/owners.py
	$(BIN)/python benchmarks/owners.py --way run-as

soak-gpu:
	PYTHONPATH=src:tests $(PYTHON) tests/elastic/soak_gpu.py --model gpt2 --json
	PYTHONPATH=src:tests $(PYTHON) tests/elastic/soak_gpu.py --model cnn --json

soak-frameworks:
	@bash scripts/frameworks.sh $(FRAMEWORKS)

matrix: setup
	$(BIN)/python tests/elastic/matrix/run.py --page docs/elastic.md

wheel:
	@test -x build/wheel/bin/pip || $(PYTHON) -m venv build/wheel
	@rm -f dist/bftrainer-*.whl
	build/wheel/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/bftrainer-*.whl

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'open site/index.html, or for its search: python3 -m http.server -d site'

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv demo site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
