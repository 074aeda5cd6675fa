# Everything is installed into .venv in this folder. Nothing else is written but pip's cache.

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$python; break; }; done)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

ROUNDS ?= 20
MINUTES ?= 45
FILES ?= 3

# An environment belongs to the folder where it was made: in a copied or moved clone its commands
# would run the code of the old place, or nothing. So there it is made anew.
MOVED := $(shell test -e .venv/bin/fleet && ! grep -qF "$(CURDIR)/.venv/" .venv/bin/fleet && echo moved)

.DEFAULT_GOAL := help
.PHONY: moved help demo up compose-up compose-test test test-servers check format chaos chaos-long soak bench clean

help:  ## list what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

demo: .venv/run.stamp  ## answer 540 real digits, then again with too little memory (under a minute)
	$(BIN)/fleet demo

up: .venv/run.stamp  ## a server and a worker on this machine, until Ctrl-C
	$(BIN)/fleet up

compose-up: .env  ## Redis, workers and Flower in containers; the first time with new passwords
	$(COMPOSE) up -d --build

compose-test:  ## kill, scale and stop containers under 2,000 jobs (2 minutes)
	$(PYTHON) -m tests.compose.run

test: .venv/dev.stamp  ## unit, contract and integration tests, FILES=3 of their files at a time
	$(BIN)/python -m pytest -m "not chaos and not gpu" -n $(FILES) --dist loadfile --no-loadscope-reorder

test-servers: .venv/dev.stamp  ## the scripts on every server found, and on SERVERS="/path/to/redis-server ..."
	$(BIN)/python -m pytest -m scripts
	@for server in $(SERVERS); do \
		FLEET_TEST_SERVER=$$server $(BIN)/python -m pytest -m scripts || exit 1; done

check: .venv/dev.stamp  ## format, lint, types and import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: .venv/dev.stamp  ## put the code in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

chaos: .venv/dev.stamp  ## ROUNDS=20 kills under load, every job judged; then the other slow tests (40 minutes)
	$(BIN)/python -m tests.chaos.storm --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m pytest -m "chaos and not long"

chaos-long: .venv/dev.stamp  ## a hundred SIGTERMs, five hundred dead instances, a Redis that stands still (35 minutes)
	$(BIN)/python -m pytest -m long

soak: .venv/dev.stamp  ## half load for MINUTES=45, with a fault every minute and an eye on memory
	$(BIN)/python -m tests.chaos.storm --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

bench: .venv/dev.stamp  ## jobs per second beside plain Celery
	$(BIN)/python -m benchmarks.beside_celery

clean:  ## remove what make made
	rm -rf .venv .fleet .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache

.env:
	@$(PYTHON) scripts/compose_env.py

moved:
	@echo "make: .venv was made in another folder, so it is made anew here."
	rm -rf .venv

.venv/bin/python: $(MOVED)
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed, and none is on PATH." >&2; exit 2; }
	$(PYTHON) -m venv .venv

.venv/run.stamp: pyproject.toml constraints.txt $(MOVED) | .venv/bin/python
	$(INSTALL) -e ".[cli,worker,embedded,flower]"
	@touch $@

.venv/dev.stamp: pyproject.toml constraints.txt $(MOVED) | .venv/bin/python
	$(INSTALL) -e ".[cli,worker,embedded,flower,test,dev]"
	@touch $@ .venv/run.stamp
