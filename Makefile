# Needs Python 3.11 or newer and make; nothing else has to be installed or running.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.SUFFIXES:

VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that is new enough.
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11 python,\
	$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(p))))
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps
# The lists are complete, so there is nothing to resolve; what is never imported is never compiled.
LOCKED := $(PIP) --no-compile --require-hashes
RESOLVED = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
ARGS ?=
# Tests wait more than they reckon. Those of one file stay together, as they may share what is dear to set up, and the
# long files come first.
PARALLEL := --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# The clients that people have: environments of Python, each with what it is resolved from, and one of Node.
CLIENTS := openai anthropic grpc-requests frameworks instructor schemathesis
OF_openai := openai
OF_anthropic := anthropic
OF_grpc-requests := grpc-requests
OF_frameworks := langchain-openai langchain-anthropic pydantic-ai-slim[openai,anthropic] openai-agents llm
OF_instructor := instructor[anthropic]
OF_schemathesis := schemathesis
CLIENT_VENVS := .venv-clients
# Other gateways, for `bench-peers` only.
PEERS := litellm
OF_litellm := litellm[proxy]==1.108.7
PEER_VENVS := .venv-peers
NODE_CLIENTS := tests/clients/ai-sdk

.PHONY: help demo run check test lint types contracts pytest test-clients prove bench profile bench-peers bench-admission format protos lock clean

help:  ## what can be made (this list)
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

demo: $(VENV)/.runtime  ## set up, run 200 requests through a gateway against a simulated provider, show what they cost
	@exec $(BIN)/python -m gateway demo $(ARGS)

run: $(VENV)/.runtime  ## serve until stopped: REST on 127.0.0.1:8080, gRPC on 127.0.0.1:50051, data in .tollbridge/
	@exec $(BIN)/python -m gateway serve $(ARGS)

check: test test-clients demo  ## what CI runs, in the same order

test: lint types contracts pytest  ## set up, then lint, types, import contracts and all tests

lint: $(VENV)/.dev  ## ruff, and whether everything is formatted
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

types: $(VENV)/.dev  ## mypy, strict
	@$(BIN)/mypy

contracts: $(VENV)/.dev  ## who may import whom
	@$(BIN)/lint-imports --no-logo --no-cache

pytest: $(VENV)/.dev  ## all tests; ARGS="-k word" for some of them
	@$(BIN)/python -m pytest $(if $(ARGS),$(ARGS),$(PARALLEL))

test-clients: $(VENV)/.dev $(CLIENTS:%=$(CLIENT_VENVS)/%/.ready) $(CLIENT_VENVS)/ai-sdk/.ready  ## clients and frameworks, unmodified, against a running gateway; ARGS="openai word" for some
	@$(BIN)/python -m tests.clients $(ARGS)

prove: $(VENV)/.dev  ## show that admission is exact: models, simulation, SQL, faults, planted bugs; needs spin, gcc, libc6-dev, faketime, pgbouncer
	@$(BIN)/python -m tests.prove $(ARGS)

bench: $(VENV)/.dev  ## what a request costs beside programs that do nothing; ARGS=--quick for a first look
	@$(BIN)/python -m tests.benchmarks $(ARGS)

profile: $(VENV)/.dev  ## where the gateway's CPU goes; ARGS="--kind http --concurrency 16 --seconds 10"
	@$(BIN)/python -m tests.benchmarks.profile $(ARGS)

bench-peers: $(VENV)/.dev $(PEERS:%=$(PEER_VENVS)/%/.ready)  ## the gateway beside other gateways, which are installed for it
	@$(BIN)/python -m tests.benchmarks.peers $(ARGS)

bench-admission: $(VENV)/.dev  ## what an admission costs beside a bare UPDATE; ARGS=--quick for a first look
	@$(BIN)/python -m tests.benchmarks.admission $(ARGS)

format: $(VENV)/.dev  ## format the code and fix what can be fixed by machine
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format .

protos: $(VENV)/.dev  ## generate the gRPC code from protos/
	@$(BIN)/python -m grpc_tools.protoc -I. protos/tollbridge/v1/gateway.proto --python_out=. --pyi_out=. --grpc_python_out=.

lock: $(VENV)/.dev  ## resolve the dependencies again and write the hash-locked files
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --group build -o requirements.txt pyproject.toml
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --group build --group dev -c requirements.txt -o requirements-dev.txt pyproject.toml
	@$(foreach client,$(CLIENTS),printf '%s\n' $(OF_$(client)) | $(RESOLVED) -o tests/clients/requirements-$(client).txt - &&) true
	@$(foreach peer,$(PEERS),printf '%s\n' '$(OF_$(peer))' | $(RESOLVED) -o tests/benchmarks/requirements-$(peer).txt - &&) true
	@cd $(NODE_CLIENTS) && npm install --package-lock-only --omit-lockfile-registry-resolved=true --no-audit --no-fund --silent

clean:  ## remove the virtual environments and the caches; the data in .tollbridge/ stays
	rm -rf $(VENV) $(CLIENT_VENVS) $(PEER_VENVS) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.runtime: requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || { echo "setting up $(VENV) ..." >&2; rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@$(LOCKED) -r requirements.txt
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.runtime
	@$(LOCKED) -r requirements-dev.txt
	@touch $@

# An environment with what a list has, and nothing of ours.
define SET_UP
	@test -x $(@D)/bin/python || { echo "setting up $(@D) ..." >&2; $(BIN)/python -m venv $(@D); }
	@$(@D)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps --no-compile --require-hashes -r $<
	@touch $@
endef

$(CLIENT_VENVS)/%/.ready: tests/clients/requirements-%.txt $(VENV)/.runtime
	$(SET_UP)

$(PEER_VENVS)/%/.ready: tests/benchmarks/requirements-%.txt $(VENV)/.runtime
	$(SET_UP)

# Where there is no Node, nothing is made, and the run says that it skips the client.
$(CLIENT_VENVS)/ai-sdk/.ready: $(NODE_CLIENTS)/package.json $(NODE_CLIENTS)/package-lock.json
	@if ! npm --version >/dev/null 2>&1 || ! node -e 'process.exit(+(parseInt(process.versions.node) < 18))' 2>/dev/null; then \
		echo "Node 18 or newer and npm are not here: $(@D) is not set up" >&2; \
	else \
		echo "setting up $(@D) ..." >&2; \
		mkdir -p $(@D) && cp $^ $(@D) && npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund --silent && touch $@; \
	fi
