# The two main commands are `make run` and `make test`. They need python3.11 (or newer), make and git.
# uv is taken from the PATH or installed in .uv/. .venv/ has the versions of the lock, requirements.txt.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test test-slow test-gpu fuzz test-newest test-lowest smoke lint format lock notebooks bench tables accelerator clean

ARGS ?=
BIN := .venv/bin
VENV := .venv/.stamp
DOCS := .venv-docs/.stamp
UV := $(or $(shell command -v uv 2>/dev/null),.uv/bin/uv)
PRIVATE_UV := $(filter .uv/bin/uv,$(UV))
# The absolute path of the first of python3.11 and python3 that runs and is new enough, or empty.
PYTHON = $(shell for python in python3.11 python3; do $$python -c \
	'import sys; sys.version_info >= (3, 11) or sys.exit(1); print(sys.executable)' \
	2>/dev/null && break; done)
REQUIRE_PYTHON = @test -n "$(PYTHON)" || { \
	echo "bilevel needs Python 3.11 or newer, and neither python3.11 nor python3 here is one." >&2; \
	exit 1; }

# The files contain no timings, so a run that changes nothing leaves no diff. Each notebook has a
# process of its own, and may not take more memory than Colab has.
define EXECUTE_NOTEBOOKS
import os, resource, sys, nbclient, nbformat
for path in sys.argv[1:]:
    print(path, flush=True)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": os.path.dirname(path)}},
    ).execute()
    unit = 1 if sys.platform == "darwin" else 1024
    peak = unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e9
    print(f"{path}: peak memory {peak:.1f} GB", flush=True)
    if peak > 12.7:
        sys.exit(f"{path}: expected at most 12.7 GB of memory, as in Colab")
    if os.environ.get("BILEVEL_FAST", "0") in ("", "0"):
        nbformat.write(notebook, path)
endef
export EXECUTE_NOTEBOOKS

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

run: $(VENV) ## the main job, `bilevel search` on digits; more flags through ARGS
	$(BIN)/bilevel search $(ARGS)

test: $(VENV) ## the tests and the doctests; pytest's flags through ARGS
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(VENV) ## the tests that `make test` skips: those marked slow or long
	$(BIN)/python -m pytest -m slow $(ARGS)

# The tests that matter on a device: precision, kernels, solvers, searches, certificates.
ON_DEVICE = $(addprefix tests/core/test_,accelerator_rounding.py precision.py linear.py \
	hypergradient.py constrained_solvers.py) \
	$(addprefix tests/ntk/test_,tiles.py kernel_rounding.py ntk_bounds.py finite.py operator.py) \
	$(addprefix tests/outer_loop/test_,checkpoint.py search.py generated_search.py)
# Searches resume bit for bit on a GPU only with deterministic operations and the same kernels.
test-gpu: export XLA_FLAGS = --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0
test-gpu: export XLA_PYTHON_CLIENT_PREALLOCATE = false
test-gpu: $(VENV) ## the tests that matter on a GPU; fails without one
	$(BIN)/python -c 'import jax; assert jax.default_backend() != "cpu", "no accelerator"'
	$(BIN)/python -m pytest $(or $(ARGS),$(ON_DEVICE))

fuzz: $(VENV) ## 10,000 new examples of the generated tests, in hours; ARGS=tests/ntk for some of them
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=fuzz \
		-o faulthandler_timeout=3600 $(or $(ARGS),tests)

test-newest: $(PRIVATE_UV) ## tests of JAX's internals, README, commands on the newest JAX and Python here
	UV=$(UV) .ci/newest

test-lowest: $(VENV) ## imports, files and commands on the lowest versions of all dependencies
	UV=$(UV) .ci/lowest

smoke: $(VENV) ## run the benchmarks for a few seconds each; ARGS=--all: also those untouched by the commit
	$(BIN)/python tools/smoke.py $(ARGS)

lint: lint-style lint-types ## style, formatting, docstrings, types, direction of imports

