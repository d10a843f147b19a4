# make demo | make test | make check | make chaos: each sets up .venv first and needs nothing but Python 3.11+ and make.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
UV := $(shell command -v uv 2>/dev/null || echo .venv/bin/uv)
# uv reads no pip configuration, so wheels kept at hand are found for it: its own variable, pip's, then pip's configuration.
LINKS := $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
ifneq ($(strip $(LINKS)),)
export UV_FIND_LINKS := $(LINKS)
else
# Nothing at hand: on a machine without a card the CPU build of torch saves gigabytes.
export UV_TORCH_BACKEND ?= cpu
endif
# Where Python may not keep what it has compiled, each process compiles Prefect and torch anew: five seconds instead of one and a half.
export PYTHONDONTWRITEBYTECODE :=
EXTRAS := control,rehearsal,train
FAULT ?=
KEEP_UP ?=
RUNS ?=
SEED ?=
DEADMAN ?=
VENV := .venv/.stamp
LINT := .venv/bin/ruff check . && .venv/bin/ruff format --check .

.PHONY: demo test check chaos constraints clean
demo: $(VENV)
	@.venv/bin/python -m deployments demo $(foreach fault,$(FAULT),--fault '$(fault)') $(if $(filter 1 true yes on,$(KEEP_UP)),--keep-up)

# The types are looked at beside the tests, and are told after them.
test: $(VENV)
	@$(LINT)
	@.venv/bin/mypy > .venv/types.txt 2>&1 & types=$$!; failed=0; \
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder tests || failed=$$?; \
	wait $$types || failed=$$?; cat .venv/types.txt; exit $$failed

# What goes wrong at a drawn moment of each run, and what is left; not among the tests: 200 runs take half an hour on two cores.
chaos: $(VENV)
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.chaos $(if $(RUNS),--runs $(RUNS)) $(if $(SEED),--seed $(SEED)) $(if $(filter 1 true yes on,$(DEADMAN)),--deadman)

check: $(VENV)
	@$(LINT) && .venv/bin/mypy

$(VENV): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed: set PYTHON=/path/to/python3"; exit 1; }
	@test -x .venv/bin/python || if command -v uv >/dev/null; then uv venv -q --python '>=3.11,<3.14' .venv; else $(PYTHON) -m venv .venv && .venv/bin/python -m pip install -q uv; fi
	@echo "installing into .venv (a minute the first time) …"
	@VIRTUAL_ENV=$(CURDIR)/.venv $(UV) pip install -q --compile-bytecode -c constraints.txt -e '.[$(EXTRAS)]' --group dev
	@touch $@

# The one set of versions. The five below are chosen, the rest follows from them.
constraints:
	@printf '%s\n' torch==2.13.0 triton==3.7.1 transformers==5.23.0 peft==0.21.2 trl==1.16.0 prefect==3.9.1 > .venv/pins.txt
	@$(UV) pip compile -q --universal --all-extras --group dev pyproject.toml -c .venv/pins.txt -o constraints.txt --no-annotate --no-header
	@sed -i -e 's/^\(torch==[0-9.]*\).*/\1/' constraints.txt && awk '!seen[$$0]++' constraints.txt > .venv/c.txt && mv .venv/c.txt constraints.txt

clean:
	@rm -rf .livery .venv dist build
