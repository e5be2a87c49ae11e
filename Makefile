# `make demo` and `make test` set everything up by themselves, in .venv, and can be repeated.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Where bytecode is forbidden, every process of the tests compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE
# Processes of the tests: one a core.
JOBS ?= auto
LOWEST_VENV ?= .venv-lowest
LOWEST_READY := $(LOWEST_VENV)/.ready
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
# Triton's compiler for Intel's GPUs has wheels for Python 3.11 alone.
INTEL_PYTHON ?= python3.11
INTEL_VENV ?= .venv-intel
INTEL_READY := $(INTEL_VENV)/.ready
# nemo-automodel alone, beside what VENV has: what it asks for is for training, and not imported.
AMD_TARGETS := gfx942 gfx950 gfx1151 gfx1201
NEMO ?= .nemo
SGLANG ?= .sglang
SGLANG_READY := $(SGLANG)/.ready
NEMO_READY := $(NEMO)/.ready

# $(call venv,DIR), $(call pip,DIR,ARGUMENTS). pip's own --quiet hides why versions conflict: what it
# says is kept, and shown when it fails.
venv = $(PYTHON) -m venv $(1) || { rm -rf $(1); \
  echo "$(PYTHON) makes no virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
pip = $(1)/bin/python -m pip install --disable-pip-version-check --progress-bar off $(2) > $(1)/pip.log 2>&1 || \
  { tail -n 40 $(1)/pip.log >&2; exit 1; }

.PHONY: help demo test test-all family test-lowest test-vllm test-sglang test-intel test-amd test-nemo resolve lint types imports check bench build-matrix build-subset docs tables clean

help:
	@echo "make demo    a tiny trained DeepSeek-V4 speaks, finds a passkey in 32,768 tokens, and is checked"
	@echo "make test    run the CPU test suite, without what tests/slow.txt lists"
	@echo "make test-all   run the whole of it"
	@echo "make family F=indexer   a family's tests, conformance cases and one build of each of its kernels"
	@echo "make test-vllm   run the vLLM plugin's tests, with vLLM in its own environment (minutes)"
	@echo "make test-sglang run the SGLang plugin's tests, with SGLang beside the packages of make test"
	@echo "make test-intel  compile kernels for Intel's GPUs, and run them on this CPU (docs/intel.md)"
	@echo "make test-amd    compile kernels for AMD's GPUs, and interpret their code (docs/amd.md)"
	@echo "make test-nemo   compare V4.1 with nemo-automodel's, an independent implementation (minutes)"
	@echo "make test-lowest run the conformance suite on the least versions that are allowed"
	@echo "make resolve ask the public index whether everything can be installed, without installing it"
	@echo "make check   lint, types and import contracts"
	@echo "make bench   CPU benchmarks (several minutes)"
	@echo "make tables  the tables and drawings of README.md and docs, from benchmarks/results"
	@echo "make docs    the documentation as a site, in build/docs"
	@echo "make build-matrix   build every Triton kernel for every GPU target, without a GPU"
	@echo "make clean   remove .venv and the demo's output"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "anymla needs Python 3.11 or newer; name one with: make PYTHON=python3.12" >&2; exit 1; }
	@echo "installing into $(VENV): minutes, most of them for torch"
	@$(call venv,$(VENV))
	@$(call pip,$(VENV),--constraint constraints.txt torch==2.13.0)
	@$(call pip,$(VENV),--constraint constraints.txt --editable '.[dev]')
	@touch $(READY)

demo: $(READY)
	$(BIN)/anymla demo --checkpoint examples/tiny/checkpoint --prompt-tokens 1024 examples/tiny/persuasion.txt

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow"

test-all: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Names of the folders of src/anymla/ops.
family: $(READY)
	@test -n "$(F)" && test -d src/anymla/ops/$(F) || { echo "name a folder of src/anymla/ops: make family F=indexer" >&2; exit 1; }
	$(BIN)/python -m pytest -q -n $(JOBS) -k $(F) tests/ops/$(F) tests/ops/test_contracts.py tests/ops/test_call_forms.py tests/ops/test_families.py
	$(BIN)/anymla conformance --family $(F)
	$(BIN)/python -m lab build-matrix --first kernel --module $(F). --target sm_90

# torch as constraints.txt has it, everything else as low as it goes.
$(LOWEST_READY): pyproject.toml constraints.txt constraints-lowest.txt
	@echo "installing into $(LOWEST_VENV)"
	@$(call venv,$(LOWEST_VENV))
	@$(call pip,$(LOWEST_VENV),--constraint constraints.txt torch==2.13.0)
	@grep -v '^torch==' constraints-lowest.txt > $(LOWEST_VENV)/lowest.txt
	@$(call pip,$(LOWEST_VENV),--no-deps -r $(LOWEST_VENV)/lowest.txt --editable .)
	@touch $(LOWEST_READY)

