# Everything a newcomer needs: `make demo` and `make test` set up .venv themselves.

PYTHON ?= python3
TORCH_VERSION ?= 2.13.0

VENV := .venv
ENV_PYTHON := $(VENV)/bin/python
PIP := $(ENV_PYTHON) -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
UNFINISHED := $(VENV)/.unfinished
TARGETS := .venv-targets

# A PYTHON that the user names is the only one tried; otherwise versioned names stand in for an old python3.
ifeq ($(origin PYTHON),file)
CANDIDATES := $(PYTHON) python3.13 python3.12 python3.11
else
CANDIDATES := $(PYTHON)
endif
RECENT := -c 'import sys; sys.exit(sys.version_info < (3, 11))'

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all torture fuzz-models targets docs lock clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo
	@echo "  PYTHON=...            the Python (3.11 or newer) that .venv is made from"
	@echo "  TORCH_INDEX_URL=...   the wheel index PyTorch comes from (its CPU wheels are the small ones)"
	@echo "  STAGEWRIGHT_SEED=...  of what torture and fuzz-models draw; their last line names it"

demo: $(INSTALLED) ## Plan Llama-3-8B for 8 GPUs, then plan and train a small Llama on this machine (a minute)
	$(ENV_PYTHON) -m stagewright.cli demo

test: $(INSTALLED) ## Run every check: format, lint, types, import contracts, tests, doc examples
	@$(MAKE) --no-print-directory targets > $(VENV)/targets.log 2>&1 \
	    || echo "Megatron-Core, torchtitan and DeepSpeed are not installed ($(VENV)/targets.log): exports are not given to their parsers"
	$(ENV_PYTHON) check

check: $(INSTALLED) ## Run format, lint, types, import contracts and the quick tests, while you write
	$(ENV_PYTHON) check --fast

test-all: $(INSTALLED) ## Run every check, the slow tests included
	STAGEWRIGHT_TEST_ALL=1 $(ENV_PYTHON) check

torture: $(INSTALLED) ## Damage runs, checkpoints, caches and documents at random, thousands of times (an hour; nightly)
	STAGEWRIGHT_TORTURE=1 $(ENV_PYTHON) -m pytest tests -m torture -n auto --dist worksteal --timeout 3600

fuzz-models: $(INSTALLED) ## Compare 2,000 random models with plain training (half an hour; nightly)
	STAGEWRIGHT_FUZZ=1 $(ENV_PYTHON) -m pytest tests/execution/test_random_models.py -n auto --dist worksteal --timeout 3600

targets: $(TARGETS)/.installed ## Install Megatron-Core, torchtitan and DeepSpeed, whose own parsers check exports in the tests (a minute)

# Megatron-Core asks for Python 3.12, but its parser of arguments runs on every Python that Stagewright runs on.
$(TARGETS)/.installed: $(INSTALLED)
	rm -rf $(TARGETS) && $(ENV_PYTHON) -m venv $(TARGETS)
	DS_BUILD_OPS=0 $(TARGETS)/bin/python -m pip install $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) \
	    torch==$(TORCH_VERSION) triton setuptools torchtitan==0.3.0 deepspeed==0.19.8
	$(TARGETS)/bin/python -m pip install --no-deps --only-binary=:all: --python-version 3.12 --ignore-requires-python \
	    --target $(TARGETS)/megatron megatron-core==0.19.2
	touch $@

docs: $(INSTALLED) ## Build the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(ENV_PYTHON) -m mkdocs build --strict
	@echo "Open build/site/index.html; search needs a server: $(ENV_PYTHON) -m mkdocs serve"

lock: $(INSTALLED) ## Write the versions that .venv has to requirements.lock
	{ sed '/^[^#]/,$$d' requirements.lock; $(PIP) freeze --exclude-editable | sed 's/+[a-z0-9]*$$//' \
	    | grep -iv '^nvidia-\|^triton'; } > requirements.new
	mv requirements.new requirements.lock

clean: ## Remove the environment, the caches and the built packages
	rm -rf $(VENV) $(TARGETS) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last. A mark left by an interrupted installation makes the next one start afresh,
# because a half-copied package can look installed.
$(INSTALLED): pyproject.toml requirements.lock
	@if [ -e $(UNFINISHED) ]; then \
	    echo "The last installation did not finish: starting afresh."; rm -rf $(VENV); \
	fi
	@if ! $(ENV_PYTHON) $(RECENT) 2>/dev/null; then \
	    for candidate in $(CANDIDATES); do \
	        if $$candidate $(RECENT) 2>/dev/null; then python=$$candidate; break; fi; \
	    done; \
	    if [ -z "$$python" ]; then \
	        echo "Stagewright needs Python 3.11 or newer; tried: $(CANDIDATES)." >&2; \
	        echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
	        exit 1; \
	    fi; \
	    echo "Making $(VENV) with $$($$python --version)."; \
	    rm -rf $(VENV) && mkdir $(VENV) && touch $(UNFINISHED) && $$python -m venv $(VENV); \
	fi
	@touch $(UNFINISHED)
	@echo "Installing PyTorch $(TORCH_VERSION), then the rest; this takes a few minutes, once."
	$(PIP) install torch==$(TORCH_VERSION) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	$(PIP) install -e '.[dev]' -c requirements.lock
	@echo "Compiling kernels, which are kept on disk; a minute, once."
	-$(ENV_PYTHON) -m compileall -q src/stagewright
	-$(ENV_PYTHON) -m stagewright.cli plan tiny-llama --cluster 4x-rtx4090 --global-batch 16 --sequence-length 256 \
	    --memory-limit 150MiB > /dev/null
	@rm $(UNFINISHED) && touch $@
