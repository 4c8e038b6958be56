# make demo   evaluate a real model under quantized communication and write a report   (no model hub, no GPU, minutes)
# make test   lint, types, the whole test suite, and the model tests again with the oldest transformers
# make sanitize      the native CPU code under sanitizers, and builds that break the contract (part of make test)
# make sanitize-gpu  the CUDA kernels under compute-sanitizer, a record in reports/native (needs a GPU)
# make lock   refresh constraints.txt from this environment
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo
# Short windows, more of them: at equal cost more pairs for the error of a delta, if not the protocol of the papers.
WINDOWS ?= 12
WINDOW_TOKENS ?= 256
QUESTIONS ?= 100
# The CUDA codec takes minutes to compile and is of no use where there is no GPU; FC_EVAL_CUDA=1 builds it all the same.
export FC_EVAL_CUDA ?= $(if $(wildcard /dev/nvidia0),auto,0)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Many tests wait for child processes, which leave a core idle. Files in the order of tests/conftest.py; one thread each,
# because threads of two workers would wait for one another on two cores.
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile --no-loadscope-reorder
test test-oldest: export OMP_NUM_THREADS ?= 1

# The oldest transformers that is supported, in an environment that has all the rest from the first one.
OLDEST := $(VENV)-oldest
MODEL_TESTS := $(addprefix tests/test_,tp_smollm2.py tp_models.py rank_by_rank.py sites.py forward.py models.py perplexity.py)
# The default model in one of its splits: how it is read and what its plan says is all that differs between versions.
ONE_SPLIT := -k 'not over_real_ranks or 3-full'

.PHONY: demo test test-oldest lint sanitize sanitize-gpu lock clean

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit("fc_eval needs Python 3.11 to 3.13, this is %d.%d: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing fc_eval into $(VENV) (a few minutes the first time)"
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	@echo "four runs (baseline, INT8, INT4/INT8, INT4), about a minute each on two CPU cores; a second 'make demo' computes only what is missing"
	$(BIN)/fc-eval run -m comm=int8,int4_int8,int4 tp=4 'eval=[text,everyday]' eval.runs.text.window_tokens=$(WINDOW_TOKENS) eval.runs.text.limit=$(WINDOWS) eval.runs.everyday.limit=$(QUESTIONS) processes=2 out=$(DEMO)/runs
	$(BIN)/fc-eval report $(DEMO)/runs --out $(DEMO)/report

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(OLDEST)/.installed: $(VENV)/.installed-dev fc_eval/models/versions.py scripts/oldest_environment.py
	$(BIN)/python scripts/oldest_environment.py $(OLDEST)
	@touch $@

test: lint
	$(BIN)/pytest $(SIDE_BY_SIDE)
	$(MAKE) test-oldest

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest $(SIDE_BY_SIDE) $(ONE_SPLIT) $(MODEL_TESTS)

sanitize: $(VENV)/.installed-dev
	$(BIN)/pytest -rs --durations=5 tests/test_native_build.py

sanitize-gpu: $(VENV)/.installed
	PYTHON=$(BIN)/python scripts/sanitize_gpu.sh

lock: $(VENV)/.installed-dev
	$(BIN)/python -m pip freeze --exclude-editable | sed "s/+cpu//" > constraints.txt.new
	mv constraints.txt.new constraints.txt

clean:
	rm -rf $(VENV) $(OLDEST) $(DEMO) build dist *.egg-info
