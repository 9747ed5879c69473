# Every target sets up what it needs; nothing is installed outside .venv and the user's cache folder.
PYTHON ?= python3
BIN := .venv/bin
PROTOS := $(shell find protos -name '*.proto')

.PHONY: demo test up protos lint format compose-test soak clean

# The main job on a bare machine: the real model through the real three processes, once.
demo: .venv/installed
	@$(BIN)/pagewire demo

# Lint, types, tests.
test: .venv/installed lint
	$(BIN)/pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Millions of random moves of the scheduler core, checked one by one; for a night.
soak: .venv/installed
	PAGEWIRE_SOAK_WALKS=$${PAGEWIRE_SOAK_WALKS:-100000} $(BIN)/pytest --timeout=0 tests/test_scheduler_properties.py

up: .venv/installed
	@$(BIN)/pagewire up

protos: .venv/installed
	$(BIN)/python hatch_build.py

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The real containers, with Docker or without: see deploy/compose_test.py.
compose-test: .venv/installed
	$(BIN)/python deploy/compose_test.py

.venv/installed: pyproject.toml hatch_build.py $(PROTOS)
	@echo "setting up .venv (a minute or two the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --disable-pip-version-check --editable '.[worker,dev]'
	@touch $@

clean:
	rm -rf .venv build dist
	find . -name __pycache__ -o -name '*_pb2*.py*' | xargs rm -rf
