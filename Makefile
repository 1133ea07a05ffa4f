# make demo   set up, train digits with and without the pipeline, time steps on four hosts
# make test   set up, then lint, types, tests and README, on each Python there is
# make check  the same three commands as CONTRIBUTING, on .venv alone
# make convergence  all that docs/convergence.md shows; TEXT=tinyshakespeare.txt is
#             Karpathy's, 1.1 MB; a day on 2 cores. It goes on where it was broken off:
#             without experiments/results/convergence.json every run is run anew
# make soak   property tests on more than 10,000 generated cases, about 10 minutes

SHELL := /bin/bash
.DELETE_ON_ERROR:

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

TEXT ?= tinyshakespeare.txt

.PHONY: demo test check test-other convergence soak clean

demo: .venv/ready-demo
	.venv/bin/python -m experiments.demo

test: check $(if $(OTHER_PYTHON),test-other)

check: .venv/ready-dev
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest -n 2

test-other: .venv-other/ready-dev check
	.venv-other/bin/pytest -n 2

convergence: .venv/ready-demo
	@test -f "$(TEXT)" || { echo "There is no $(TEXT): say where it is, TEXT=..."; exit 1; }
	.venv/bin/python -m experiments.convex
	.venv/bin/python -m experiments.convergence --text "$(TEXT)"
	.venv/bin/python -m experiments.convergence.sharpness --text "$(TEXT)"
	.venv/bin/python -m experiments.delay_robust

soak: .venv/ready-dev
	.venv/bin/pytest tests/codecs tests/collectives --hypothesis-profile=soak

.venv/ready-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pipejax needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up .venv, which takes about a minute"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	touch $@

.venv-other/ready-%: pyproject.toml
	@echo "Setting up .venv-other, which takes about a minute"
	$(OTHER_PYTHON) -m venv .venv-other
	.venv-other/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	touch $@

clean:
	rm -rf .venv .venv-other runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache
