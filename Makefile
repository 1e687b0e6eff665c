# make bench   set up, then the quick benchmark: a table on screen, a result file, and a report to look at
# make test    set up, then formatting, lint, types, documents and the tests that are not marked slow; minutes
# make test-all   the same with all tests
# make tables  write the tables and figures of the documents anew from benchmarks/results/
# make site    the documentation as pages in docs/_build, every warning an error
# make sanitize   the kernel tests on a GPU under compute-sanitizer: memory, races, reads of what nobody wrote
# make clean   remove what set-up and runs have made
#
# Without a virtual environment, where everything is installed already:  make bench PYTHON=python3 VENV=
# A PyTorch of your own choice:  make bench TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'

SHELL := bash
BASE ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1; platform_system == 'Linux' and platform_machine == 'x86_64'
RESULT ?= reports/bench.json
BENCH ?= --quick
JOBS ?= 2
GENERATED = README.md README.ja.md $(wildcard docs/*.md)

ifeq ($(strip $(VENV)),)
PYTHON ?= python3
READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

.PHONY: bench test test-all check tables site sanitize setup clean
bench: setup
	$(PYTHON) -m tensorlogic bench $(BENCH) --json $(RESULT) --report

# Several test processes share the cores: threads that wait by spinning would take them from each other. Some 200 tests start a
# process of their own: bytecode is kept for them, whatever the environment says of it.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(PYTHON) -m pytest -n $(JOBS) --dist loadfile
test: check
	$(PYTEST) -m "not slow"

test-all: check
	$(PYTEST)

check: setup
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -m tools.docs.markdown_blocks --check $(GENERATED)
	$(PYTHON) -m tools.docs.precision_page --check

tables: setup
	$(PYTHON) -m tools.docs.markdown_blocks $(GENERATED)
	$(PYTHON) -m tools.docs.precision_page

site: setup
	$(PYTHON) -m pip install --quiet --editable '.[docs]'
	$(PYTHON) -m sphinx -W --keep-going -q docs docs/_build
	@echo "docs/_build/index.html"

# Kernels are compiled by all cores first, so that the sanitized processes only load them. Minutes for memcheck and initcheck, half an hour for
# racecheck. compute-sanitizer before 2026.1 names the byte by which Triton's warp groups are told their work, and what cuBLASLt has written;
# a newer one: pip install nvidia-cuda-sanitizer-api. A part: make sanitize SANITIZE='tests/kernels/test_row_kernels.py --tools memcheck'
SANITIZE ?=
PROCESSES ?= 16
sanitize: setup
	$(PYTHON) -m pytest -q -n $(PROCESSES) --dist worksteal tests/kernels tests/mixed_precision -k "not compile and not spill"
	$(PYTHON) tools/sanitize.py --processes $(PROCESSES) $(SANITIZE)

setup: $(READY)
	@if [ -f tools/build_native.py ]; then $(PYTHON) tools/build_native.py || echo "the native library was not built: CPU kernels of ours stay off (tensorlogic doctor says what that costs)"; fi

$(VENV)/.ready: pyproject.toml
	$(BASE) -m venv $(VENV)
	$(PYTHON) -c "import torch" 2>/dev/null || $(PYTHON) -m pip install --quiet $(TORCH) "$(TRITON)"
	$(PYTHON) -m pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) reports
