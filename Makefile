# make demo    set up, then start the dashboard on the bundled models and print its address
# make test    set up, then lint, types and all tests
# make lint    set up, then ruff and pyright
# make clean   remove the environment and everything built
#
# Each works in a fresh clone and does its own set-up in .venv, once: the files .venv/.ready-* say what is done.
# The network is needed for the set-up only.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint browser clean

VENV := .venv
PY := $(VENV)/bin/python
# The build backend of an editable install warns about folders named like the package.
INSTALL := PYTHONWARNINGS=ignore $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.ready-demo
	@$(VENV)/bin/t2lens app

# One thread each: the models under test are tiny, and two workers share the cores.
test: browser $(VENV)/.ready-dev lint
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal

lint: $(VENV)/.ready-dev
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m pyright --pythonpath $(PY)

$(VENV)/.ready-demo: pyproject.toml constraints.txt $(VENV)/.ready-pip
	@echo "installing t2lens into $(VENV) (once; a few minutes)"
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt $(VENV)/.ready-pip
	@echo "installing t2lens and its test tools into $(VENV) (once; a few minutes)"
	@$(INSTALL) --editable ".[dev]"
	@touch $@ $(VENV)/.ready-demo

# A new machine can have a pip too old for what follows. The file is touched last, so an interrupted set-up starts again.
$(VENV)/.ready-pip:
	@for python in $${PYTHON:-} python3 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(VENV) with $$($$python --version)"; \
	    $$python -m venv --clear $(VENV); \
	    $(INSTALL) --upgrade pip; \
	    touch $@; \
	    exit 0; \
	  fi; \
	done; \
	echo "t2lens needs Python 3.11 or newer with its venv module (on Debian: apt-get install python3-venv);" \
	  "name one with: make PYTHON=/path/to/python3 ..." >&2; \
	exit 1

# The browser tests drive Chromium. Root on a Debian-like machine gets it installed; everybody else gets one sentence.
browser:
	@for name in chromium chromium-browser google-chrome; do \
	  if command -v $$name >/dev/null; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing chromium for the browser tests"; \
	  apt-get update -qq >/dev/null; \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	else \
	  echo "The browser tests need Chromium, which was not found: install it (on Debian, as root: apt-get install" \
	    "chromium), or run the other tests with: $(PY) -m pytest -m 'not e2e'" >&2; \
	  exit 1; \
	fi

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find hooks apps t2lens tests -name __pycache__ -type d -prune -exec rm -rf {} +
