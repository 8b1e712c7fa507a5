# What a command needs is set up in .venv. With PYTHON=/path/to/python, that Python is taken as it is: a
# flash_cute installed there is used, or else the library is built in this checkout.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help run test pytest sanitize lint format build wheel bench clean setup

PY := $(or $(PYTHON),.venv/bin/python)
# The checkout, where the tests and the bench are, comes after an installed flash_cute on the path.
INSTALLED := $(filter-out $(realpath .),$(if $(PYTHON),$(shell $(PY) -c "import importlib.util as u, \
  pathlib, sys; sys.path = [p for p in sys.path if p not in ('', '$(CURDIR)')]; \
  print(pathlib.Path(u.find_spec('flash_cute').origin).resolve().parents[1])" 2>/dev/null)))
WHERE := PYTHONSAFEPATH=1 PYTHONPATH="$(if $(INSTALLED),$(INSTALLED):)$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"
BUILD = $(if $(INSTALLED),@echo '== using the flash_cute in $(INSTALLED)',@$(PY) csrc/build_library.py $(1))

help: ## list these commands
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' Makefile | expand -t 16
	@echo 'With PYTHON=/path/to/python they use that Python and its torch, and touch no network.'

run: setup ## the main job: a transformer block on flash_cute, checked against a reference
	$(call BUILD,--for-example $(ARGS))
	@$(WHERE) $(PY) -m examples.transformer_block $(ARGS)

test: $(if $(PYTHON),,lint) pytest ## linters and tests (with PYTHON the tests alone); without a GPU, what runs without one

pytest: build ## the tests alone; ARGS="-k causal" goes to pytest
	@$(WHERE) $(PY) -m pytest $(if $(PYTHON),,-n 2 --dist loadfile) $(ARGS)

# Without the caching allocator each tensor has its own allocation, and memcheck sees its ends.
sanitize: build ## small calls of every kernel under compute-sanitizer (needs a GPU)
	@for tool in memcheck racecheck synccheck initcheck; do echo "== compute-sanitizer $$tool"; \
	  $(WHERE) PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
	    compute-sanitizer --tool $$tool --error-exitcode 1 $(PY) tests/sanitize.py $$tool; done

bench: build ## the benchmark (needs a GPU); ARGS="--suite train" goes to bench.run
	@$(WHERE) $(PY) -m bench.run $(ARGS)

build: setup ## the library, in place
	$(call BUILD)

wheel: setup ## a wheel for every Linux with glibc 2.28 or newer, in dist/
	@rm -f dist/*.whl
	@FLASH_CUTE_MANYLINUX=1 $(PY) -c 'import setup; setup.build_wheel("dist", {"--global-option": "-q"})'
	@echo '== asking auditwheel whether the wheel is what its name says'
	@PATH="$(dir $(PY)):$$PATH" $(PY) -m auditwheel repair dist/*.whl --wheel-dir build/audited \
	  --plat manylinux_2_28_$$(uname -m) --exclude 'libtorch*' --exclude 'libc10*'
	@ls -l dist/*.whl

CPP = $(shell find csrc tests bench -name '*.h' -o -name '*.cpp' -o -name '*.cu')
CLANG_FORMAT = @$(PY) -c 'import clang_format; clang_format.clang_format()'

lint: setup ## clang-format, ruff and mypy
	$(CLANG_FORMAT) --dry-run --Werror $(CPP)
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy

format: setup ## rewrite the files as the linters want them
	$(CLANG_FORMAT) -i $(CPP)
	@$(PY) -m ruff check --fix . && $(PY) -m ruff format .

clean: ## delete what was built, .venv excepted
	rm -rf build dist *.egg-info flash_cute/*.so .mypy_cache .ruff_cache .pytest_cache

setup: $(if $(PYTHON),,.venv/.ready)

.venv/.ready: requirements.txt csrc/build_library.py
	@echo '== setting up .venv (torch is large: the first time takes a while)'
	@[ -x .venv/bin/python ] || for python in python3 python3.{14,13,12,11,10} none; do \
	  if $$python -c 'import sys; exit(sys.version_info < (3, 10))' 2>/dev/null; then break; fi; done; \
	[ -x .venv/bin/python ] || $$python -m venv .venv || { rm -rf .venv; \
	  echo 'install Python 3.10 or newer with its venv (on Debian: apt install python3-venv)'; exit 1; }
	@$(PY) -m pip install --disable-pip-version-check -r requirements.txt
	@missing=$$($(PY) csrc/build_library.py --missing); \
	[ -z "$$missing" ] || $(PY) -m pip install --disable-pip-version-check $$missing
	@touch $@