.PHONY: lint-style lint-types
lint-style: $(VENV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	git ls-files 'bilevel/*.py' 'ntk/*.py' | xargs $(BIN)/python -m numpydoc lint
	$(BIN)/lint-imports --no-logo

lint-types: $(VENV)
	$(BIN)/mypy

format: $(VENV) ## format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock: $(PRIVATE_UV) ## update requirements.txt from pyproject.toml; ARGS=--upgrade for newer versions
	$(UV) pip compile pyproject.toml --extra neural-tangents --group dev --universal --python-version 3.11 \
		--fork-strategy fewest --generate-hashes --no-header --quiet -o requirements.txt $(ARGS)

# Fast mode only checks the notebooks. Their files keep the outputs of the full run.
NOTEBOOKS ?= notebooks/*.ipynb
notebooks: $(VENV) ## execute the notebooks in place; BILEVEL_FAST=1: quickly, leaving the files alone
	printf '%s\n' $(NOTEBOOKS) | xargs -n 1 -P 2 $(BIN)/python -c "$$EXECUTE_NOTEBOOKS"

.PHONY: docs
docs: $(DOCS) ## the documentation, into docs/_build/html; a warning is an error
	.venv-docs/bin/sphinx-build -W --keep-going --quiet --jobs auto docs docs/_build/html
	@echo docs/_build/html/index.html

bench: $(VENV) ## the quick benchmarks: hypergradients, memory, kernels, feature maps, theory, deep
	$(BIN)/python benchmarks/hypergradients/hypergradients.py --quick
	$(BIN)/python benchmarks/hypergradients/memory.py
	$(BIN)/python benchmarks/kernels/kernels.py --quick
	$(BIN)/python benchmarks/scale/large_kernel.py --quick
	$(BIN)/python benchmarks/feature_maps/feature_maps.py --quick
	$(BIN)/python benchmarks/theory/concentration.py --quick
	$(BIN)/python benchmarks/theory/discretization.py --quick
	$(BIN)/python benchmarks/theory/lipschitz.py --quick
	$(BIN)/python benchmarks/theory/spectral.py --quick
	$(BIN)/python benchmarks/deep_search/activation_skip_search.py --quick
	$(BIN)/python benchmarks/deep_search/eigenvalue_depth.py --quick
	$(BIN)/python benchmarks/deep_search/darts_gap.py --quick
	$(BIN)/python benchmarks/deep_search/darts_step.py --quick
	$(BIN)/python benchmarks/train_free/nasbench201.py --quick

tables: $(VENV) ## write the measured tables in README.md and docs/ from benchmarks/results; ARGS=--check
	$(BIN)/python tools/tables.py $(ARGS)

accelerator: $(VENV) ## benchmarks for an accelerator, 9 minutes, resumable; ARGS=--quick: tiny, on any device
	$(BIN)/python benchmarks/scale/accelerator.py $(ARGS)

clean: ## remove environments, caches and build outputs; keeps runs/
	rm -rf .venv .venv-docs .venv-newest .venv-lowest .uv docs/_build docs/gallery build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.uv/bin/uv:
	$(REQUIRE_PYTHON)
	"$(PYTHON)" -m venv .uv
	.uv/bin/python -m pip install --quiet uv

# Build isolation installs hatchling, which builds the editable install.
$(VENV): requirements.txt pyproject.toml | $(PRIVATE_UV)
	$(REQUIRE_PYTHON)
	test -x $(BIN)/python || { rm -rf .venv && $(UV) venv --quiet --python "$(PYTHON)" .venv; }
	$(UV) pip sync --quiet --python $(BIN)/python --require-hashes requirements.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $@

# A separate environment with the same versions, because .venv has only the locked packages.
$(DOCS): requirements.txt pyproject.toml | $(PRIVATE_UV)
	$(REQUIRE_PYTHON)
	test -x .venv-docs/bin/python || $(UV) venv --quiet --python "$(PYTHON)" .venv-docs
	$(UV) pip install --quiet --python .venv-docs/bin/python --constraint requirements.txt \
		--group docs --editable ".[plots]"
	touch $@
