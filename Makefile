# Thin targets over pip, gigamlp, pytest, ruff and mypy. Needs make and a Python >= 3.11 with venv, nothing else.
#
#   make reproduce            install what it takes into .venv, then run `gigamlp reproduce`
#   make test                 install the test tools too, then run the tests
#   make lint types docs      what CI checks besides
#   make soak                 the long tests
#   make site                 the documentation as a site, in site/
#   make sanitize             the native kernels' tests, built with AddressSanitizer and UBSan, then the pool's with TSan
#   make clean                remove .venv and every cache
#
#   PYTHON=python3.12         another interpreter
#   ARGS="--quick"            passed on to gigamlp, or to pytest

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet
INPUTS := pyproject.toml constraints.txt $(VENV)/.made

.PHONY: help reproduce test lint types docs site soak sanitize clean
.DELETE_ON_ERROR:

help:
	@sed -n '3,12s/^#  *//p' Makefile

reproduce: $(VENV)/.run
	$(BIN)/gigamlp reproduce $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not soak" $(ARGS)

soak: $(VENV)/.test
	$(BIN)/python -m pytest -m soak $(ARGS)

sanitize: $(VENV)/.test
	$(BIN)/python -m tests.kernels.cpu.sanitize
	$(BIN)/python -m tests.kernels.cpu.sanitize thread

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.lint
	$(BIN)/mypy

# lists every code block of the README and docs, run or not, and checks tags and links; `make test` runs the blocks
docs: $(VENV)/.test
	$(BIN)/python -m tests.docblocks

# warnings are errors: a page that is not in the navigation, a link that leads nowhere, a docstring that does not parse
site: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# Each stamp means "installed"; it is older than its inputs when pyproject.toml or constraints.txt changed.
$(VENV)/.run: $(INPUTS)
	@echo "Installing gigamlp[torch,report] into $(VENV) (PyTorch is large: some minutes)"
	$(PIP) --editable '.[torch,report]'
	@touch $@

$(VENV)/.test: $(INPUTS)
	@echo "Installing gigamlp[torch,report,score,serve,test,cuda13,onnx,openvino] into $(VENV) (PyTorch is large: some minutes)"
	$(PIP) --editable '.[torch,report,score,serve,test,cuda13,onnx,openvino]'  # NVRTC compiles kernels; the CPU peers add 6 s
	@touch $@ $(VENV)/.run

$(VENV)/.lint: $(VENV)/.test
	$(PIP) --editable '.[lint]'
	@touch $@

$(VENV)/.docs: $(VENV)/.test
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/.made:
	@command -v $(PYTHON) > /dev/null || { \
	    echo "gigamlp needs Python >= 3.11, and there is no '$(PYTHON)' here. Install one, or: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "gigamlp needs Python >= 3.11, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	    echo "'$(PYTHON)' comes without venv. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