test-lowest: $(LOWEST_READY)
	$(LOWEST_VENV)/bin/python -m anymla conformance --backend triton --jobs 2 --timeout 600

resolve: $(READY)
	$(BIN)/python .ci/resolve.py

$(VLLM_READY): pyproject.toml constraints-vllm.txt
	@echo "installing into $(VLLM_VENV)"
	@$(call venv,$(VLLM_VENV))
	@$(call pip,$(VLLM_VENV),--no-deps -r constraints-vllm.txt)
	@$(call pip,$(VLLM_VENV),--no-deps --editable .)
	@touch $(VLLM_READY)

# Every second file each, which take as long as the others; with -j 2 beside each other.
test-vllm: test-vllm-0 test-vllm-1

test-vllm-%: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pytest -m "not slow" $$(ls tests/engines/vllm/test_*.py | awk 'NR % 2 == $*')

$(SGLANG_READY): $(READY) constraints-sglang.txt
	@echo "installing into $(SGLANG)"
	@rm -rf $(SGLANG)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --target $(SGLANG) -r constraints-sglang.txt
	@touch $(SGLANG_READY)

# SGLang and what it imports warn on their own account.
test-sglang: $(SGLANG_READY)
	PYTHONPATH=$(SGLANG)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(BIN)/python -m pytest -W ignore tests/engines/sglang

$(INTEL_READY): pyproject.toml constraints.txt constraints-intel.txt .ci/ocloc.sh
	@echo "installing into $(INTEL_VENV)"
	@command -v $(INTEL_PYTHON) > /dev/null || \
	  { echo "triton-xpu needs Python 3.11; name it with: make INTEL_PYTHON=..." >&2; exit 1; }
	@$(INTEL_PYTHON) -m venv $(INTEL_VENV)
	@$(call pip,$(INTEL_VENV),--constraint constraints.txt torch==2.13.0 numpy safetensors tokenizers packaging click tqdm pytest hypothesis)
	@$(INTEL_VENV)/bin/python -m pip uninstall -q -y triton 2> /dev/null
	@$(call pip,$(INTEL_VENV),--no-deps -r constraints-intel.txt --editable .)
	@.ci/ocloc.sh $(INTEL_VENV)/ocloc
	@touch $(INTEL_READY)

# Compiled programs are kept in the environment.
test-intel: $(INTEL_READY)
	ANYMLA_OCLOC=$(INTEL_VENV)/ocloc/ocloc $(INTEL_VENV)/bin/python -m lab build-matrix --first file --target xpu_bmg
	@TRITON_INTERPRET=0 $(INTEL_VENV)/bin/python -c 'import sys; from anymla.testing.intel_on_cpu import missing; sys.exit(missing() or None)'
	TRITON_INTERPRET=0 ANYMLA_OPENCL_CACHE=$(INTEL_VENV)/opencl $(INTEL_VENV)/bin/python -m pytest -m "not slow" tests/intel tests/crossrun/test_intel.py

# Each a process of its own, which has one target; with -j 2 two at a time.
test-amd: $(AMD_TARGETS:%=test-amd-%)

test-amd-%: $(READY)
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -q --amd-target $* -m "not slow" -k "amd or (triton and not Intel and not Arc and not native)" tests/amd @tests/amd/families.txt

$(NEMO_READY): $(READY)
	@echo "installing into $(NEMO)"
	@rm -rf $(NEMO)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --target $(NEMO) nemo-automodel==0.7.0
	@touch $(NEMO_READY)

test-nemo: $(NEMO_READY)
	PYTHONPATH=$(NEMO)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(BIN)/python -m pytest tests/model/test_nemo.py tests/model/test_nemo_drafter.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

check: lint types imports

bench: $(READY)
	$(BIN)/python -m lab cpu --json benchmarks/results/cpu.jsonl

# Only what has changed since it was recorded is built again.
build-matrix: $(READY)
	$(BIN)/python -m lab build-matrix --json benchmarks/results/build_matrix.jsonl

# One build of each file of kernels for one target of each kind: two to three minutes.
build-subset: $(READY)
	$(BIN)/python -m lab build-matrix --first file --target sm_80 --target sm_90 --target gfx942 --target gfx1201

tables: $(READY)
	$(BIN)/python -m lab report --svg docs/figures --figure headline --figure layer-parts $(foreach file,$(shell grep -rl --include=*.md -e ': begin -->' README.md docs),--tables $(file))
	$(BIN)/python docs/lists.py

docs: $(READY)
	$(BIN)/python -m sphinx -q -W --keep-going docs build/docs

clean:
	rm -rf $(VENV) $(LOWEST_VENV) $(VLLM_VENV) $(INTEL_VENV) $(NEMO) $(SGLANG) demo-output
