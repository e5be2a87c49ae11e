# `make demo` and `make test` set everything up by themselves, in .venv, and can be repeated.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready

.PHONY: help demo test test-vllm lint types imports check bench build-matrix build-subset docs report tables clean

help:
	@echo "make demo    run DeepSeek-V4 end to end on a tiny checkpoint, checked against float64"
	@echo "make test    run the CPU test suite"
	@echo "make test-vllm   run the vLLM plugin's tests, with vLLM in its own environment (minutes)"
	@echo "make check   lint, types and import contracts"
	@echo "make bench   CPU benchmarks (several minutes)"
	@echo "make report  a page of all recorded measurements, report.html"
	@echo "make tables  the tables of measurements in README.md and docs, from benchmarks/results"
	@echo "make docs    the documentation as a site, in build/docs"
	@echo "make build-matrix   build every Triton kernel for every GPU target, without a GPU"
	@echo "make clean   remove .venv and the demo's output"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "anymla needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/anymla demo --output demo-output README.md docs/*.md

test: $(READY)
	$(BIN)/python -m pytest

$(VLLM_READY): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $(VLLM_READY)

test-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pytest tests/engines/vllm

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

check: lint types imports

bench: $(READY)
	$(BIN)/anymla bench cpu --json benchmarks/results/cpu.jsonl

# Only what has changed since it was recorded is built again.
build-matrix: $(READY)
	$(BIN)/anymla bench build-matrix --json benchmarks/results/build_matrix.jsonl

# One build of each file of kernels for one target of each kind: two to three minutes.
build-subset: $(READY)
	$(BIN)/anymla bench build-matrix --first file --target sm_80 --target sm_90 --target gfx942 --target gfx1201

report: $(READY)
	$(BIN)/anymla bench report --output report.html

tables: $(READY)
	$(BIN)/anymla bench report --output report.html $(foreach file,$(shell grep -rl --include=*.md -e ': begin -->' README.md docs),--tables $(file))

docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going docs build/docs

clean:
	rm -rf $(VENV) $(VLLM_VENV) demo-output
