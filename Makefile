# make demo      set up, then train digits and race on two emulated hosts
# make test      set up, then lint, types and one case of each quick test, on each
#                Python there is
# make check     the same on one Python
# make test-all  every test on each Python, part by part; it goes on where it was broken
#                off. One part: make test-all PARTS=launch. CONTRIBUTING.md names the parts.
# make docs      the site, in build/site/index.html; its tutorials run once, then come
#                from a cache
# make convergence  all that docs/benchmarks/accuracy.md shows; TEXT=tinyshakespeare.txt is
#             Karpathy's, 1.1 MB; a day on 2 cores. It goes on where it was broken off:
#             without experiments/results/convergence.json every run is run anew
# make soak      property tests on more than 10,000 generated cases, without and with x64,
#                about 20 minutes

SHELL := /bin/bash
.DELETE_ON_ERROR:
# Packages are installed without bytecode, and each module keeps its own at first import.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
# A second interpreter, so that the oldest and the newest JAX are both tested: JAX 0.10 is
# the newest for Python 3.11, later ones need 3.12. Empty where there is only one.
OTHER_PYTHON ?= $(shell \
  have=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
  for v in 3.12 3.11; do \
    [ $$v = $$have ] && continue; \
    for p in python$$v $$HOME/.pyenv/versions/$$v*/bin/python; do \
      $$p -c 'import venv' 2>/dev/null && { echo $$p; exit; }; \
    done; \
  done)

VENVS := .venv $(if $(OTHER_PYTHON),.venv-other)
TEXT ?= tinyshakespeare.txt

.PHONY: demo test check lint types quick quick-other test-all docs convergence soak clean

demo: .venv/ready-demo
	.venv/bin/python -m experiments.demo

test:
	@$(MAKE) --no-print-directory -j2 .venv/ready-dev \
	  $(if $(OTHER_PYTHON),.venv-other/ready-test)
	@$(MAKE) --no-print-directory check $(if $(OTHER_PYTHON),quick-other)

# Every worker collects all tests and traces its own programs, so there are only two.
check: .venv/ready-dev
	@$(MAKE) --no-print-directory -j3 lint types quick

lint: .venv/ready-dev
	.venv/bin/ruff check . && .venv/bin/ruff format --check .

types: .venv/ready-dev
	.venv/bin/mypy

# On x86, no test is compiled with multiply-add instructions, which XLA contracts in one
# program and not in another, and matmuls, which XLA leaves to oneDNN, have none either:
# bits that must be equal are. The quick tests also compile quickly, and leave out the
# fusion emitters of JAX 0.10, which later versions always have.
export ONEDNN_MAX_CPU_ISA := AVX
MACHINE := $(shell uname -m)
BITS := $(if $(filter x86_64,$(MACHINE)),--xla_cpu_max_isa=AVX)
QUICKLY := --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1
JAX_0_10 := $(if $(filter 11,$(shell $(PYTHON) -c 'import sys; print(sys.version_info[1])')),\
  $(if $(BITS),--xla_cpu_use_fusion_emitters=false))

quick: .venv/ready-dev
	XLA_FLAGS="$(BITS) $(QUICKLY) $(JAX_0_10)" .venv/bin/pytest -n 2 --cases 1

# What calls JAX the most.
core := $(addprefix tests/,core/executors train_step/test_step.py \
  flax/test_variables.py internal/test_jaxpr.py)

quick-other: .venv-other/ready-test
	XLA_FLAGS="$(BITS) $(QUICKLY)" .venv-other/bin/pytest -n 2 --cases 1 \
	  -m "not full and not one_python" $(core)

# What each part of `make test-all` runs. Passed parts are remembered by Python and by the
# contents of the checkout, so a broken-off run goes on and a changed one begins anew.
PARTS ?= step exchange executors theory schedules timing launch experiments
step := pipejax tests/*.py tests/checkpoint tests/core/*.py \
  $(addprefix tests/core/,checks message partitioned prediction rounds step) \
  tests/flax tests/internal tests/train_step tests/transforms
exchange := tests/codecs tests/collectives
executors := tests/core/executors
theory := tests/problems tests/stability
schedules := tests/overlap
timing := tests/cli tests/timing
launch := tests/launch
experiments := tests/experiments tests/figures
CHECKOUT = $(shell { git rev-parse HEAD && git diff HEAD && \
  git ls-files --others --exclude-standard -z | xargs -0 cat; } | sha1sum | cut -c1-12)

test-all: lint types $(foreach venv,$(VENVS),$(venv)/ready-dev) .venv/ready-docs
	@for venv in $(VENVS); do for part in $(PARTS); do \
	  $(MAKE) --no-print-directory build/passed/$(CHECKOUT)/$$venv/$$part || exit; \
	done; done

build/passed/%:
	XLA_FLAGS="$(BITS)" $(word 2,$(subst /, ,$*))/bin/pytest -n 3 -m "" $($(notdir $*))
	@mkdir -p $(@D) && touch $@

docs: .venv/ready-docs
	.venv/bin/sphinx-build --fail-on-warning --keep-going -j auto docs build/site

convergence: .venv/ready-demo
	@test -f "$(TEXT)" || { echo "There is no $(TEXT): say where it is, TEXT=..."; exit 1; }
	.venv/bin/python -m experiments.convex
	.venv/bin/python -m experiments.convergence --text "$(TEXT)"
	.venv/bin/python -m experiments.convergence.sharpness --text "$(TEXT)"
	.venv/bin/python -m experiments.delay_robust

soak: .venv/ready-dev
	.venv/bin/pytest -m "" tests/codecs tests/collectives --hypothesis-profile=soak
	JAX_ENABLE_X64=1 .venv/bin/pytest -m "" tests/codecs tests/collectives \
	  --hypothesis-profile=soak

.venv/ready-%: SET_UP = $(PYTHON)
.venv-other/ready-%: SET_UP = $(OTHER_PYTHON)
PIP_INSTALL = $(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-compile

# The newest pip needs 60% of the processor time of the one that comes with Python 3.11.
define set_up
@$(SET_UP) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "pipejax needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
@echo "Setting up $(@D), which takes about a minute"
test -x $(@D)/bin/python || $(SET_UP) -m venv $(@D)
$(PIP_INSTALL) --upgrade pip
$(PIP_INSTALL) -e '.[$*]'
touch $@
endef

# Two rules, because of a pattern rule with two targets make believes that one run of its
# recipe has made both environments.
.venv/ready-%: pyproject.toml
	$(set_up)

.venv-other/ready-%: pyproject.toml
	$(set_up)

clean:
	rm -rf .venv .venv-other runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache
