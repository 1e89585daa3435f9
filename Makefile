# make demo   set up, then train three models on virtual nodes that come and go, on this machine, in two minutes
# make test   set up, then lint, types, import rules and all tests
# make setup  build .venv only
# make soak   set up, then disturb elastic jobs for half an hour (MINUTES=30), or by so many faults (FAULTS=2000)
# make soak-live  the same for the whole live system: nodes, agents, workers and the controller are killed
# make soak-gpu   disturb two trainings on one GPU, NCCL between their ranks; with the torch of $PYTHON, sets nothing up
# make matrix set up, then run what users write on nodes that come and go, and put the verdicts into docs/elastic.md
# make docs   set up, then build the documentation into site/, to be read offline
# make format rewrite the code in the project's style
.DEFAULT_GOAL := help
SHELL := /bin/bash
export PYTHON ?= python3
BIN := .venv/bin
JOBS ?= auto

MINUTES ?= 30

.PHONY: help setup demo test check soak soak-live soak-gpu matrix docs format clean

help:
	@sed -n 's/^# make /make /p' Makefile

setup:
	@bash scripts/setup.sh

demo:
	@bash scripts/setup.sh demo
	@$(BIN)/bftrainer demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/house.py

test: check
	$(BIN)/pytest -n $(JOBS) --dist worksteal

soak: setup
	PYTHONPATH=tests $(BIN)/python tests/elastic/soak.py --jobs $(JOBS) $(if $(FAULTS),--faults $(FAULTS),--minutes $(MINUTES)) $(SOAK)

soak-live: setup
	PYTHONPATH=tests $(BIN)/python -m support.cluster.chaos --minutes $(MINUTES)

soak-gpu:
	PYTHONPATH=src:tests $(PYTHON) tests/elastic/soak_gpu.py --model gpt2 --json
	PYTHONPATH=src:tests $(PYTHON) tests/elastic/soak_gpu.py --model cnn --json

matrix: setup
	$(BIN)/python tests/elastic/matrix/run.py --page docs/elastic.md

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'open site/index.html, or for its search: python3 -m http.server -d site'

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv demo site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
