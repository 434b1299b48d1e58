# Everything a person does with this repository. `make` alone lists it.
#
# PYTHON=… NO_VENV=1 uses an environment that is already there instead of making .venv.

SHELL := /bin/bash
PYTHON ?= python3
CPU_SECONDS ?= 3600
ifdef NO_VENV
PY := $(PYTHON)
READY :=
else
PY := .venv/bin/python
READY := .venv/ready
endif
PYTEST := $(PY) -m pytest -q

.PHONY: help setup demo test test-long test-gpu test-triton-versions accept-gpu lint golden fuzz clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "PYTHON=python3.12 make setup      another interpreter for .venv"
	@echo "PYTHON=/path/python NO_VENV=1     an environment that is already there, for machines without a network"

setup: $(READY) ## make .venv from nothing, with the tested versions

.venv/ready: pyproject.toml constraints.txt
	@tools/setup "$(PYTHON)"

demo: $(READY) ## the main job: plan, build, verify, preflight, frozen training steps
	@$(PY) -m dflash.demo

test: $(READY) ## lint, types and every kind of test that needs no GPU
	@PY="$(PY)" tools/test lint types unit attacks golden compile interpret

test-long: $(READY) ## the same with the long property tests whole
	@KERNELBAKE_LONG=1 PYTEST_TIMEOUT=7200 PY="$(PY)" tools/test lint types unit attacks golden compile interpret

test-gpu: $(READY) ## the tests that need a GPU; a missing GPU is a failure
	@KERNELBAKE_REQUIRE_GPU=1 PYTEST_TIMEOUT=1800 PY="$(PY)" tools/test gpu

test-triton-versions: $(READY) ## the planner with the oldest and the newest Triton (TRITONS="3.6.0 3.9.0", or folders)
	@PY="$(PY)" tools/test-triton-versions $(TRITONS)

accept-gpu: $(READY) ## build, verify, 50 frozen steps and the thread stress on this machine's GPU, into one results file
	@$(PY) -m dflash.accept

lint: $(READY) ## ruff and mypy
	@PY="$(PY)" tools/test lint types

golden: $(READY) ## write the golden files anew: output, keys, losses; read the difference before you commit
	@KERNELBAKE_WRITE_GOLDEN=1 $(PYTEST) tests/golden
	@KERNELBAKE_WRITE_GOLDEN=1 CUDA_VISIBLE_DEVICES= $(PYTEST) tests/compile/test_shadow_keys.py -k golden
	@KERNELBAKE_WRITE_GOLDEN=1 TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(PYTEST) tests/interpret/test_train.py -k record

fuzz: $(READY) ## fuzz the readers of bundles and manifests for an hour of CPU time, or CPU_SECONDS=600
	@$(PY) tests/fuzz/fuzz.py --cpu-seconds $(CPU_SECONDS)

clean: ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build
