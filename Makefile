# Two commands matter on a fresh machine: `make verdicts` and `make test`. Both create .venv first (see .ci/install.py).
# While one works: `make quick`, and `make changed` before a commit.
#
# Variables, on the command line or in the environment:
#   PYTHON            the Python >= 3.11 that makes .venv                    (python3)
#   TORCH_INDEX       index that torch is taken from, e.g. the PyTorch project's CPU wheel index
#   ALLOW_CUDA_TORCH  1 accepts a CUDA build of torch on a machine without an NVIDIA GPU
#   LOCK              file of the releases to install; auto is .ci/cpu.lock or .ci/cuda.lock, empty goes by ranges  (auto)
#   WORKERS           processes that run tests side by side; 0 is none beside pytest's own, as --pdb needs      (auto)
#   BASE              what `changed` compares with                                                              (main)
#   ARGS              further arguments: pytest's for `test`, `quick`, `changed`; lab's, JupyterLab's; cases for `bench`
# pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS, ...) and configuration work as usual.

PYTHON ?= python3
ARGS ?=
WORKERS ?= auto
BASE ?= main
LOCK ?= auto
export LOCK TORCH_INDEX ALLOW_CUDA_TORCH

BIN := .venv/bin
CUDA_SOURCES = $(shell git ls-files "*.cu" "*.cuh")
# The tests that run, by tests/conftest.py, a file for each worker: what is left after a crash is what crashed.
export KILLGATE_RUNNING_TEST := build/running_test
# worksteal: neighbours share what their module makes once, and who is done first takes from the other's end.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
SELECT := not gpu and not browser
TYPES := $(BIN)/mypy && $(BIN)/lint-imports --no-logo

# pytest(arguments): run it; `status` is how it ended, and after its own death it is told in which test.
pytest = rm -f $(KILLGATE_RUNNING_TEST)*; status=0; $(PYTEST) $(1) $(ARGS) || { status=$$?; \
	for f in $(KILLGATE_RUNNING_TEST)*; do \
	if [ -s $$f ]; then echo "killgate: pytest itself died, in $$(cat $$f)" >&2; fi; done; }

.DEFAULT_GOAL := help
.PHONY: help install lock verdicts test browser quick changed mistakes lint style types lab notebooks bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@awk '/^#   [A-Z]/ { print substr($$0, 3) }' $(firstword $(MAKEFILE_LIST))

install:  ## create or update .venv; does nothing when it is up to date
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "killgate: no $(PYTHON) here; apt install python3 python3-venv, or name one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) .ci/install.py

lock:  ## resolve the ranges of pyproject.toml anew and write .ci/cpu.lock and .ci/cuda.lock
	@$(PYTHON) .ci/install.py lock

verdicts: install  ## judge, check every family, execute the notebooks, write build/site: about 90 s; needs no GPU
	$(BIN)/python -m lab verdicts $(ARGS)

# Types and contracts are checked beside the tests, for one core is enough for them; what they say comes at the end.
test: style  ## lint, types and every test but those marked gpu or browser
	@mkdir -p build
	@{ $(TYPES); } >build/types.txt 2>&1 & types=$$!; $(call pytest,-m "$(SELECT)"); \
	wait $$types || status=1; cat build/types.txt; exit $$status

browser:  ## the tests that need a browser: the site, a PDF, JupyterLab; Debian's chromium and pango first
	@$(PYTHON) .ci/install.py browser pdf
	$(BIN)/python -m pytest -m browser $(ARGS) tests/browser

quick: install  ## the tests that need no ahead-of-time build and no long simulation
	@$(call pytest,-m "$(SELECT) and not slow"); exit $$status

changed: install  ## the tests that what differs from BASE can reach; all of them where nobody can say
	@tests=$$($(BIN)/python -m tests.changed $(BASE)) && $(PYTEST) -m "$(SELECT)" $(ARGS) $$tests

mistakes: install  ## apply each deliberate mistake of tests/mistakes.toml to a copy, and name those that no test sees
	@$(BIN)/python -m tests.mistakes $(ARGS)

lint: style types  ## ruff, clang-format, mypy and the import contracts

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CUDA_SOURCES)

types: install
	$(TYPES)

lab: install  ## open the notebooks in JupyterLab
	JUPYTER_CONFIG_PATH=$(CURDIR)/notebooks/.jupyter $(BIN)/jupyter lab notebooks $(ARGS)

notebooks: install  ## execute the notebooks' sources again and write the .ipynb that are committed
	$(BIN)/python -m lab.write.pairing notebooks/*.py

bench: install  ## time the commands, `lab trace` and the harness, kill a measure 200 times: minutes, 1 GB of disk
	$(BIN)/python tests/cli/bench_commands.py
	$(BIN)/python tests/trace/bench_traces.py $(ARGS)
	$(BIN)/python -m tests.bench.bench_harness
	KILLS=200 $(BIN)/python -m pytest tests/row/test_kill.py

clean:  ## remove .venv, build/ and every cache; data/, profiles/ and notebooks/ stay
	rm -rf .venv build killgate.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
