# `make demo` and `make test` are each the one command on a fresh machine.
#
#   PYTHON   the interpreter that makes the virtual environment
#   VENV     where it goes; VENV=system installs nothing and uses PYTHON as it is (it must have torch and triton)
#   ARGS     further arguments for the demo, pytest or backend-coverage: make demo ARGS="--steps 50", make test ARGS="-k values"
#   JOBS     test processes at a time
#   RANKS    processes of demo-distributed: as many as there are GPUs, or any number on a CPU
#   PINS     the file of pinned versions that are installed

PYTHON ?= python3
VENV ?= .venv
JOBS ?= auto
RANKS ?= 2
PINS ?= constraints.txt
ARGS ?=

VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)

ifeq ($(VENV),system)
PY := $(PYTHON)
READY :=
DOCS_READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
DOCS_READY := $(VENV)/.installed-docs
endif

# Without pytest-xdist (a GPU machine with VENV=system, say) the tests run one after the other.
PARALLEL = $(shell $(PY) -c "import xdist" 2>/dev/null && echo "-n $(JOBS) --dist worksteal")
# A test that is stuck shows where, and ends its worker. The system's pytest may not know the second option.
STUCK := $(if $(READY),-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true)
# The workers share the cores among themselves, so each keeps to one thread.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest tests $(PARALLEL) $(STUCK) $(FULL) $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help release-check venv demo demo-distributed test test-all test-plain test-interpret backend-coverage lint format docs wheel clean

help:
	@echo "make demo      train a small language model with torch.nn and with fusedops, and compare"
	@echo "make demo-distributed  train one on RANKS processes, FSDP2 times tensor parallel, and compare with one process"
	@echo "make test      the short suite: a choice of each test's cases; those that need a GPU run where there is one"
	@echo "make test-all  all cases of all tests, which takes hours"
	@echo "make backend-coverage  which row-wise regions the compile backend fuses, in some 450 architectures"
	@echo "make lint      ruff, mypy, codespell"
	@echo "make format    let ruff rewrite the code"
	@echo "make docs      the site, into site/; a warning is an error"
	@echo "make wheel     source archive and wheel, into dist/"
	@echo "make release-check  what a tag needs: version, changelog, archive and wheel, tested in an environment of their own"
	@echo "make venv      only make the virtual environment"
	@echo "make clean     remove it and all caches"

venv: $(READY)

$(VENV)/.installed: pyproject.toml $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --upgrade pip  # old ones download whole wheels only to read what they depend on
	$(PY) -m pip install -e ".[demo,test,lint]" -c $(PINS)
	touch $@

# Apart from the rest: nobody who only tests needs the site's tools, and they need a newer Python.
$(VENV)/.installed-docs: $(VENV)/.installed
	$(PY) -m pip install -e ".[docs]" -c $(PINS)
	touch $@

demo: $(READY)
	$(PY) examples/train_lm.py $(ARGS)

demo-distributed: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/train_lm_distributed.py $(ARGS)

# Triton decides when a kernel is decorated whether it is interpreted or compiled: hence two processes.
test: test-plain test-interpret

test-all: FULL := --full
test-all: test-plain test-interpret

test-plain: $(READY)
	$(PYTEST)

test-interpret: $(READY)
	TRITON_INTERPRET=1 $(PYTEST)

backend-coverage: $(READY)
	OMP_NUM_THREADS=1 $(PY) tests/harness/backend_coverage.py $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy --strict tests/harness/typed_client.py
	$(PY) -m codespell_lib

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The variable silences a notice of the theme's about its successor.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# The wheel is built from the source archive, and so holds nothing that the archive lacks.
wheel: $(READY)
	rm -rf build dist
	$(PY) -m build --no-isolation

# The archive and the wheel that is built from it, installed in a new environment; then whether versions and date are set.
release-check: wheel
	$(PY) -m pytest tests/tools/test_packaging.py --built dist
	$(PY) -m fusedops doctor
	grep -q '^__version__ = "$(VERSION)"' fusedops/core/version.py
	@grep -q '^## $(VERSION) (unreleased)' CHANGELOG.md && { echo "CHANGELOG.md: $(VERSION) is unreleased; put the date"; exit 1; } || true
	grep -q '^## $(VERSION) ' CHANGELOG.md
	@echo "ready for the tag v$(VERSION)"

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache demo.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
